"""The tables of trainings under levers, and the figures that pages quote."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common import Case
from benchmarks.markdown import head, made_by, row
from benchmarks.parity.conditions import CONDITIONS
from benchmarks.parity.trainings import TRAININGS
from memfit.foundations import format_bytes


def summary_of(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the figures. The verdicts counted are those on levers, without the ways that are here since they hurt."""
    runs, exact = list(_of(cases, "run")), list(_of(cases, "verdict", condition="exact"))
    count = Counter(v["verdict"] for v in _of(cases, "verdict") if not CONDITIONS[v["condition"]].hurts)
    return {
        "trainings": len({case["training"] for case in runs}),
        "seeds": len({case["seed"] for case in runs}),
        "runs": len(runs),
        "exact_runs": sum(case["seeds"] for case in exact),
        "exact_bitwise": sum(case["bitwise"] for case in exact),
        "equivalent": count["equivalent"],
        "refuted": count["refuted"],
        "undecided": count["undecided"],
        "budget_use_pays": len({case["training"] for case in _of(cases, "use", pays=True)}),
    }


def trainings_table(result: dict[str, Any]) -> str:
    """Return what is trained, how well plain training does, and the margin of each."""
    headings = (
        "training",
        "learns",
        "steps",
        "held-out metric",
        "without learning",
        "plain",
        "margin",
        "why that much",
    )
    lines = head(headings)
    for name in _trainings(result["cases"]):
        training = TRAININGS[name]
        values = [case["metric"] for case in _of(result["cases"], "run", training=name, condition="plain")]
        found = f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"
        metric = f"{training.metric}, {training.better} is better"
        figures = (f"{training.chance:.3f}", found, f"{training.margin:g}", training.rationale)
        lines.append(row((name, training.what, str(training.steps), metric, *figures)))
    seeds = result["summary"]["seeds"]
    return "\n".join([*lines, "", f"Mean and standard deviation over {seeds} seeds. {made_by(result)}."])


def verdicts_table(result: dict[str, Any]) -> str:
    """Return for each condition and training the mean difference to plain, and the verdict."""
    names = _trainings(result["cases"])
    lines = head(("", *names))
    for condition in _conditions(result["cases"]):
        cells = []
        for name in names:
            (said,) = _of(result["cases"], "verdict", training=name, condition=condition)
            cells.append(f"{verdict_text(said)}<br>{said['mean']:+.3f} ± {said['half_width']:.3f}")
        lines.append(row((CONDITIONS[condition].title, *cells)))
    return "\n".join(lines)


def verdict_text(said: Case) -> str:
    """Return a verdict in a few words."""
    if said["verdict"] == "undecided":
        needed = said["seeds_needed"]
        return f"undecided ({f'{needed} seeds' if needed else 'more than 1,000 seeds'})"
    if said["verdict"] == "refuted":
        return f"**refuted** ({'better' if said['mean'] > 0 else 'worse'})"
    return "equal bits" if said["bitwise"] == said["seeds"] else "equivalent"


def peaks_table(result: dict[str, Any]) -> str:
    """Return what each condition does to the measured peak of a step."""
    names = _trainings(result["cases"])
    lines = head(("", *names))
    for condition in ("plain", *(c for c in _conditions(result["cases"]) if not CONDITIONS[c].hurts)):
        cells = []
        for name in names:
            plain, here = (
                next(_of(result["cases"], "run", training=name, condition=c, seed=0))["peak_bytes"]
                for c in ("plain", condition)
            )
            cells.append(format_bytes(plain) if condition == "plain" else f"×{here / plain:.2f}")
        lines.append(row((CONDITIONS[condition].title, *cells)))
    return "\n".join(lines)


