"""The process that runs one call: `python shim.py memfit.fake_gpu.worker REQUEST REPLY STAGES`, with fake CUDA.

`python -m memfit.fake_gpu.worker` runs it without."""

from __future__ import annotations

import json
import pickle
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from memfit.errors import CaptureError, MemfitError, UntestedTorchWarning
from memfit.frames import frames_text


def main(request: str, reply: str, stages: str) -> None:
    """Run the pickled call of a file; write its result or its error to another, and its stages to a file descriptor."""
    paths, sys.argv[:], call = pickle.loads(Path(request).read_bytes())  # modules of the user may read them
    sys.path[:] = [*paths, *(p for p in sys.path if p not in paths)]
    warnings.simplefilter("ignore", UntestedTorchWarning)  # the process that waits has warned
    result: Any
    with open(int(stages), "w", buffering=1) as out:

        def progress(stage: str, done: int, total: int) -> None:
            print(json.dumps([stage, done, total]), file=out)

        try:
            result = pickle.loads(call)(progress)
        except MemfitError as e:
            e.frames = frames_text(e)
            result = e
        except (Exception, SystemExit) as e:
            frames = frames_text(e)
            result = CaptureError(f"{type(e).__name__}: {e}" + ("" if frames else f"\n{traceback.format_exc()}"))
            result.frames = frames
    Path(reply).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
