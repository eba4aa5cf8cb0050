"""A teacher's outputs, computed once and kept in a file: safetensors, a row for each sample of the data.

A sample is identified by a hash of its tensors, so that shuffled data finds its rows; augmented data does not.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from memfit import ir
from memfit.errors import OutputError, WorkloadError
from memfit.training import evaluation_mode
from memfit.workload import Workload, batch_size_of, slice_batch, tensors_of

_KEY_BYTES = 16
_FORMAT = "memfit teacher 1"


def precompute(
    workload: Workload,
    teacher: nn.Module,
    path: Path | str,
    *,
    batches: Iterable[Any] | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a teacher's outputs on the data: `distill(workload, path)` then trains without the teacher.

    A file that already holds this teacher's outputs for such data is left as it is.

    Args:
        workload: A workload whose loss calls the teacher in place of its own model. Nothing of it is changed.
        teacher: The teacher; it runs in evaluation mode, without gradients, and is left unchanged.
        path: The file, written whole or not at all.
        batches: Every sample that training will see, in any order; `Workload.batches` by default, an epoch of it, and
            `Workload.batch`. Mind loaders that drop the last batch.
        dtype: Dtype that outputs are stored in; None keeps theirs.
        overwrite: Whether to replace another file.

    Raises:
        OutputError: The file holds something else, or can't be written.
        WorkloadError: The loss does not call its model exactly once, for an output with a row for each sample.
    """
    path, wanted = Path(path), {"format": _FORMAT, "teacher": _fingerprint(teacher), "samples": _signature(workload)}
    if path.exists() and not overwrite:
        if _metadata(path) == wanted:
            return path
        raise OutputError(f"{path} exists, without this teacher's outputs: give overwrite=True to replace it")
    rows: dict[bytes, Tensor] = {}
    model = _Answering(teacher)
    with evaluation_mode(teacher):
        for batch in (workload.batch, *((workload.batches or ()) if batches is None else batches)):
            for key, row in zip(keys(batch), model.answers(workload, batch), strict=True):
                rows[key] = row.cpu() if dtype is None else row.to("cpu", dtype)
    sample_keys = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), _KEY_BYTES)
    tensors = {"keys": sample_keys, "outputs": torch.stack(list(rows.values()))}
    return ir.codec.write_atomic(path, safetensors.torch.save(tensors, metadata=wanted))


class _Answering(nn.Module):
    """A teacher that notes its outputs."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher, self.seen = teacher, list[Any]()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(self.teacher(*args, **kwargs))
        return self.seen[-1]

    def answers(self, workload: Workload, batch: Any) -> Tensor:
        self.seen.clear()
        workload.loss_fn(self, batch)
        if len(self.seen) != 1 or logits_of(self.seen[0]).shape[0] != batch_size_of(batch):
            raise WorkloadError(
                "Workload.loss_fn must call the model exactly once, and its output must have a row for each sample"
            )
        return logits_of(self.seen[0])


class Targets:
    """A file of a teacher's outputs that `precompute` wrote, in memory.

    Args:
        workload: The workload whose samples it shall hold.

    Raises:
        WorkloadError: The file can't be read, or was made for samples of other shapes.
    """

    def __init__(self, path: Path, workload: Workload) -> None:
        metadata, wanted = _metadata(path), _signature(workload)
        if metadata is None or metadata.get("format") != _FORMAT:
            raise WorkloadError(
                f"teacher={str(path)!r} was not written by memfit.structure.precompute: give a file from precompute"
            )
        if metadata["samples"] != wanted:
            raise WorkloadError(
                f"teacher={str(path)!r} has outputs for samples of {metadata['samples']}, and Workload.batch has"
                f" {wanted}: run memfit.structure.precompute for this workload"
            )
        tensors = safetensors.torch.load_file(path)
        self._path, self._outputs = path, tensors["outputs"]
        self._rows = {bytes(key): row for row, key in enumerate(tensors["keys"].numpy())}

    def with_batch(self, batch: Any) -> dict[str, Any]:
        """Return a batch together with the teacher's outputs for it.

        Raises:
            WorkloadError: Some of its samples are not in the file.
        """
        rows = [self._rows.get(key) for key in keys(batch)]
        missing = rows.count(None)
        if missing:
            raise WorkloadError(
                f"{missing} of {len(rows)} samples of a batch are not in {self._path}: they are augmented, or were not"
                " in batches= of memfit.structure.precompute. Give precompute every sample, exactly as in training"
            )
        return {"batch": batch, "teacher": self._outputs[torch.tensor(rows)]}

    def joined(self, workload: Workload) -> Workload:
        """Return a workload whose batches come with the teacher's outputs."""
        batches = None if workload.batches is None else WithTargets(workload.batches, self)
        return dataclasses.replace(workload, batch=self.with_batch(workload.batch), batches=batches)


class WithTargets:
    """Batches with the teacher's outputs; all other attributes are those of the original batches."""

    def __init__(self, batches: Iterable[Any], targets: Targets) -> None:
        self.batches, self.targets = batches, targets

    def __iter__(self) -> Iterator[Any]:
        return map(self.targets.with_batch, self.batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in ("batches", "targets"):  # while this is being copied
            raise AttributeError(name)
        return getattr(self.batches, name)


def keys(batch: Any) -> list[bytes]:
    """Return a key for each sample of a batch: a hash of its tensors' values."""
    size = batch_size_of(batch)
    hashes = [hashlib.blake2b(digest_size=_KEY_BYTES) for _ in range(size)]
    for index, digest in enumerate(hashes):
        for tensor in tensors_of(batch if size == 1 else slice_batch(batch, index, index + 1)):
            digest.update(_bytes(tensor).numpy().tobytes())
    return [digest.digest() for digest in hashes]


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: itself, or its entry or attribute "logits".

    Raises:
        WorkloadError: It has none.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise WorkloadError(f"Workload.model returned {type(output).__name__} without a tensor 'logits' to distill")
    return logits


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _signature(workload: Workload) -> str:
    """Return the shapes and dtypes of a sample."""
    return ", ".join(f"{str(t.dtype)[6:]}{list(t.shape[1:])}" for t in tensors_of(workload.batch))


def _fingerprint(teacher: nn.Module) -> str:
    """Return a hash of the names and values of a teacher's parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in teacher.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(_bytes(tensor).numpy().tobytes())
    return digest.hexdigest()[:16]


def _metadata(path: Path) -> dict[str, str] | None:
    """Return the metadata of a file; None where it can't be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] | None = file.metadata()
            return metadata
    except (OSError, safetensors.SafetensorError):
        return None
