"""Training checkpoints: folders `checkpoint-<step>` of JSON and safetensors. Loading one executes no code.

A checkpoint is written beside its place and renamed, so that its folder is there whole or not at all. A thread can
write it from copies while training goes on; it is renamed between two steps, when the files of all ranks are there.
`checkpoint.json` names every file with its size and SHA-256; both are checked before anything of a training is changed.
A damaged checkpoint is set aside as `damaged-checkpoint-<step>`, and the one before it is read.

    checkpoint-1200/
        checkpoint.json          versions, the workload's fingerprint, the files
        plan.json                the plan of the run
        model.safetensors        the model's state dict, tied weights once; `safetensors.torch.load_model` reads it
        optimizer.json           the optimizer's state dict without its tensors
        optimizer.safetensors    its tensors
        training.json            scheduler, loss scaler, random states, data position
        training.safetensors     tensors of these, if any

Of a model that ranks share, each rank writes its shards, `model-shard-00001-of-00004.safetensors` and the same of the
optimizer (`shards`), in place of the two large files; all else is the first rank's. Either kind is read by any number
of ranks, each of which reads its own parts.

It does not hold buffers that are not persistent, nor the workload's own generators.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from memfit import ir
from memfit.errors import CheckpointError, DamagedCheckpointError, OutputError, UsageError
from memfit.foundations import __version__
from memfit.hardware import pins_memory, synchronize
from memfit.ir import Plan, Precision
from memfit.ranks import each, once
from memfit.training.runs.state import (
    SHARD,
    Files,
    Stored,
    TrainingState,
    collect,
    prepare_restore,
    shard_name,
    write_tensors,
)
from memfit.training.step import Step
from memfit.workload import check_rng_state, fingerprint

MANIFEST = "checkpoint.json"
PLAN = "plan.json"
FILES = (
    PLAN,
    "model.safetensors",
    "optimizer.json",
    "optimizer.safetensors",
    "training.json",
    "training.safetensors",
)
_FOLDER = re.compile(r"checkpoint-([0-9]+)")
_ASIDE = re.compile(r"damaged-checkpoint-[0-9]+(\.[0-9]+)?")
_TEMPORARY = re.compile(r"\.checkpoint-[0-9]+\.[0-9]+\.(new|old)\.tmp")
_IN_SHARDS = ("model", "optimizer")
WRITTEN, GOING_ON, CANNOT = range(3)  # the largest counts: all hear of a rank that could not, whoever still writes


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint."""

    sha256: str
    size_bytes: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of `checkpoint.json`.

    Attributes:
        sha256: SHA-256 of this record with this field empty.
    """

    schema: str = "memfit.checkpoint/1"
    memfit_version: str
    torch_version: str
    workload: str
    fingerprint: str
    step: int
    files: dict[str, FileEntry]
    sha256: str = ""

    def sealed(self) -> Checkpoint:
        """Return this record with its own SHA-256."""
        bare = msgspec.structs.replace(self, sha256="")
        return msgspec.structs.replace(bare, sha256=hashlib.sha256(ir.codec.encode(bare)).hexdigest())


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read and checked against an unchanged step.

    Attributes:
        restore: Restores model, optimizer, scheduler, loss scaler and step count. Random states and
            the data position are left to the caller.
    """

    path: Path
    step_count: int
    plan: Plan
    state: TrainingState
    restore: Callable[[], None]


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


