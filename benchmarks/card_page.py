"""Makes the docs' page of accelerators from their results: `python -m benchmarks.card_page [--check]`.

There is such a page once `benchmarks.gpu` has measured one, and none before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.frontier.cells import cells_of
from benchmarks.frontier.methods import KINDS
from benchmarks.frontier.page import cells_table, summary_table
from benchmarks.markdown import head, made_by, row
from benchmarks.pages import DOCS, stale
from benchmarks.tables import RESULTS, cases_table, exactness_table
from benchmarks.time_tables import overhead_table, roofline_table
from memfit.errors import UsageError
from memfit.ir import write_atomic

PAGE = DOCS / "results" / "gpu.md"
_PARTS = ("tests", "prediction", "frontier", "exactness", "overhead", "corrections")
_BEGINNING = """# Measured on accelerators

What `make gpu` measured on each, made by `python -m benchmarks.card_page` from files in `benchmarks/results`.
*Measured* is the count of PyTorch's own allocator ([tests](../guides/on-a-gpu.md#tested-and-not-tested)).
"""

Result = dict[str, Any]


def by_card(folder: Path = RESULTS) -> dict[str, dict[str, Result]]:
    """Return the newest results of each accelerator, by its name and the part of `benchmarks.gpu`."""
    found: dict[str, dict[str, Result]] = {}
    for part in _PARTS:
        for path in sorted(folder.glob(f"{part}-*.json")):
            result = json.loads(path.read_text())
            card = result.get("machine", {}).get("accelerator")
            earlier = found.get(card, {}).get(part)
            if card and (earlier is None or earlier["date"] <= result["date"]):
                found.setdefault(card, {})[part] = result
    return dict(sorted(found.items()))


def page(cards: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the page for the results of some accelerators."""
    parts = [_BEGINNING.rstrip("\n")]
    for card, results in cards.items():
        parts.append(f"## {card}")
        parts += [_SECTIONS[part](results[part]) for part in _PARTS if part in results]
        failed = {name: why for result in results.values() for name, why in result.get("failed_commands", {}).items()}
        if failed:
            lines = [f"- `{name}`: {why}" for name, why in failed.items()]
            parts.append("\n".join(["### Commands that failed", "", *lines]))
    return "\n\n".join(parts) + "\n"


def _tests(result: Result) -> str:
    counts = ", ".join(f"{result['summary'][word]} {word}" for word in ("passed", "failed", "skipped"))
    return f"### Tests\n\nThose of `tests/accelerators`: {counts}. {made_by(result)}."


def prediction_table(result: Result) -> str:
    """Return how far predictions are off: of allocated and reserved peaks, and of times."""
    done = [case for case in result["cases"] if "error" in case]
    lines = head(("predicted", "steps", "median error", "largest error"))
    named = {"error": "peak allocated", "reserved_error": "peak reserved", "step_error": "step time"}
    for key, title in named.items():
        errors = sorted(abs(case[key]) for case in done if key in case)
        if errors:
            lines.append(row((title, str(len(errors)), f"{errors[len(errors) // 2]:.2%}", f"{errors[-1]:.2%}")))
    return "\n".join(lines)


def _prediction(result: Result) -> str:
    return (
        f"### Predicted and measured peaks\n\n{prediction_table(result)}\n\n"
        f'<details markdown="1"><summary>Allocated, every workload</summary>\n\n{cases_table(result)}\n\n</details>'
    )


def _frontier(result: Result) -> str:
    parts = [f"### The frontier, beside what others reach\n\n{summary_table(result)}"]
    for kind in KINDS:
        cells = cells_of(result["cases"], kind)
        for model in dict.fromkeys(cell.model for cell in cells):
            table = cells_table([cell for cell in cells if cell.model == model])
            title = f"{model}, {kind}: memfit and the fastest peer under each budget"
            parts.append(f'<details markdown="1"><summary>{title}</summary>\n\n{table}\n\n</details>')
    messages = _messages(result["cases"])
    if messages:
        listed = "\n".join(f"- {message}" for message in messages)
        title = "Methods that did not run, with what they say"
        parts.append(f'<details markdown="1"><summary>{title}</summary>\n\n{listed}\n\n</details>')
    return "\n\n".join(parts)


def _messages(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what methods said that did not run, each once with the models and kinds."""
    said: dict[tuple[str, str], list[str]] = {}
    for one in rows:
        if "error_message" in one:
            text = " ".join(one["error_message"].split())[:200].replace("<", "&lt;")
            said.setdefault((one["method"], text), []).append(f"{one['model']} {one['kind']}")
    return [f"{method} ({', '.join(dict.fromkeys(where))}): {text}" for (method, text), where in said.items()]


def _exactness(result: Result) -> str:
    return f"### Exact plans\n\n{exactness_table(result)}"


def _overhead(result: Result) -> str:
    return f"### What a step costs beyond one written by hand\n\n{overhead_table(result)}"


def _corrections(result: Result) -> str:
    """Return how right modelled times are once corrected by other models, and the factors."""
    summary = result["summary"]
    lines = head(("class", "dtype", "measured to modelled", "calls", "half of them within"))
    for one in summary["factors"]:
        within = f"×{one['median_factor']:.2f}"
        lines.append(row((one["class"], one["dtype"], f"×{one['factor']:.2f}", str(one["calls"]), within)))
    factors = "\n".join(lines)
    return (
        f"### Modelled times\n\nEach model's operators, corrected by what the others give: half of the steps are within"
        f" {summary['median_abs_error']:.0%}, without corrections within"
        f" {summary['median_abs_estimated_error']:.0%}.\n\n"
        f"{roofline_table(result)}\n\n"
        f'<details markdown="1"><summary>What is corrected</summary>\n\n{factors}\n\n</details>'
    )


_SECTIONS = {
    "tests": _tests,
    "prediction": _prediction,
    "frontier": _frontier,
    "exactness": _exactness,
    "overhead": _overhead,
    "corrections": _corrections,
}


def write(path: Path = PAGE, folder: Path = RESULTS) -> None:
    """Write the page for the results in a folder.

    Raises:
        UsageError: There are none of an accelerator.
    """
    cards = by_card(folder)
    if not cards:
        raise UsageError(f"{folder} has no result of an accelerator: `make gpu` measures one")
    write_atomic(path, page(cards).encode())


def is_current() -> bool:
    """Tell whether the page is that of the committed results, and missing where there are none."""
    cards = by_card()
    return not stale({PAGE: page(cards)}) if cards else not PAGE.exists()


def main() -> None:
    """Write the page, or check that it is that of the result files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.card_page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the page has other figures")
    if parser.parse_args().check:
        sys.exit(
            0 if is_current() else f"{PAGE.name} has other figures than benchmarks/results: run benchmarks.card_page"
        )
    try:
        write()
    except UsageError as e:
        sys.exit(str(e))


if __name__ == "__main__":
    main()
