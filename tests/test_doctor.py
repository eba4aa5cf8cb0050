from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from memfit import hardware
from memfit.errors import MissingExtraError, UsageError

doctor = hardware.jittor_doctor


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JITTOR_HOME", str(tmp_path / "jittor"))
    return tmp_path / "jittor"


def found_jittor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Jittor seem installed, and everything that it needs there."""
    spec = importlib.util.spec_from_loader("jittor", loader=None, origin="/somewhere/jittor/__init__.py")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "jittor" else find(name))
    monkeypatch.setattr(doctor, "checks", lambda: [doctor.Check("it", True, "here")])


def test_the_command_reaches_the_checks_by_itself() -> None:
    """In a process of its own, where nothing has imported them: a door may lack what its room has."""
    line = [sys.executable, "-m", "memfit", "tools", "doctor", "jittor", "--no-prepare", "--json"]
    found = subprocess.run(line, capture_output=True, text=True, check=True)
    assert {"jittor", "compiled"} <= {check["name"] for check in json.loads(found.stdout)["checks"]}


def test_the_cache_is_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JITTOR_HOME", raising=False)
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    assert doctor.home() == tmp_path / "jittor"
    monkeypatch.setenv("JITTOR_HOME", str(tmp_path / "other"))
    assert doctor.home() == tmp_path / "other"


def test_checks_change_nothing_and_say_what_to_do(home: Path) -> None:
    found = doctor.checks()
    assert [check.name for check in found][0] == "jittor" and len({check.name for check in found}) == 7
    assert all(check.ok or check.remedy for check in found)
    assert not home.exists()


def test_without_jittor_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memfit\[jittor\]'"):
        doctor.prepare()


def test_what_is_missing_is_said_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    found_jittor(monkeypatch)
    monkeypatch.setattr(doctor, "checks", lambda: [doctor.Check("C++ compiler", False, "no g++", "install g++")])
    with pytest.raises(UsageError, match=r"C\+\+ compiler: no g\+\+. install g\+\+"):
        doctor.prepare()
    assert not home.exists()


def test_the_first_compilation_is_told_and_done_once(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    found_jittor(monkeypatch)
    program = (
        "import time\nfor n in (1, 2): print(f'Compiling core({n}/2) used', end='\\r', flush=True), time.sleep(0.1)"
    )
    monkeypatch.setattr(doctor, "_IMPORT", program)
    told: list[tuple[str, int, int | None]] = []
    for _ in range(2):
        doctor.prepare(lambda *said: told.append(said))
    assert told[-1] == ("compile core", 2, 2) and told.count(("compile core", 2, 2)) <= 2
    assert len(list(home.iterdir())) == 1


def test_a_failed_compilation_is_an_error_and_not_remembered(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    found_jittor(monkeypatch)
    monkeypatch.setattr(doctor, "_IMPORT", "raise SystemExit('no such header')")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"exit status 1.*no such header"):
            doctor.prepare()


def test_the_import_leaves_the_surroundings_as_they_were(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.delenv("log_silent", raising=False)
    monkeypatch.setattr(doctor, "_can_use_cuda", lambda: False)
    before, node = dict(os.environ), platform.node
    seen = {}

    def fake(name: str) -> ModuleType:
        seen.update(os.environ, node=platform.node())
        flags = SimpleNamespace(log_silent=1, cc_type="g++", cc_flags="-Ofast")
        return SimpleNamespace(flags=flags, LOG=SimpleNamespace(log_silent=1))  # type: ignore[return-value]

    monkeypatch.setattr(doctor.importlib, "import_module", fake)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    jittor = doctor._import_jittor()
    assert (seen["HOME"], seen["nvcc_path"], seen["log_silent"], seen["node"]) == (str(home), "", "1", "memfit")
    assert dict(os.environ) == before and platform.node is node
    assert jittor.flags.log_silent == jittor.LOG.log_silent == 0  # or errors would be silent too
    assert doctor._set_up(jittor).flags.cc_flags.split() == ["-Ofast", "-fno-reciprocal-math", "-mno-recip"]  # once


def test_onednn_is_linked_from_its_wheels(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for version in ("old", "new"):
        places = tmp_path / version / "lib", tmp_path / version / "include"
        for place in places:
            place.mkdir(parents=True)
        monkeypatch.setattr(doctor, "_onednn", lambda places=places: places)
        doctor._seed_onednn()
        folder = home / ".cache" / "jittor" / "mkl" / "dnnl_lnx_2.2.0_cpu_gomp"
        assert [(folder / name).resolve() for name in ("lib", "include")] == list(places)


def test_the_command_line_shows_the_checks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.cli.app import doctor as examine

    monkeypatch.setattr(doctor, "_version_of", lambda package: None)  # or nothing is said of installing Jittor
    examine("jittor", prepare=False, as_json=False)
    said = capsys.readouterr().out
    assert "C++ compiler" in said and "memfit[jittor]" in " ".join(said.split())
