"""The model of a run as other libraries read it: whole tensors in safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

from memfit.errors import CheckpointError, OutputError, UsageError
from memfit.ir import codec
from memfit.training.runs import checkpoint
from memfit.training.runs.state import write_tensors

MAX_FILE_BYTES = 5 * 10**9
"""A file's size from which the model goes on in the next one: as many bytes of the host's memory are used."""
_INDEX = "model.safetensors.index.json"


def consolidate(
    run: str | Path, out: str | Path, *, overwrite: bool = False, max_file_bytes: int = MAX_FILE_BYTES
) -> Path:
    """Write the model of a run's newest checkpoint as whole tensors, however many ranks wrote it; return the folder.

    Tied weights are written once. The folder is what `from_pretrained` of Hugging Face's transformers reads, once the
    model's `config.json` is beside it (`model.config.save_pretrained(out)`). Tensors are read one file's worth at a
    time, so that no GPU and little memory is needed.

    Args:
        run: The run's folder, or that of one checkpoint.
        out: The folder to write to; it is made where it is missing.
        overwrite: Whether to replace a model that is there.
        max_file_bytes: Bytes of a file (> 0); a larger model gets several and an index.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        OutputError: A model is there already, or can't be written.
    """
    if max_file_bytes < 1:
        raise UsageError(f"max_file_bytes={max_file_bytes} is not above 0")
    run, out = Path(run), Path(out)
    path = run if (run / checkpoint.MANIFEST).is_file() else checkpoint.latest(run)
    if path is None:
        raise CheckpointError(f"{run} has no complete checkpoint: give the folder of a run, or of a checkpoint")
    there = sorted(file.name for file in out.glob("model*.safetensors*")) if out.is_dir() else []
    if there and not overwrite:
        raise OutputError(f"{out} has {there[0]} already: give another folder, or overwrite=True")
    model = checkpoint.read_model(path)
    files: list[list[str]] = [[]]
    filled = 0
    for key in model:
        if files[-1] and filled + model.bytes(key) > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(key)
        filled += model.bytes(key)
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    names = ["model.safetensors"] if len(files) == 1 else names
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in there:
            (out / name).unlink()
        for name, keys in zip(names, files, strict=True):
            write_tensors({key: model[key] for key in keys}, out / name, {"format": "pt", **model.notes})
    except OSError as e:
        raise OutputError(f"can't write the model to {out}: {e.strerror or e}") from e
    if len(files) > 1:
        weight_map = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
        index = {"metadata": {"total_size": sum(map(model.bytes, model))}, "weight_map": weight_map}
        codec.write_atomic(out / _INDEX, json.dumps(index, indent=1).encode())
    return out
