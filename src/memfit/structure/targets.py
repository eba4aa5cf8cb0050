"""A teacher's outputs, computed once and kept in a file: safetensors, a row for each sample of the data.

A sample is known by a hash of its tensors, so that shuffled data finds its rows; augmented data does not.
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

from memfit.errors import OutputError, WorkloadError
from memfit.ir import codec
from memfit.train.trainer import evaluation_mode
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
    """Write what a teacher says of the data, for `distill(workload, path)`, which then trains without the teacher.

    A file that holds the same teacher's outputs for such data already is left as it is.

    Args:
        workload: Whose loss calls the teacher as it calls its own model. Nothing of it is changed.
        teacher: The model; it runs in evaluation mode, without gradients, and no part of it is changed.
        path: The file, which is written whole or not at all.
        batches: Every sample that training will see, in any order; `Workload.batches` by default, an epoch of it, and
            `Workload.batch`. Mind loaders that drop the last batch.
        dtype: That outputs are kept in; None keeps theirs.
        overwrite: Whether to replace another file.

    Raises:
        OutputError: The file holds something else, or can't be written.
        WorkloadError: The loss does not call the model it is given once, for one tensor a sample.
    """
    path, wanted = Path(path), {"format": _FORMAT, "teacher": _fingerprint(teacher), "samples": _signature(workload)}
    if path.exists() and not overwrite:
        if _metadata(path) == wanted:
            return path
        raise OutputError(f"{path} exists and holds something else than this teacher's outputs: give overwrite=True")
    rows: dict[bytes, Tensor] = {}
    model = _Answering(teacher)
    with evaluation_mode(teacher):
        for batch in (workload.batch, *((workload.batches or ()) if batches is None else batches)):
            for key, row in zip(keys(batch), model.answers(workload, batch), strict=True):
                rows[key] = row.cpu() if dtype is None else row.to("cpu", dtype)
    known = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), _KEY_BYTES)
    held = {"keys": known, "outputs": torch.stack(list(rows.values()))}
    return codec.write_atomic(path, safetensors.torch.save(held, metadata=wanted))


class _Answering(nn.Module):
    """A teacher whose output is looked at."""

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
            raise WorkloadError("Workload.loss_fn has to call the model once, for outputs with a row for each sample")
        return logits_of(self.seen[0])


class Targets:
    """A file of a teacher's outputs, in memory.

    Args:
        path: What `precompute` wrote.
        workload: Whose samples are to be in it.

    Raises:
        WorkloadError: The file can't be read, or was made for samples of other shapes.
    """

    def __init__(self, path: Path, workload: Workload) -> None:
        found, wanted = _metadata(path), _signature(workload)
        if found is None or found.get("format") != _FORMAT:
            raise WorkloadError(f"teacher={str(path)!r} is no file that memfit.structure.precompute wrote")
        if found["samples"] != wanted:
            raise WorkloadError(
                f"teacher={str(path)!r} holds outputs for samples of {found['samples']}, and Workload.batch has"
                f" {wanted}: precompute them for this workload"
            )
        held = safetensors.torch.load_file(path)
        self._path, self._outputs = path, held["outputs"]
        self._rows = {bytes(key): row for row, key in enumerate(held["keys"].numpy())}

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
                " among batches= when memfit.structure.precompute ran. Give it every sample, as training sees it"
            )
        return {"batch": batch, "teacher": self._outputs[torch.tensor(rows)]}

    def joined(self, workload: Workload) -> Workload:
        """Return a workload whose batches come with the teacher's outputs."""
        batches = None if workload.batches is None else WithTargets(workload.batches, self)
        return dataclasses.replace(workload, batch=self.with_batch(workload.batch), batches=batches)


class WithTargets:
    """Batches that come with the teacher's outputs; in all else the batches they are made of."""

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
    """Return what identifies each sample of a batch: a hash of its tensors' values."""
    size = batch_size_of(batch)
    hashes = [hashlib.blake2b(digest_size=_KEY_BYTES) for _ in range(size)]
    for index, digest in enumerate(hashes):
        for tensor in tensors_of(batch if size == 1 else slice_batch(batch, index, index + 1)):
            digest.update(_bytes(tensor).numpy().tobytes())
    return [digest.digest() for digest in hashes]


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: itself, or what it calls "logits".

    Raises:
        WorkloadError: It has none.
    """
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise WorkloadError(f"Workload.model returned {type(output).__name__} with no tensor 'logits' to distill")
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _signature(workload: Workload) -> str:
    """Return the shapes and dtypes of a sample."""
    parts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape[1:])}" for t in tensors_of(workload.batch)]
    return ", ".join(parts)


def _fingerprint(teacher: nn.Module) -> str:
    """Return what identifies a teacher: the names and values of its parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in teacher.state_dict().items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(_bytes(tensor).numpy().tobytes())
    return digest.hexdigest()[:16]


def _metadata(path: Path) -> dict[str, str] | None:
    """Return what a file says of itself; None where it can't be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            found: dict[str, str] | None = file.metadata()
            return found
    except (OSError, safetensors.SafetensorError):
        return None
