"""Makes `docs/results/claims.md`, its page in Chinese and its charts from the committed result of `benchmarks.claims`.

`python -m benchmarks.claims_page [--check]`. The words are those of `claims_template.md`; where a verdict no longer
follows from the figures, making the page fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.charts import COLOURS, Axis, Line, Panel, chart
from benchmarks.claims_chinese import translated
from benchmarks.claims_figures import GIB, SECTIONS, Cases, depth_series, every
from benchmarks.pages import DOCS, main
from memfit.foundations import format_bytes
from memfit.hardware import find_device

TEMPLATE = Path(__file__).with_name("claims_template.md")
CHINESE = Path(__file__).with_name("claims_template.zh.md")


def page(result: dict[str, Any], template: Path = TEMPLATE) -> str:
    """Return the page for a result of `benchmarks.claims`, in the language of a template.

    Raises:
        UnsupportedVerdict: Its words do not follow from the figures.
    """
    words = {
        "steps": str(result["summary"]["measured"]),
        "largest_error": f"{result['summary']['largest_peak_error']:.1%}".replace("%", " %"),
        "command": result["command"],
        "machine": result["machine"]["description"],
        "threads": "one thread" if result["machine"]["threads"] == 1 else f"{result['machine']['threads']} threads",
        "torch": result["versions"]["torch"],
        "date": result["date"],
    }
    for figures in SECTIONS:
        words |= figures(result["cases"])
    if template == CHINESE:
        words = {name: translated(text) for name, text in words.items()}
        words["threads"] = f"{result['machine']['threads']} 个线程"
    return template.read_text().format_map(words)


def depth_chart(cases: Cases) -> str:
    """Return the chart of activations over depth."""
    shifts = {"layers": (-8, 8, 0), "blocks": (0, 8, -8)}
    panels = []
    for kind, title in (("layers", "Linear layers"), ("blocks", "Transformer blocks")):
        lines = []
        for index, (how, found) in enumerate(depth_series(cases, kind).items()):
            points = [(case["depth"], case["activation_bytes"] / GIB) for case in found]
            dashed = (kind, how) == ("layers", "each checkpointed")  # it is the plain line
            lines.append(Line(how, points, COLOURS[index], shifts[kind][index], dashed))
        panels.append(Panel(title, lines))
    return chart(
        "Activations over depth",
        "Predicted for an A100, fp32: the most that activations and temporaries take",
        panels,
        Axis("N, members of the chain", (4, 16, 64, 256), lambda value: f"{value:.0f}"),
        Axis("GiB", (0.25, 1, 4, 16, 64), lambda value: f"{value:g}"),
    )


def attention_chart(cases: Cases) -> str:
    """Return the chart of peaks over sequence length."""
    card = find_device("a100-80gb").memory_bytes
    ours = every(cases, claim="attention", device="a100-80gb")
    names = {"math": ("math", 0), "efficient": ("memory-efficient", -8), "flash": ("flash", 8)}
    lines = []
    for index, (kernel, (label, shift)) in enumerate(names.items()):
        points = [(case["length"], case["peak_bytes"] / GIB) for case in every(ours, setting=kernel)]
        lines.append(Line(label, points, COLOURS[index], shift, dashed=kernel == "flash"))
    return chart(
        "Peak over sequence length",
        "Predicted for an A100 80 GB: GPT-2, one sequence",
        [Panel("", lines, limit=(card / GIB, f"the card: {format_bytes(card)}"))],
        Axis("N, tokens", (512, 2048, 8192, 32768), lambda value: f"{value:,.0f}"),
        Axis("GiB", (1, 4, 16, 64, 256, 1024), lambda value: f"{value:g}"),
    )


def files(result: dict[str, Any]) -> dict[Path, str]:
    """Return the page and its charts."""
    cases = result["cases"]
    return {
        DOCS / "results" / "claims.md": page(result),
        DOCS / "zh" / "results" / "claims.md": page(result, CHINESE),
        DOCS / "figures" / "depth.svg": depth_chart(cases),
        DOCS / "figures" / "attention.svg": attention_chart(cases),
    }


if __name__ == "__main__":
    main("benchmarks.claims_page", "claims", files, __doc__)