def scaling_table(result: dict[str, Any]) -> str:
    """Return the loss scales of 16-mixed runs, and what was skipped."""
    lines = head(("training", "", "skipped updates", "first scale", "last scale"))
    for name in _trainings(result["cases"]):
        for condition in ("16-mixed", "16-mixed-high"):
            runs = list(_of(result["cases"], "run", training=name, condition=condition))
            skips, steps = [case["skips"] for case in runs], TRAININGS[name].steps
            skipped = f"{min(skips)} to {max(skips)} of {steps}" if len(set(skips)) > 1 else f"{skips[0]} of {steps}"
            first, last = ({_power(case[f"{which}_scale"]) for case in runs} for which in ("first", "last"))
            lines.append(row((name, CONDITIONS[condition].title, skipped, ", ".join(first), ", ".join(sorted(last)))))
    return "\n".join(lines)


def dtypes_table(result: dict[str, Any]) -> str:
    """Return which operators of 16-mixed steps ran in what."""
    lines = head(("training", "fp16 in and out, fp32 inside", "fp16", "both", "fp32"))
    for name in _trainings(result["cases"]):
        seen = next(_of(result["cases"], "run", training=name, condition="16-mixed", seed=0))["dtypes"]
        cells = []
        for wanted in (["fp16 in, fp32 inside"], ["float16"], ["float16", "float32"], ["float32"]):
            cells.append(", ".join(f"`{op}`" for op, dtypes in seen.items() if dtypes == wanted and _computes(op)))
        lines.append(row((name, *cells)))
    (timed,) = _of(result["cases"], "fp16 kernels")
    slow = ", ".join(f"×{ratio:.0f} ({name})" for name, ratio in timed["slowdowns"].items())
    return "\n".join([*lines, "", f"The CPU's own fp16 kernels, forward and backward, take {slow} of fp32's time."])


def uses_table(result: dict[str, Any]) -> str:
    """Return what was trained in the bytes of the plain step, and how it did."""
    headings = ("training", "larger", "budget", "larger, plain", "plan", "steps, plain and larger", "plain", "larger")
    lines = head((*headings, "pays"))
    for case in _of(result["cases"], "use"):
        if "infeasible" in case:
            lines.append(row((case["training"], case["use"], "", "", "no plan fits", "", "", "", "no")))
            continue
        sizes = [format_bytes(case[key]) for key in ("budget_bytes", "unplanned_bytes")]
        steps = [statistics.median(r["steps"] for r in case["runs"] if r["way"] == w) for w in ("plain", "planned")]
        spread = {
            way: f"{mean:.3f} ± {statistics.stdev(r['metric'] for r in case['runs'] if r['way'] == way):.3f}"
            for way, mean in case["means"].items()
        }
        levers, pays = ", ".join(case["levers"]), "yes" if case["pays"] else "no"
        figures = (f"{steps[0]:.0f}, {steps[1]:.0f}", spread["plain"], spread["planned"], pays)
        lines.append(row((case["training"], case["use"], *sizes, levers, *figures)))
    seeds = max(r["seed"] for c in _of(result["cases"], "use") for r in c.get("runs", [])) + 1
    seconds = next(c["seconds"] for c in _of(result["cases"], "use") if "seconds" in c)
    return "\n".join([*lines, "", f"{seconds:g} CPU seconds of steps a run, {seeds} seeds. {made_by(result)}."])


def _of(cases: Sequence[Case], kind: str, **wanted: Any) -> Iterator[Case]:
    """Yield the rows of a kind that have some values."""
    return (c for c in cases if c["kind"] == kind and all(c.get(key) == value for key, value in wanted.items()))


def _trainings(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case["training"] for case in _of(cases, "verdict")))


def _conditions(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case["condition"] for case in _of(cases, "verdict")))


def _power(scale: float) -> str:
    return f"2^{scale.as_integer_ratio()[0].bit_length() - 1}"


def _computes(operator: str) -> bool:
    """Tell whether an operator is one of the model's, and none that copies or looks after gradients."""
    return not operator.startswith(("_foreach", "_to_copy", "_local_scalar", "_unsafe_view", "empty", "ones", "zeros"))
