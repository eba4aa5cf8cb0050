"""What a registry, a host of repositories and citation tools read: it parses, and says what they need."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from memfit.foundations import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
YAML = sorted([*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"])


def read(path: str | Path) -> dict[str, object]:
    found = yaml.safe_load((ROOT / path).read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_files_for_others_parse(path: Path) -> None:
    assert read(path)


def test_the_registry_gets_what_it_shows() -> None:
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= PROJECT["urls"].keys()
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())
    classifiers = PROJECT["classifiers"]
    assert "Typing :: Typed" in classifiers and (ROOT / "src" / "memfit" / "py.typed").exists()
    assert any(c.startswith("Operating System ::") for c in classifiers)
    assert not any(c.startswith("License ::") for c in classifiers)  # refused beside an SPDX expression
    assert PROJECT["license"] == "Apache-2.0" and all((ROOT / name).exists() for name in PROJECT["license-files"])
    least = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    supported = [c.rpartition(" ")[2] for c in classifiers if re.search(r"Python :: 3\.\d", c)]
    assert min(tuple(map(int, version.split("."))) for version in supported) == least


def test_versions_agree() -> None:
    assert PROJECT["version"] == __version__ == read("CITATION.cff")["version"]
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    (hooks,) = read(".pre-commit-config.yaml")["repos"]  # type: ignore[misc]
    assert f"ruff=={hooks['rev'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()


def test_ci_runs_what_the_repository_does_on_supported_pythons() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "- run: .ci/run" in text and (ROOT / ".ci/run").exists()
    assert all(f'"{c.rpartition(" ")[2]}"' in text for c in PROJECT["classifiers"] if ":: 3." in c)
    assert all(re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", used) for used in re.findall(r"uses: (.*)", text))


def test_pages_that_forms_link_to_exist() -> None:
    site = re.escape(PROJECT["urls"]["Documentation"])
    linked = [page for path in YAML for page in re.findall(rf"{site}/(\S+)\.html", path.read_text())]
    assert linked and all((ROOT / "docs" / f"{page}.md").exists() for page in linked)
