"""Renders Rich's tables and text, made for the terminal, as plain text and as HTML."""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

_COLOURS = ("green", "red", "yellow", "cyan")


def text_of(*parts: RenderableType, width: int = 100) -> str:
    """Return tables and text as plain text."""
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def html_of(part: RenderableType) -> str:
    """Return tables and text as HTML, with all markup escaped, Rich's and HTML's.

    Raises:
        TypeError: The part is not a Table, Text, Group or str.
    """
    if isinstance(part, Group):
        return "".join(map(html_of, part.renderables))
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Text):
        return f"<p>{_text(part)}</p>" if part.plain.strip() else ""
    if isinstance(part, str):
        return f"<p>{html.escape(part)}</p>" if part.strip() else ""
    raise TypeError(f"a {type(part).__name__} can't be shown as HTML")


def _table(table: Table) -> str:
    columns = table.columns
    caption = f"<caption>{_inline(table.title)}</caption>" if table.title else ""
    head = _row("th", columns, [column.header for column in columns]) if table.show_header else ""
    foot = _row("td", columns, [column.footer for column in columns]) if table.show_footer else ""
    cells = zip(*(column.cells for column in columns), strict=True)
    body = "".join(
        _row("td", columns, row, _classes(own.style or "")) for own, row in zip(table.rows, cells, strict=True)
    )
    parts = (f"<{tag}>{rows}</{tag}>" for tag, rows in (("thead", head), ("tbody", body), ("tfoot", foot)) if rows)
    after = f"<p>{_inline(table.caption)}</p>" if table.caption else ""
    return f'<div class="scroll"><table>{caption}{"".join(parts)}</table></div>{after}'


def _row(tag: str, columns: Sequence[Column], cells: Sequence[RenderableType], look: str = "") -> str:
    parts = []
    for column, cell in zip(columns, cells, strict=True):
        names = " ".join(filter(None, [column.justify if column.justify == "right" else "", _classes(column.style)]))
        parts.append(f"<{tag}{_class(names)}>{_inline(cell)}</{tag}>")
    return f"<tr{_class(look)}>{''.join(parts)}</tr>"


def _inline(part: RenderableType | None) -> str:
    """Return the HTML of a part inside a cell."""
    if part is None:
        return ""
    if isinstance(part, str):
        return _lines(part)
    return _text(part) if isinstance(part, Text) else html_of(part)


def _text(text: Text) -> str:
    """Return a text with the styles of its parts."""
    cuts = sorted({0, len(text.plain), *(at for span in text.spans for at in (span.start, span.end))})
    parts = []
    for start, end in itertools.pairwise(cut for cut in cuts if cut <= len(text.plain)):
        over = [span.style for span in text.spans if span.start <= start and span.end >= end]
        names = " ".join(dict.fromkeys(name for style in (text.style, *over) for name in _names(style)))
        piece = _lines(text.plain[start:end])
        parts.append(f"<span{_class(names)}>{piece}</span>" if names else piece)
    return "".join(parts)


def _lines(text: str) -> str:
    return "<br>".join(html.escape(line) for line in text.strip("\n").split("\n"))


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def _classes(style: str | Style) -> str:
    return " ".join(_names(style))


def _names(style: str | Style) -> Iterator[str]:
    """Yield the style sheet's classes for a style: bold, dim, and its colour."""
    parsed = style if isinstance(style, Style) else Style.parse(style or "none")
    if parsed.bold:
        yield "strong"
    if parsed.dim or (parsed.color and parsed.color.name == "bright_black"):
        yield "dim"
    if parsed.color and parsed.color.name in _COLOURS:
        yield parsed.color.name
