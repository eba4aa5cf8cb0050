"""memfit as its users install it: a wheel, in an environment of its own, used outside of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elsewhere import skipped_without

ROOT = Path(__file__).resolve().parents[2]
IS_WANTED = os.environ.get("MEMFIT_TEST_WHEEL") == "1"
Run = Callable[..., subprocess.CompletedProcess[str]]


# They take minutes, and the package registry.
pytest_pycollect_makemodule = skipped_without(IS_WANTED, "builds and installs the wheel: make test-wheel")


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist of this tree, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], check=True, env=_clean())
    return folder


@pytest.fixture(scope="session")
def environment(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with nothing but the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=True)
    (wheel,) = distributions.glob("*.whl")
    install(folder / "bin" / "python", "pip>=25")  # which takes a third of the time of the one that Python brings
    install(folder / "bin" / "python", str(wheel))
    return folder / "bin" / "python"


def install(python: Path, *packages: str) -> None:
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-compile", *constraints, *packages], check=True, env=_clean()
    )


@pytest.fixture(scope="session")
def complete(environment: Path) -> Path:
    """That Python once `pip install 'memfit[all]'` has run there, as errors and pages say."""
    install(environment, "memfit[all]")
    return environment


@pytest.fixture
def memfit(environment: Path, tmp_path: Path) -> Run:
    """Runs the installed command in an empty folder."""

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        line = [str(environment.parent / "memfit"), *arguments]
        done = subprocess.run(
            line, cwd=tmp_path, env=variables(environment), capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def variables(python: Path) -> dict[str, str]:
    """Return the variables of a shell in which an environment is activated."""
    own = {"MEMFIT_CACHE_DIR": str(python.parent / "cache"), "OMP_NUM_THREADS": "1"}
    return _clean() | own | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}


def _clean() -> dict[str, str]:
    """Return this process's environment without what makes this tree importable."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
