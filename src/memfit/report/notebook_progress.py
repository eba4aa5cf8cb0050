"""Progress bars in the output of a notebook's cell.

IPython shows and replaces them itself, so that no widgets have to be installed.
"""

from __future__ import annotations

import functools
import html
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from memfit.foundations import format_seconds, is_called_by_memfit
from memfit.report.notebook import framed

_P = ParamSpec("_P")
_R = TypeVar("_R")
_SECONDS_BETWEEN = 0.1
Defaults = Callable[["Bars", Mapping[str, Any]], dict[str, Callable[..., None]]]
"""Returns the progress arguments for a call with these keyword arguments."""


def in_notebook() -> bool:
    """Tell whether this runs in the kernel of a notebook."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return getattr(shell, "kernel", None) is not None


def with_bars(defaults: Defaults) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function show bars in a notebook, unless the call has progress arguments of its own.

    Calls from within memfit show none, since the outer call does.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def shown(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not in_notebook() or is_called_by_memfit():
                return function(*args, **kwargs)
            with Bars(f"memfit.{function.__name__}") as bars:
                told: dict[str, Any] = {**defaults(bars, kwargs), **kwargs}
                return function(*args, **told)

        return shown

    return decorate


def stages(bars: Bars, arguments: Mapping[str, Any]) -> dict[str, Callable[..., None]]:
    """Return the `progress=` argument of a function with named stages."""
    return {"progress": bars}


@dataclass
class _Stage:
    done: int = 0
    total: int | None = None
    note: str = ""
    begun: float = field(default_factory=lambda: monotonic())

    @property
    def left(self) -> str:
        """Return the time left, at the speed so far."""
        if not self.total or not 0 < self.done < self.total:
            return ""
        seconds = (monotonic() - self.begun) * (self.total - self.done) / self.done
        return f"{format_seconds(seconds)} left" if seconds >= 1 else ""


class Bars:
    """A bar for each reported stage; use it as a context manager. At the end it shows the call with its seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stages: dict[str, _Stage] = {}
        self._handle: Any = None
        self._shown = -1.0
        self._begun = monotonic()

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._handle is None:
            return
        if error is None:
            text = f"{self._name}: {format_seconds(monotonic() - self._begun)}"
            self._handle.update(_Output(text, f'<span style="opacity:.7">{html.escape(text)}</span>'))
        else:
            self._show()

    def __call__(self, stage: str, done: int, total: int | None, note: str = "") -> None:
        """Report the progress of a stage."""
        state = self._stages.setdefault(stage, _Stage())
        state.done, state.total, state.note = done, total, note
        if done == total or monotonic() - self._shown >= _SECONDS_BETWEEN:
            self._show()

    def _show(self) -> None:
        from IPython.display import display  # there, in a notebook

        self._shown = monotonic()
        output = _Output(self._text(), framed(self._rows()))
        if self._handle is None:
            self._handle = display(output, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(output)

    def _text(self) -> str:
        return ", ".join(f"{name} {stage.done}/{stage.total or '?'}" for name, stage in self._stages.items())

    def _rows(self) -> str:
        rows = []
        for name, stage in self._stages.items():
            state = f' value="{stage.done}" max="{stage.total}"' if stage.total else ""
            count = f"{stage.done:,} of {stage.total:,}" if stage.total else f"{stage.done:,}"
            info = " · ".join(part for part in (count, stage.left, stage.note) if part)
            rows.append(
                f"<tr><td>{html.escape(name)}</td><td><progress{state}></progress></td>"
                f"<td>{html.escape(info)}</td></tr>"
            )
        return f"<table>{''.join(rows)}</table>"


class _Output:
    """An output for IPython: HTML, with text as fallback."""

    def __init__(self, text: str, page: str) -> None:
        self._text, self._page = text, page

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._page