class Writing:
    """A checkpoint that is being written: its files, on each rank, and then its place.

    All ranks of a step that is shared make one.

    Args:
        folder: The folder of checkpoints; `checkpoint-<step>` in it, its `path`, is created or replaced.
        keep_checkpoints: Number of checkpoints to keep, this one included (> 0).
        buffers: Hold copies of the state, which a thread writes from now on: the training may go on. They are free
            again when the checkpoint is finished. None leaves the writing to `finish`, and the state as it is until
            then to the caller.

    Raises:
        OutputError: The folder can't be written.
        CheckpointError: A part of the state is neither JSON nor a tensor.
    """

    def __init__(
        self,
        folder: Path,
        step: Step,
        plan: Plan,
        position: dict[str, Any],
        *,
        keep_checkpoints: int = 2,
        buffers: HostBuffers | None = None,
    ) -> None:
        self.path, self.step_count = folder / f"checkpoint-{step.steps}", step.steps
        self._workload, self._ranks, self._keep = step.workload, step.options.ranks, keep_checkpoints
        self._files: Files | None = None
        self._written: Future[dict[str, FileEntry]] | None = None
        self._new = own = self.path.with_name(f".{self.path.name}.{os.getpid()}.new.tmp")

        def prepare() -> Path:
            with _as_output_error(self.path):
                texts, tensors, metadata = collect(step, position)
                self._files = texts, tensors if buffers is None else buffers.copied(tensors), metadata
                if self._ranks.rank == 0:
                    own.parent.mkdir(parents=True, exist_ok=True)
                    shutil.rmtree(own, ignore_errors=True)
                    own.mkdir()
                    (own / PLAN).write_bytes(ir.codec.encode(plan))
                return own

        try:
            self._new = each(self._ranks, prepare)[0]
        except BaseException:
            self.discard()
            raise
        if buffers is not None:
            self._written = Future()
            # A daemon, as the process must be able to end while a disk does not answer.
            thread = threading.Thread(target=self._run, args=(self._written,), name="memfit-checkpoint", daemon=True)
            thread.start()

    @property
    def outcome(self) -> int:
        """What the thread has come to; where it `CANNOT`, `finish` tells why."""
        if self._written is not None and not self._written.done():
            return GOING_ON
        return WRITTEN if self._written is None or self._written.exception() is None else CANNOT

    def finish(self) -> Path:
        """Wait until all ranks have written their files, and give the checkpoint its place; all ranks call it."""
        try:
            written = each(self._ranks, self._write if self._written is None else self._written.result)
            once(self._ranks, lambda: self._publish({name: e for part in written for name, e in part.items()}))
        finally:
            self.discard()
        return self.path

    def discard(self) -> None:
        """Remove what has no place yet, as soon as the thread has ended."""
        if self._written is not None:
            wait([self._written])
        if self._ranks.rank == 0:
            shutil.rmtree(self._new, ignore_errors=True)

    def _run(self, written: Future[dict[str, FileEntry]]) -> None:
        try:
            written.set_result(self._write())
        except BaseException as e:
            written.set_exception(e)

    def _write(self) -> dict[str, FileEntry]:
        assert self._files is not None
        (texts, files, metadata), self._files, folder = self._files, None, self._new
        with _as_output_error(self.path):
            for name, text in texts.items():
                (folder / name).write_text(text)
            for name, tensors in files.items():
                write_tensors(tensors, folder / name, metadata.get(name))
            mode = (folder / PLAN).stat().st_mode
            entries = {}
            for name in [*([PLAN] if self._ranks.rank == 0 else []), *texts, *files]:
                (folder / name).chmod(mode)
                entries[name] = FileEntry(_sha256(folder / name), (folder / name).stat().st_size)
                _sync(folder / name)
            return entries

    def _publish(self, entries: dict[str, FileEntry]) -> None:
        with _as_output_error(self.path):
            manifest = Checkpoint(
                memfit_version=__version__,
                torch_version=str(torch.__version__),
                workload=self._workload.name,
                fingerprint=fingerprint(self._workload),
                step=self.step_count,
                files=entries,
            )
            ir.codec.write_atomic(self._new / MANIFEST, ir.codec.encode(manifest.sealed()))
            _sync(self._new)
            if self.path.exists():
                if not is_ours(self.path):
                    raise OutputError(f"{self.path} has files that memfit did not write: move it, or give another out=")
                remove(self.path)
            self._new.rename(self.path)
            _sync(self.path.parent)
            prune(self.path.parent, self.step_count, self._keep)


@contextlib.contextmanager
def _as_output_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise OutputError(f"can't write {path}: {e.strerror or e}. Free space there, or give another out=") from e


