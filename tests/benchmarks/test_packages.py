"""The third zoo's table and its environment: what can be held without the packages."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from benchmarks.packages import __main__ as command
from benchmarks.packages.zoo import FAMILIES, PACKAGES, STEPS
from memfit import UsageError, Workload

PINNED = command.pinned(command.REQUIREMENTS.read_text())


def test_the_table_has_twenty_steps_of_ten_packages_each_pinned() -> None:
    assert len(STEPS) >= 20
    assert len(set(PACKAGES.values())) >= 10
    assert set(PACKAGES.values()) <= PINNED.keys()


def test_no_requirement_brings_another_torch_or_cuda() -> None:
    assert not [name for name in PINNED if name.startswith(("nvidia", "triton", "cuda"))]
    assert "torch" not in PINNED


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_imported_without_its_packages_and_has_exactly_the_steps_of_the_table(family: str) -> None:
    module = importlib.import_module(f"benchmarks.packages.{family}")
    own = {
        name: made
        for name, made in vars(module).items()
        if inspect.isfunction(made) and made.__module__ == module.__name__ and not name.startswith("_")
    }
    assert own.keys() == FAMILIES[family].keys()
    assert {inspect.signature(made).return_annotation for made in own.values()} == {Workload.__name__}


def test_pins_are_read_past_comments() -> None:
    assert command.pinned("# all\na==1.0\n\nB_c==2.1  # why\n") == {"a": "1.0", "B_c": "2.1"}


def test_a_workload_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="--only nothing: the zoo has x_decoder"):
        command.run(quick=True, only=["nothing"])


def test_a_missing_environment_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "PYTHON", tmp_path / "python")
    with pytest.raises(UsageError, match="run `make packages` first"):
        command.run(quick=True)


def test_each_row_names_its_package_and_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    monkeypatch.setattr(command, "PYTHON", tmp_path / "python")
    row = {"workload": "vit_lion", "kind": "plain", "refused": "ValueError: no"}
    monkeypatch.setattr(command, "measured", lambda names, table, python, jobs, before: [row])
    cases, summary = command.run(quick=True)
    assert cases == [{**row, "package": f"vit-pytorch {PINNED['vit-pytorch']}"}]
    assert (summary["steps"], summary["refused"]) == (1, 1)
