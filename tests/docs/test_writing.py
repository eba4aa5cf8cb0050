"""Pages, help texts and docstrings keep to docs/internals/writing.md, as far as a program can tell."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import memfit
import memfit.recipes
import memfit.structure
import memfit.tools
from memfit.cli.app import app
from tests.docs.pages import PAGES, ROOT, name_of, prose_of
from tests.docs.writing import clauses_in, faults_of_line, faults_of_opening, forms_in

GENERATED = {
    "docs/reference/api.md",
    "docs/reference/cli.md",
    "docs/reference/plan-file.md",
    "docs/reference/errors.md",
}
"""Pages made of the code's own texts."""
RULES = "docs/internals/writing.md"
"""The page that quotes what it forbids."""
SOURCE = ROOT / "src/memfit"
DOORS = (memfit, memfit.tools, memfit.structure, memfit.recipes)
DOORS_BY_SOURCE = {
    "jittor": {"Step", "Workload", "apply", "checkpoint", "load_workload", "memory", "plan", "seed", "structure"},
    "keras": {"Workload", "apply", "checkpoint_every", "measured_peak", "plan"},
    "integrations": {"FittedLoop", "MemfitCallback"},
}
"""Doors whose packages need not be installed: names, or files of names."""


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
    for door in DOORS:
        for name in door.__all__:
            thing = getattr(door, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            members = vars(thing).items() if inspect.isclass(thing) else ()
            public = [(f"{name}.{key}", value) for key, value in members if not key.startswith("_")]
            for what, found in ((name, thing), *public):
                doc = inspect.getdoc(found) if callable(found) or isinstance(found, property) else None
                if doc:
                    yield f"{door.__name__}.{what}", doc.split("\n\n")[0]
    for folder, names in DOORS_BY_SOURCE.items():
        for path in sorted((SOURCE / folder).glob("*.py")):
            for node in _public(ast.parse(path.read_text())):
                if node.name in names or path.stem in names:
                    for found in (node, *(_public(node) if isinstance(node, ast.ClassDef) else ())):
                        if doc := ast.get_docstring(found):
                            yield f"{folder}.{node.name}.{found.name}", doc.split("\n\n")[0]


def _public(parent: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for node in parent.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def help_lines(group: Any = None, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the command and the first line of each help text."""
    commands: Any = group or typer.main.get_command(app)
    for name, command in commands.commands.items():
        for text in (command.help, *(getattr(option, "help", None) for option in command.params)):
            if text:
                yield f"{path}{name}", text.split("\n\n")[0]
        if hasattr(command, "commands"):
            yield from help_lines(command, f"{path}{name} ")


def text_of(node: ast.AST) -> str:
    """Return the text of a string, with "…" for each value in it; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


def texts() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each string of four words or more in the sources that is no docstring."""
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        others = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        others |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
            id(node) for node in nodes if isinstance(node, ast.JoinedStr)
        }
        for node in nodes:
            if id(node) not in others and len((text := text_of(node)).split()) >= 4:
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", text  # type: ignore[attr-defined]


def test_texts_for_people_are_written_plainly() -> None:
    found = {place: [*forms_in(text), *clauses_in(text)] for place, text in texts()}
    assert len(found) > 1200
    assert {place: faults for place, faults in found.items() if faults} == {}


def test_public_docstrings_begin_plainly() -> None:
    found = {name: list(faults_of_line(line)) for name, line in first_lines()}
    assert len(found) > 90
    assert {name: faults for name, faults in found.items() if faults} == {}


def test_help_begins_plainly() -> None:
    found = [(name, list(faults_of_line(line))) for name, line in help_lines()]
    assert len(found) > 120
    assert [(name, faults) for name, faults in found if faults] == []


@pytest.mark.parametrize(
    "bad",
    [
        "What the script holds and its step does not use comes first.",
        "an accelerator that lives on the CPU",
        "at ×1.05 of the time, predicted",
        "the lowest peak there is is 804.9 KiB",
        "what is recomputed was held against a real step here",
        "what follows of what was found",
        "Calls that a later step adds are timed beside the largest known ones, and told at the pace of those.",
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