def read(path: Path, step: Step, precision: Precision | None = None, *, is_checked: bool = False) -> Loaded:
    """Read a checkpoint, and check all of it against a step, which is not changed.

    Args:
        is_checked: Whether another rank has compared the files with their sums.
        precision: Precision of the step; None for the checkpoint's. Where they differ, weights and loss scaler are
            converted (`prepare_restore`).

    Raises:
        DamagedCheckpointError: The checkpoint is missing or damaged.
        CheckpointError: The checkpoint has another workload, optimizer, scheduler or loss scaler.
    """
    manifest = _manifest_of(path)
    if step_of(path) not in (None, manifest.step):
        raise DamagedCheckpointError(f"{path} was renamed: it is the checkpoint of step {manifest.step}")
    _check_files(path, manifest, only_names=is_checked)
    own = fingerprint(step.workload)
    if manifest.fingerprint != own:
        raise CheckpointError(
            f"{path} is of another workload: its fingerprint is {manifest.fingerprint} ({manifest.workload!r}); the"
            f" workload {step.workload.name!r} has {own}. The model's modules, parameters and buffers, the batch's"
            " shapes and the kind of optimizer must be the same"
        )
    try:
        plan = ir.codec.read(path / PLAN, Plan, error=DamagedCheckpointError)
        model, optimizer = (_stored(path, manifest, stem) for stem in _IN_SHARDS)
        state = TrainingState(
            model=model,
            optimizer=json.loads((path / "optimizer.json").read_bytes()),
            optimizer_tensors=optimizer,
            training=json.loads((path / "training.json").read_bytes()),
            training_tensors=Stored([path / "training.safetensors"]),
        )
        check_rng_state(state.training["rng"])
        restore_state = prepare_restore(step, state, converts=precision not in (None, plan.levers.precision))
    except CheckpointError as e:
        raise type(e)(f"can't resume from {path}: {e}") from e
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise DamagedCheckpointError(f"{path} is not in the format of memfit's checkpoints ({e!r})") from e

    def restore() -> None:
        restore_state()
        step.steps = manifest.step

    return Loaded(path, manifest.step, plan, state, restore)


def read_model(path: Path) -> Stored:
    """Return the tensors of a checkpoint's model; raise DamagedCheckpointError where its files are damaged."""
    manifest = _manifest_of(path)
    _check_files(path, manifest)
    return _stored(path, manifest, "model")


def read_newest(
    folder: Path, step: Step, precision: Precision | None = None
) -> tuple[Loaded, list[DamagedCheckpointError]]:
    """Read the newest undamaged checkpoint in a folder; neither the step nor the folder is changed.

    All ranks of a step that is shared call it, and read the one that the first rank finds.

    Returns:
        The checkpoint, and the errors of the damaged ones after it, newest first.
    """
    ranks = step.options.ranks

    def newest() -> tuple[Path, list[DamagedCheckpointError], Loaded | None]:
        damages: list[DamagedCheckpointError] = []
        for path in newest_first(folder):
            try:
                found = read(path, step, precision)
                return path, damages, found if ranks.size == 1 else None
            except DamagedCheckpointError as e:
                damages.append(e)
        reasons = "; ".join(map(str, damages)) or "none was found"
        raise CheckpointError(
            f"out={str(folder)!r} has no complete checkpoint ({reasons}): start again with overwrite=True, or give"
            " another out="
        )

    path, damages, loaded = once(ranks, newest)
    if loaded is None:
        mine: list[Loaded] = []
        each(ranks, lambda: mine.append(read(path, step, precision, is_checked=True)))
        loaded = mine[0]
    return loaded, damages


# Writing


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading


def _manifest_of(path: Path) -> Checkpoint:
    manifest = ir.codec.read(path / MANIFEST, Checkpoint, error=DamagedCheckpointError)
    if manifest != manifest.sealed():
        raise DamagedCheckpointError(f"{path / MANIFEST} is damaged: its SHA-256 differs from the recorded one")
    return manifest


