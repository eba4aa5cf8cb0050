"""Makes the pictures of docs/results/parity.md: `python -m benchmarks.parity.page [--check]`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.charts import COLOURS, Axis, Interval, Line, Panel, chart, intervals
from benchmarks.pages import DOCS, main
from benchmarks.parity.conditions import CONDITIONS
from benchmarks.parity.runs import POINTS
from benchmarks.parity.trainings import TRAININGS

VERDICT_COLOURS = {"equivalent": "#15803d", "undecided": "#94a3b8", "refuted": "#c2410c"}


def verdicts_chart(result: dict[str, Any]) -> str:
    """Return the chart of differences to plain training, in margins."""
    verdicts = [case for case in result["cases"] if case["kind"] == "verdict"]
    conditions = list(dict.fromkeys(case["condition"] for case in verdicts))
    found = {(case["training"], case["condition"]): case for case in verdicts}
    columns = {
        training: [
            Interval(
                case["mean"] / case["margin"], case["half_width"] / case["margin"], VERDICT_COLOURS[case["verdict"]]
            )
            for case in (found[training, condition] for condition in conditions)
        ]
        for training in dict.fromkeys(case["training"] for case in verdicts)
    }
    return intervals(
        "What each lever does to what is learnt",
        f"Held-out metric under a lever less that of plain training, paired over {result['summary']['seeds']} seeds;"
        " intervals of 90 % confidence",
        [CONDITIONS[condition].title for condition in conditions],
        columns,
        list(VERDICT_COLOURS.items()),
        "difference, in margins of the training: right is better than plain, dashed lines are the margin",
    )


SHOWN = ("byte_lm", "text_classifier", "brain_segmentation", "video")
LINES = {
    "plain": ("plain", COLOURS[1]),
    "bf16-alone": ("bf16 by hand", COLOURS[2]),
    "16-mixed-high": ("scale from 2^40", COLOURS[3]),
    "adafactor": ("Adafactor", COLOURS[0]),
}


def curves_chart(result: dict[str, Any]) -> str:
    """Return the chart of training losses, plain and where something hurts, in the mean over the seeds."""
    panels = []
    for name in SHOWN:
        lines = []
        for condition, (label, colour) in LINES.items():
            runs = [
                c["losses"]
                for c in result["cases"]
                if (c.get("training"), c.get("condition")) == (name, condition) and c["kind"] == "run"
            ]
            means = [statistics.fmean(parts) for parts in zip(*runs, strict=True)]
            part = TRAININGS[name].steps // POINTS
            points = [(part * (index + 1), mean) for index, mean in enumerate(means)]
            lines.append(Line(label, points, colour, dashed=condition == "bf16-alone"))
        panels.append(Panel(name, lines))
    return chart(
        "Where a lever hurts",
        "Training loss, the mean of each tenth of the steps and of the seeds",
        panels,
        Axis("steps", (15, 30, 60, 120, 240), lambda value: f"{value:.0f}"),
        Axis("nats", (0.5, 1, 2, 4, 8), lambda value: f"{value:g}"),
        legend=panels[0].lines,
    )


def files(result: dict[str, Any]) -> dict[Path, str]:
    """Return the charts."""
    return {
        DOCS / "figures" / "parity.svg": verdicts_chart(result),
        DOCS / "figures" / "parity-curves.svg": curves_chart(result),
    }


if __name__ == "__main__":
    main("benchmarks.parity.page", "parity", files, __doc__)
