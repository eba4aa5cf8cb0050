"""Charts for the docs, on light and dark screens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.charts import COLOURS, DARK, GROUND
from benchmarks.pages import DOCS

FIGURES = sorted((DOCS / "figures").glob("*.svg"))


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour (WCAG 2.2)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("colour", COLOURS)
def test_lines_stand_out_on_either_ground(colour: str) -> None:
    assert contrast(colour, GROUND) > 4.5 and contrast(DARK[colour], DARK[GROUND]) > 4.5
    assert contrast(colour, DARK[GROUND]) < contrast(DARK[colour], DARK[GROUND])


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_every_figure_has_dark_colours(path: Path) -> None:
    text = path.read_text()
    assert "prefers-color-scheme:dark" in text
    used = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', text))
    assert GROUND in used and used & set(DARK)
