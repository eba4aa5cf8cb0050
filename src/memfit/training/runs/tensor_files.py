"""Safetensors files of whole tensors, or of a rank's shards as PyTorch's `HuggingFaceStorageWriter` writes them.

A shard has the name of its tensor, and the file's metadata says where it begins in it. So
`torch.distributed.checkpoint` reads these files with `HuggingFaceStorageReader`, and this module reads what it writes.
Both are done here since PyTorch's writer makes all of a rank's shards anew in memory before it writes them, and its
reader checks neither that a tensor is complete nor its dtype.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from memfit._torch import chunk_of, is_first_copy, is_shared, local_part
from memfit.errors import CheckpointError, DamagedCheckpointError
from memfit.hardware import pins_memory, synchronize

_SHARD = re.compile(r"(model|optimizer)-shard-([0-9]{5})-of-([0-9]{5})\.safetensors")
_OFFSETS, _VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
_RESERVED = ("format", _OFFSETS, _VERSION)
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def shard_name(stem: str, rank: int, size: int) -> str:
    """Return the name of the file of a rank's shards."""
    return f"{stem}-shard-{rank + 1:05}-of-{size:05}.safetensors"


def is_shard_name(name: str) -> bool:
    """Tell whether a file is named as one of shards."""
    return _SHARD.fullmatch(name) is not None


def shard_count(names: Sequence[str]) -> int:
    """Return the number of ranks that wrote shards, by the names of the files; 0 where none are of shards."""
    return max((int(match[3]) for name in names if (match := _SHARD.fullmatch(name))), default=0)


def has_shards(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether ranks have parts of any tensor."""
    return any(is_shared(type(tensor)) for tensor in tensors.values())


def own_shards(
    tensors: Mapping[str, torch.Tensor], rank: int, notes: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return this rank's shards and the metadata of their file; of what all ranks have alike, the first has one copy.

    Args:
        notes: More metadata of the file.
    """
    own: dict[str, torch.Tensor] = {}
    offsets: dict[str, Any] = {}
    for key, tensor in tensors.items():
        part, start = local_part(tensor), [0] * tensor.dim()
        if is_shared(type(tensor)):
            start, _ = chunk_of(tensor)
            is_written = is_first_copy(tensor) and (part.numel() > 0 or (tensor.numel() == 0 and rank == 0))
        else:
            is_written = rank == 0
        if is_written:
            own[key], offsets[key] = part, {"saved_offsets": start}
    return own, {"format": "pt", _VERSION: "1.0", _OFFSETS: json.dumps(offsets), **notes}


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor in a file: where it begins in the tensor, and its shape."""

    file: Any
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class Stored(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files, whole or in shards, which are read when they are asked for, onto the CPU.

    Attributes:
        notes: The metadata of the files that is not about their format.

    Raises:
        DamagedCheckpointError: A file is none of safetensors, or lacks a part of a tensor.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.notes: dict[str, str] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for path in paths:
            try:
                self._open(path)
            except (OSError, SafetensorError, ValueError, KeyError) as e:
                raise DamagedCheckpointError(f"{path} is not a safetensors file of shards: {e}") from e
        for key, pieces in self._pieces.items():
            there = sum(math.prod(piece.shape) for piece in pieces)
            if there != math.prod(self.shape(key)):
                raise DamagedCheckpointError(
                    f"{paths[0].parent} has {there} elements of {key}, and its shape is {self.shape(key)}"
                )

    def _open(self, path: Path) -> None:
        file: Any = safe_open(path, framework="pt")
        metadata = dict(file.metadata() or {})
        offsets = json.loads(metadata.get(_OFFSETS, "{}"))
        self.notes.update((key, value) for key, value in metadata.items() if key not in _RESERVED)
        for key in file.keys():
            cut = file.get_slice(key)
            shape = tuple(cut.get_shape())
            start = tuple(offsets[key]["saved_offsets"]) if offsets else (0,) * len(shape)
            self._pieces.setdefault(key, []).append(_Piece(file, start, shape, _DTYPES[cut.get_dtype()]))

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __getitem__(self, key: str) -> torch.Tensor:
        shape = self.shape(key)
        return self._part(key, (0,) * len(shape), shape)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        ends = [[a + b for a, b in zip(piece.start, piece.shape, strict=True)] for piece in self._pieces[key]]
        return tuple(map(max, zip(*ends, strict=True)))

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's dtype."""
        return self._pieces[key][0].dtype

    def bytes(self, key: str) -> int:
        """Return the bytes of a whole tensor."""
        return math.prod(self.shape(key)) * self.dtype(key).itemsize

    def like(self, key: str, own: torch.Tensor) -> torch.Tensor:
        """Return a tensor, with its own dtype, as ranks have another one: this rank's part alone is read of it."""
        if not is_shared(type(own)) or self.shape(key) != tuple(own.shape):
            return self[key]
        read = self._part(key, *chunk_of(own))
        tensor = torch.empty_like(own.detach(), dtype=read.dtype)
        local_part(tensor).copy_(read)
        return tensor

    def _part(self, key: str, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        pieces = self._pieces[key]
        for piece in pieces:
            if piece.start == tuple(start) and piece.shape == tuple(shape):
                whole: torch.Tensor = piece.file.get_tensor(key)
                return whole
        result = torch.empty(tuple(shape), dtype=self.dtype(key))
        for piece in pieces:
            low = [max(a, b) for a, b in zip(start, piece.start, strict=True)]
            ends = zip(start, shape, piece.start, piece.shape, strict=True)
            high = [min(a + m, b + n) for a, m, b, n in ends]
            if all(a < b for a, b in zip(low, high, strict=True)):
                read = piece.file.get_slice(key)[_between(low, high, piece.start)]
                result[_between(low, high, start)] = read
        return result


def _between(low: Sequence[int], high: Sequence[int], start: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices from `low` to `high` of something that begins at `start`."""
    return tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))


class HostBuffers:
    """Copies of tensors in host memory, pinned for accelerators that copy faster to it.

    Memory is taken at the first copy, and used again for tensors of the same name, shape and dtype.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def copied(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """Return contiguous copies of the tensors of some files, which last until the next call."""
        before, self._buffers = self._buffers, {}
        for file, tensors in files.items():
            for key, tensor in tensors.items():
                buffer = before.pop((file, key), None)
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    is_pinned = pins_memory(tensor.device.type)
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
                self._buffers[file, key] = buffer.copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensors in files.values() for tensor in tensors.values()}:
            synchronize(device)
        return {file: {key: self._buffers[file, key] for key in tensors} for file, tensors in files.items()}


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, each contiguous; tensors that share a storage are written separately.

    Raises:
        OSError: The file can't be written.
    """
    seen: set[int] = set()
    separate = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[key] = (tensor.clone() if storage in seen else tensor).contiguous()
        seen.add(storage)
    try:
        save_file(separate, path, metadata)
    except SafetensorError as e:
        raise OSError(str(e)) from e


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, on the CPU, and its metadata.

    Raises:
        CheckpointError: It is not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path} is not a safetensors file: {e}") from e
