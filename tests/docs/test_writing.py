"""Pages, help texts and docstrings keep to docs/internals/writing.md, as far as a program can tell."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import memfit
from memfit.cli.app import app
from tests.docs.pages import PAGES, ROOT, name_of, prose_of
from tests.docs.writing import faults_of_line, faults_of_opening, forms_in

LINES_TO_DO = {
    *("Plan", "Plan.is_proven"),
    *(
        "Verification.holds",
        "adapt",
        "compile_backend",
        "fit",
        "ladder",
        "plan",
        "probe_range",
    ),
    "verify",
}
"""Public names whose docstrings' first lines were not gone through yet."""
COMMANDS_TO_DO = {
    *("consolidate", "demo", "doctor", "estimate", "fleet", "ladder", "plan", "probe-range", "run", "train", "verify"),
}
"""Commands whose help was not gone through yet."""
GENERATED = {
    "docs/reference/api.md",
    "docs/reference/cli.md",
    "docs/reference/plan-file.md",
    "docs/reference/errors.md",
}
"""Pages made of the code's own texts."""
RULES = "docs/internals/writing.md"
"""The page that quotes what it forbids."""


def opening_of(page: Path) -> str:
    """Return a page's first paragraph, without links and marks."""
    for paragraph in prose_of(page).split("\n\n"):
        if not re.match(r"\s*(#|$|!\[|<|- |\d+\. )", paragraph):
            return re.sub(r"\[([^\]]*)\]\([^)]*\)|[*_`]", r"\1", paragraph)
    return ""


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in GENERATED], ids=name_of)
def test_a_page_is_written_plainly(page: Path) -> None:
    assert list(faults_of_opening(opening_of(page))) == []
    if name_of(page) != RULES:
        assert list(forms_in(re.sub(r"\]\([^)]*\)", "]", prose_of(page)))) == []


def first_lines() -> Iterator[tuple[str, str]]:
    """Yield the name and the first line of each public docstring."""
    for name in memfit.__all__:
        thing = getattr(memfit, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        members = vars(thing).items() if inspect.isclass(thing) else ()
        public = [(f"{name}.{key}", value) for key, value in members if not key.startswith("_")]
        for what, found in ((name, thing), *public):
            doc = inspect.getdoc(found) if callable(found) or isinstance(found, property) else None
            if doc:
                yield what, doc.split("\n\n")[0]


def help_lines() -> Iterator[tuple[str, str]]:
    """Yield the command and the first line of each help text."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for text in (command.help, *(getattr(option, "help", None) for option in command.params)):
            if text:
                yield name, text.split("\n\n")[0]


def test_public_docstrings_begin_plainly() -> None:
    found = {name: list(faults_of_line(line)) for name, line in first_lines()}
    assert len(found) > 40
    assert {name: faults for name, faults in found.items() if faults and name not in LINES_TO_DO} == {}
    assert {name for name in LINES_TO_DO & set(found) if not found[name]} == set()  # those are done: take them out


def test_help_begins_plainly() -> None:
    found = [(name, list(faults_of_line(line))) for name, line in help_lines()]
    assert len(found) > 100
    assert [(name, faults) for name, faults in found if faults and name not in COMMANDS_TO_DO] == []


@pytest.mark.parametrize(
    "bad",
    [
        "What the script holds and its step does not use comes first.",
        "an accelerator that lives on the CPU",
        "at ×1.05 of the time, predicted",
        "the lowest peak there is is 804.9 KiB",
        "what is recomputed was held against a real step here",
        "what follows of what was found",
        "A prediction error is predicted over measured, less one.",
        "word " * 31,
    ],
)
def test_bad_forms_are_found(bad: str) -> None:
    assert list(faults_of_line(bad))


def test_good_forms_pass() -> None:
    good = (ROOT / RULES).read_text().partition("## Good and bad")[2].splitlines()
    said = [line.split(" | ")[1].rstrip(" |") for line in good if line.startswith("| ") and " | " in line][1:]
    assert len(said) > 8
    assert [faults for text in said if (faults := list(faults_of_opening(text)))] == []
