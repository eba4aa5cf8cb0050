"""Everything that is to be measured on a card: `make gpu`, or `python -m benchmarks.gpu [--device cuda]`.

The parts are made of commands of less than nine minutes each. Once `--minutes` are over no further one begins, and the
command ends with status 75: run it again, and it goes on. What was done, and what each command wrote, is in a folder;
`--again` begins anew, `--retry` runs what failed once more.

Measured are the tests of accelerators, the device's rates, exact plans against plain steps, predicted peaks and times
of the zoo's plain and planned steps, the frontier beside peers, what a step costs beyond one by hand, and how right
modelled times are. When all is done, the results are put together in `benchmarks/results`, the package's error bars
and rates for such cards are made from them, and so is their page of the docs. With another folder of `--results` all
of it is written there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import card_page
from benchmarks.calibration import CARDS, RATE, calibrate_card
from benchmarks.common import result_of, slug, write_result
from benchmarks.exactness import STEPS
from benchmarks.frontier import cells
from benchmarks.frontier.methods import Kind
from benchmarks.frontier.models import QUICK, SUBJECTS
from benchmarks.on_accelerator import bring, environment, python
from benchmarks.prediction import summarised
from benchmarks.zoo import ZOO
from memfit.errors import UsageError
from memfit.hardware import find_device
from memfit.ir import write_atomic

MEASURED = ("tests", "rates", "exactness", "prediction", "frontier", "overhead", "corrections")
PARTS = (*MEASURED, "fit", "pages")
"""What there is to do: what is measured, and what follows from it."""
ROOT = Path(__file__).resolve().parents[1]
RESULTS, TESTS = ROOT / "benchmarks" / "results", ROOT / "tests" / "accelerators"
GO_ON = 75
"""The exit status of a run that is to go on (EX_TEMPFAIL)."""
QUICK_RATE = 0.7
"""The rate of error bars of `--quick`, whose few steps would give none for that of a full run."""
_LONGEST_SECONDS = 530  # of one command
_FRONTIER_KINDS: tuple[Kind, ...] = ("eager", "compiled", "joint")  # "all" compiles more than one command has time for
_TIMING_SECONDS = 20.0  # of one model and kind of the frontier, after the first rounds
_SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)  # fewer budgets than on the CPU, for one command's time
_TOOK_TOO_LONG = 124


@dataclass(frozen=True)
class Command:
    """One command of a part.

    Attributes:
        name: Its name, and its files' in the folder.
        line: Its words; "{file}" in one is the path of what it writes, "{folder}" that of the folder.
        suffix: The suffix of that file; "" where it writes none.
    """

    part: str
    name: str
    line: tuple[str, ...]
    suffix: str = ".json"


def commands(device: str, quick: bool) -> Iterator[Command]:
    """Yield every command, in order."""
    run, less = python(device), ["--quick"] if quick else []
    at = ("--device", device, "--json", "{file}")
    for path in sorted(TESTS.glob("test_*.py")):  # one by one: each plan for a GPU takes a process of its own
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            one = (sys.executable, "-m", "pytest", "-q", f"{path.relative_to(ROOT)}::{name}")
            yield Command("tests", f"{path.stem}-{name}", one, "")
    yield Command("rates", "rates", (*run, "memfit", "tools", "probe-devices", "--output", "{file}"), ".toml")
    models = tuple(QUICK if quick else SUBJECTS)
    for name in models:
        yield Command("exactness", f"exactness-{name}", (*run, "benchmarks.exactness", *at, "--models", name, *less))
    for name in ("lstm",) if quick else ZOO:
        yield Command("prediction", f"prediction-{name}", (*run, "benchmarks.prediction", *at, "--only", name))
    budgets = less or ["--shares", *map(str, _SHARES), "--seconds", str(_TIMING_SECONDS)]
    for name in models[:1] if quick else models:
        for kind in _FRONTIER_KINDS:
            chosen = ("--models", name, "--kinds", kind, "--partial", "{folder}/frontier-partial.jsonl", *budgets)
            yield Command("frontier", f"frontier-{name}-{kind}", (*run, "benchmarks.frontier", *at, *chosen))
    yield Command("overhead", "overhead", (*run, "benchmarks.overhead", *at, *less))
    probed = ("--rates", "{folder}/rates.toml")
    yield Command("corrections", "corrections", (*run, "benchmarks.corrections", *at, *probed, *less))


def main() -> int:
    """Run what is left to run, as long as there is time."""
    given = _arguments()
    bring(given.device)
    device = find_device(given.device)
    if given.again:
        shutil.rmtree(given.out, ignore_errors=True)
    given.out = given.out.resolve()  # commands run in the root of the repository
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = [command for command in commands(given.device, given.quick) if command.part in given.parts]
    if not _run_all(wanted, given):
        return GO_ON
    name, failures = slug(device.description), 0
    made_by = f"python -m benchmarks.gpu{' --quick' * given.quick}"
    for part in [part for part in MEASURED if part in given.parts and part != "rates"]:
        of_part = [command for command in wanted if command.part == part]
        with _told() as told:
            result = put_together(part, of_part, given.out, made_by, given.device)
            write_result(given.results / f"{part}-{name}.json", result)
        failures += len(told)
    with _told() as told:
        _derive(given, name)
    return int(any(_status(command, given.out) for command in wanted) or bool(failures or told))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", default="cuda", help="the accelerator (default: cuda)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all by default")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further command begins (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of what was done")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--again", action="store_true", help="begin anew")
    parser.add_argument("--retry", action="store_true", help="run what failed once more")
    parser.add_argument("--quick", action="store_true", help="small steps: two models and one of the zoo's")
    return parser.parse_args()


@contextlib.contextmanager
def _told() -> Iterator[list[UsageError]]:
    """Say what is missing and go on; yield a list that has it then."""
    found: list[UsageError] = []
    try:
        yield found
    except UsageError as e:
        print(e, file=sys.stderr)
        found.append(e)


def _derive(given: argparse.Namespace, name: str) -> None:
    """Make what follows from the results: in the tree from those of the tree, else beside the results."""
    in_tree = given.results.resolve() == RESULTS
    if "fit" in given.parts:
        predictions, corrections = (given.results / f"{part}-{name}.json" for part in ("prediction", "corrections"))
        target = CARDS if in_tree else given.results / CARDS.name
        found = calibrate_card(predictions, corrections, target, QUICK_RATE if given.quick else RATE)
        print(f"{target}: peaks ±{found.peak_error}, times ±{found.step_error}, {found.time_factors}", file=sys.stderr)
    if "pages" in given.parts:
        page = card_page.PAGE if in_tree else given.results / card_page.PAGE.name
        card_page.write(page, given.results)
        print(f"{page}: see also docs/guides/on-a-gpu.md, which says by hand what was tried", file=sys.stderr)


def _run_all(wanted: Sequence[Command], given: argparse.Namespace) -> bool:
    """Run what is not done; tell whether all is, or the time is over."""
    ends = time.monotonic() + 60 * given.minutes
    for index, command in enumerate(wanted):
        if _is_done(command, given.out) and not (given.retry and _status(command, given.out)):
            continue
        if time.monotonic() >= ends:
            print(f"{index} of {len(wanted)} commands are done: run this again to go on", file=sys.stderr)
            return False
        print(f"[{index + 1}/{len(wanted)}] {command.name}", file=sys.stderr, flush=True)
        _run(command, given.out, environment(given.device))
    return True


def _is_done(command: Command, folder: Path) -> bool:
    return (folder / f"{command.name}.done").exists()


def _status(command: Command, folder: Path) -> int:
    return int((folder / f"{command.name}.done").read_text())


def _run(command: Command, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a command, keep what it prints, and note its status; one that takes too long has failed."""
    words = {"{file}": str(folder / f"{command.name}{command.suffix}"), "{folder}": str(folder)}
    line = [re.sub(r"\{(?:file|folder)\}", lambda found: words[found[0]], word) for word in command.line]
    with open(folder / f"{command.name}.log", "w") as log:
        # A session of its own, so that what it started ends with it, and nothing left behind keeps the card's memory.
        process = subprocess.Popen(
            line, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            status = process.wait(_LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            status = _TOOK_TOO_LONG
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status:
        print(f"    status {status}: see {folder / command.name}.log", file=sys.stderr, flush=True)
    write_atomic(folder / f"{command.name}.done", str(status).encode())


def put_together(
    part: str, of_part: Sequence[Command], folder: Path, made_by: str = "python -m benchmarks.gpu", device: str = "cpu"
) -> dict[str, Any]:
    """Return one result of the results of a part's commands, with what failed.

    Raises:
        UsageError: No command wrote one.
    """
    failed = {c.name: _why(_status(c, folder)) for c in of_part if _is_done(c, folder) and _status(c, folder)}
    if part == "tests":
        cases = [_tested(command, folder) for command in of_part]
        counts = {word: sum(case[word] for case in cases) for word in _OUTCOMES}
        return {**result_of(made_by, cases, counts, device), "failed_commands": failed}
    files = [folder / f"{command.name}{command.suffix}" for command in of_part]
    found = [json.loads(path.read_text()) for path in files if path.exists()]
    if not found:
        raise UsageError(f"no command of {part} wrote a result: see the logs in {folder}")
    cases = [case for result in found for case in result["cases"]]
    summary = SUMMARIES[part](cases) if part in SUMMARIES else found[0]["summary"]
    return {**found[0], "command": made_by, "cases": cases, "summary": summary, "failed_commands": failed}


_OUTCOMES = ("passed", "skipped", "failed")


def _tested(command: Command, folder: Path) -> dict[str, Any]:
    """Return how many tests of a command ended in which way, as pytest's last line has it."""
    text = (folder / f"{command.name}.log").read_text()
    counts = {word: int(found[-1]) if (found := re.findall(rf"(\d+) {word}", text)) else 0 for word in _OUTCOMES}
    if _status(command, folder) and not counts["failed"]:
        counts["failed"] = 1  # it did not come to its end
    return {"test": command.name, **counts}


def _why(status: int) -> str:
    return f"no end within {_LONGEST_SECONDS} s" if status == _TOOK_TOO_LONG else f"exit status {status}"


def _of_exactness(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    equal = sum(case["equal_steps"] == STEPS for case in cases)
    return {"models": len(cases), "models_bitwise_equal": equal, "steps": STEPS}


SUMMARIES: dict[str, Callable[[Sequence[dict[str, Any]]], dict[str, Any]]] = {
    "exactness": _of_exactness,
    "prediction": summarised,
    "frontier": cells.summarised,
}
"""How the cases of parts of several commands are summed up."""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what runs is ended too
    raise SystemExit(main())