def _check_files(path: Path, manifest: Checkpoint, *, only_names: bool = False) -> None:
    """Raise DamagedCheckpointError unless the files are those of a checkpoint, with the recorded sizes and SHA-256."""
    count = max((int(match[3]) for name in manifest.files if (match := SHARD.fullmatch(name))), default=0)
    expected = set(FILES)
    if count:
        expected -= {f"{stem}.safetensors" for stem in _IN_SHARDS}
        expected |= {shard_name(stem, rank, count) for stem in _IN_SHARDS for rank in range(count)}
    if set(manifest.files) != expected:
        raise DamagedCheckpointError(
            f"{path / MANIFEST} names the files {sorted(manifest.files)}, not {sorted(expected)}"
        )
    for name, entry in () if only_names else manifest.files.items():
        file = path / name
        try:
            size_bytes = file.stat().st_size
            if size_bytes != entry.size_bytes:
                raise DamagedCheckpointError(
                    f"{file} is damaged: it has {size_bytes} bytes, and memfit wrote {entry.size_bytes}"
                )
            if _sha256(file) != entry.sha256:
                raise DamagedCheckpointError(f"{file} is damaged: its SHA-256 differs from the one in {MANIFEST}")
        except OSError as e:
            raise DamagedCheckpointError(f"can't read {file}: {e.strerror or e}") from e


def _stored(path: Path, manifest: Checkpoint, stem: str) -> Stored:
    own = (f"{stem}.safetensors", f"{stem}-shard-")
    return Stored([path / name for name in sorted(manifest.files) if name.startswith(own)])


# Folders of checkpoints


def newest_first(folder: Path) -> list[Path]:
    """Return the folders named as checkpoints, by step."""
    try:
        steps = {path: n for path in folder.iterdir() if (n := step_of(path)) is not None}
    except OSError:
        return []
    return sorted(steps, key=lambda path: -steps[path])


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to `damaged-checkpoint-<step>`, with a number appended where that exists."""
    numbers = itertools.chain([""], (f".{n}" for n in itertools.count(2)))
    place = next(p for n in numbers if not (p := path.with_name(f"damaged-{path.name}{n}")).exists())
    try:
        return path.rename(place)
    except OSError as e:
        raise OutputError(f"can't rename {path} to {place}: {e.strerror or e}") from e


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder: it has all its files in full size."""
    return next((path for path in newest_first(folder) if _is_complete(path)), None)


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for other names."""
    match = _FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def is_ours(path: Path) -> bool:
    """Tell whether a folder is a checkpoint of memfit, complete or not, and holds nothing else."""
    return has_schema(path / MANIFEST, "memfit.checkpoint/") and holds_only_ours(path)


def has_schema(path: Path, prefix: str = "memfit.") -> bool:
    """Tell whether a file is JSON of memfit, by the beginning of its schema."""
    try:
        return str(json.loads(path.read_bytes())["schema"]).startswith(prefix)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def holds_only_ours(path: Path) -> bool:
    """Tell whether all files of a folder have names that `save` gives, as in a checkpoint without its manifest."""
    try:
        return all(name in (MANIFEST, *FILES) or SHARD.fullmatch(name) for name in os.listdir(path))
    except OSError:
        return False


def all_set_aside(folder: Path) -> list[Path]:
    """Return the damaged checkpoints that were set aside in a folder."""
    return [path for path in folder.iterdir() if _ASIDE.fullmatch(path.name) and holds_only_ours(path)]


def remove(path: Path) -> None:
    """Remove a checkpoint atomically: it is renamed first."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    shutil.rmtree(old)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary folders that a crash during `save` or `remove` left behind."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, step_count: int, keep: int) -> None:
    """Remove the oldest checkpoints up to a step, except `keep`; those with files that memfit did not write stay."""
    earlier = [path for path in newest_first(folder) if (step_of(path) or 0) <= step_count]
    complete = [path for path in earlier if is_ours(path) and _is_complete(path)]
    for path in complete[keep:]:
        remove(path)


def _is_complete(path: Path) -> bool:
    try:
        manifest = ir.codec.read(path / MANIFEST, Checkpoint, error=CheckpointError)
        return all((path / name).stat().st_size == entry.size_bytes for name, entry in manifest.files.items())
    except (OSError, UsageError):
        return False
