"""The display of records: in a line, as text, and as HTML in a notebook.

Records don't import tables: `memfit.report` registers the view of each type with `show_with`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

_MOST_FIELDS = 12
_Item = TypeVar("_Item")


class View(NamedTuple):
    """The view of one type of record.

    Args:
        line: Returns the text of `repr` within angle brackets; None for the fields that are not at their defaults.
        text: Returns the tables for `print`; None for the text of `repr`.
        html: Returns the HTML for a notebook; None for the text.
    """

    line: Callable[[Any], str] | None = None
    text: Callable[[Any], str] | None = None
    html: Callable[[Any], str] | None = None


_NOTHING = View()


_views: dict[type, View] = {}


def show_with(kind: type, view: View) -> None:
    """Register the view of a type of record."""
    _views[kind] = view


class Shown(msgspec.Struct, frozen=True):
    """A record with a `repr` of one line, and the text and HTML registered with `show_with`."""

    def __repr__(self) -> str:
        line = _view(self).line
        return fields_line(self) if line is None else f"<{type(self).__name__} {line(self)}>"

    def __str__(self) -> str:
        text = _view(self).text
        return repr(self) if text is None else text(self)

    def _repr_html_(self) -> str | None:
        html = _view(self).html
        return None if html is None else html(self)


class ShownList(list[_Item]):
    """A list that is printed, and shown in a notebook, as one table."""

    def __str__(self) -> str:
        text = _view(self).text
        return repr(self) if text is None or not self else text(self)

    def _repr_html_(self) -> str | None:
        html = _view(self).html
        return None if html is None or not self else html(self)


def _view(record: Any) -> View:
    return _views.get(type(record), _NOTHING)


_short = reprlib.Repr()  # shortens long values at any depth
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict = 3, 3, 3, 4
_short.maxstring, _short.maxother = 60, 200


def fields_line(record: msgspec.Struct) -> str:
    """Return a record's type and the fields that are not at their defaults, with long values shortened."""
    parts = []
    for field in msgspec.structs.fields(record):
        value = getattr(record, field.name)
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        if default is msgspec.NODEFAULT or value != default:
            parts.append(f"{field.name}={_short.repr(value)}")
    more = [f"and {len(parts) - _MOST_FIELDS} more"] if len(parts) > _MOST_FIELDS else []
    return f"{type(record).__name__}({', '.join([*parts[:_MOST_FIELDS], *more])})"
