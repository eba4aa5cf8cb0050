"""Everything that is to be measured on a card: `make gpu`, or `python -m benchmarks.gpu [--device cuda]`.

The parts are made of commands of a few minutes each. Once `--minutes` are over no further one begins, and the command
ends with status 75: run it again, and it goes on. What was done, and what each command wrote, is in a folder; `--again`
begins anew. When all is done, the results are put together in `benchmarks/results`.

Measured are the tests of accelerators, the device's rates, exact plans against plain steps, and predicted peaks and
times, of the zoo's plain and planned steps. Not yet here: the frontier against peers that need CUDA, and fitting the
roofline's rates.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frontier.models import QUICK, SUBJECTS
from benchmarks.on_accelerator import python
from benchmarks.prediction import summarised
from benchmarks.zoo import ZOO
from memfit.errors import UsageError
from memfit.hardware.host import find_device
from memfit.ir.codec import write_atomic

PARTS = ("tests", "rates", "exactness", "prediction")
ROOT = Path(__file__).resolve().parents[1]
RESULTS, TESTS = ROOT / "benchmarks" / "results", ROOT / "tests" / "accelerators"
GO_ON = 75
"""The exit status of a run that is to go on (EX_TEMPFAIL)."""
_LONGEST_SECONDS = 540  # of one command


@dataclass(frozen=True)
class Command:
    """One command of a part.

    Attributes:
        name: Its name, and its files' in the folder.
        line: Its words; "{file}" is the path of what it writes.
        suffix: The suffix of that file; "" where it writes none.
    """

    part: str
    name: str
    line: tuple[str, ...]
    suffix: str = ".json"


def commands(device: str, quick: bool) -> Iterator[Command]:
    """Yield every command, in order."""
    run = python(device)
    for path in sorted(TESTS.glob("test_*.py")):  # one by one: each plan for a GPU takes a process of its own
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            one = (sys.executable, "-m", "pytest", "-q", f"{path.relative_to(ROOT)}::{name}")
            yield Command("tests", f"{path.stem}-{name}", one, "")
    yield Command("rates", "rates", (*run, "memfit", "devices", "--probe", "--output", "{file}"), ".toml")
    line: tuple[str, ...]
    for name in QUICK if quick else SUBJECTS:
        line = (*run, "benchmarks.exactness", "--device", device, "--models", name, "--json", "{file}")
        yield Command("exactness", f"exactness-{name}", (*line, *(["--quick"] if quick else [])))
    for name in ("lstm",) if quick else ZOO:
        line = (*run, "benchmarks.prediction", "--device", device, "--only", name, "--json", "{file}")
        yield Command("prediction", f"prediction-{name}", line)


def main() -> int:
    """Run what is left to run, as long as there is time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", default="cuda", help="the accelerator (default: cuda)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all by default")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further command begins (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of what was done")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--again", action="store_true", help="begin anew")
    parser.add_argument("--quick", action="store_true", help="two models and one of the zoo's steps")
    given = parser.parse_args()
    device = find_device(given.device)
    if given.again:
        shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = [command for command in commands(given.device, given.quick) if command.part in given.parts]
    ends = time.monotonic() + 60 * given.minutes
    for index, command in enumerate(wanted):
        if _is_done(command, given.out):
            continue
        if time.monotonic() >= ends:
            print(f"{index} of {len(wanted)} commands are done: run this again to go on", file=sys.stderr)
            return GO_ON
        print(f"[{index + 1}/{len(wanted)}] {command.name}", file=sys.stderr, flush=True)
        _run(command, given.out)
    slug = re.sub(r"[^a-z0-9]+", "-", device.description.lower()).strip("-")
    for part in [part for part in ("exactness", "prediction") if part in given.parts]:
        path = given.results / f"{part}-{slug}.json"
        result = put_together(part, [given.out / f"{c.name}{c.suffix}" for c in wanted if c.part == part])
        write_atomic(path, json.dumps(result, indent=1).encode() + b"\n")
        print(f"written to {path}", file=sys.stderr)
    return int(any(_status(command, given.out) for command in wanted))


def _is_done(command: Command, folder: Path) -> bool:
    return (folder / f"{command.name}.done").exists()


def _status(command: Command, folder: Path) -> int:
    return int((folder / f"{command.name}.done").read_text())


def _run(command: Command, folder: Path) -> None:
    """Run a command, keep what it prints, and note its status; one that takes too long has failed."""
    file = folder / f"{command.name}{command.suffix}"
    line = [str(file) if word == "{file}" else word for word in command.line]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])}
    with open(folder / f"{command.name}.log", "w") as log:
        try:
            status = subprocess.run(
                line, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=_LONGEST_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    if status:
        print(f"    status {status}: see {folder / command.name}.log", file=sys.stderr, flush=True)
    write_atomic(folder / f"{command.name}.done", str(status).encode())


def put_together(part: str, files: Sequence[Path]) -> dict[str, Any]:
    """Return one result of the results of a part's commands.

    Raises:
        UsageError: No command wrote one.
    """
    found = [json.loads(path.read_text()) for path in files if path.exists()]
    if not found:
        raise UsageError(f"no command of {part} wrote a result: see the logs beside {files[0]}")
    cases = [case for result in found for case in result["cases"]]
    if part == "prediction":
        summary = summarised(cases)
    else:
        equal = sum(result["summary"]["models_bitwise_equal"] for result in found)
        summary = {"models": len(cases), "models_bitwise_equal": equal, "steps": found[0]["summary"]["steps"]}
    return {**found[0], "command": "python -m benchmarks.gpu", "cases": cases, "summary": summary}


if __name__ == "__main__":
    raise SystemExit(main())
