"""What becomes of freed memory where a command owns the process, and what its bar says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit import hardware, ir
from memfit.ir import Plan
from tests.cli.conftest import LEAN, Shell

GIB = 2**30


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process was to do with freed memory, which it is not to do for the tests after these."""
    asked: list[str] = []
    for name, way in (("return_freed_memory", "returned"), ("keep_freed_memory", "kept")):
        monkeypatch.setattr(hardware.heap, name, lambda way=way: not asked.append(way))
    monkeypatch.setattr(hardware.heap, "is_set_by_user", lambda: False)
    return asked


@pytest.fixture
def trained(memfit: Shell, plan_file: Path, tmp_path: Path, ways: list[str]) -> Callable[..., str]:
    """Return a function that trains with a changed plan, and returns what is told."""

    def train(*options: str, peak_bytes: int = 1, plain_bytes: int = 1, **changes: object) -> str:
        plan = ir.codec.read(plan_file, Plan)
        predicted = replace(plan.predicted, peak_upper_bytes=peak_bytes)
        plain = replace(plan.plain, peak_upper_bytes=plain_bytes)
        path = replace(plan, predicted=predicted, plain=plain, **changes).save(tmp_path / "changed.json")
        line = ("train", LEAN, "--plan", str(path), "--out", str(tmp_path / "run"), "--steps", "1")
        _, _, errors = memfit(*line, *options)
        return errors

    return train


@pytest.mark.parametrize(
    ("peak", "options", "way"),
    [
        (lambda free: free // 8, (), "kept"),
        (lambda free: free // 2, (), "returned"),
        (lambda free: GIB // 4, ("--host-budget", "1GiB"), "kept"),
        (lambda free: GIB // 4 + 1, ("--host-budget", "1GiB"), "returned"),
        (lambda free: free // 5, ("--host-budget", "50%"), "returned"),
        (lambda free: free // 2, ("--host-budget", "64GiB"), "returned"),  # the machine has no more than it has
    ],
)
def test_training_by_the_room_that_there_is(
    peak: Callable[[int], int], options: tuple[str, ...], way: str, trained: Callable[..., str], ways: list[str]
) -> None:
    told = trained(*options, peak_bytes=peak(hardware.free_bytes()))
    assert ways == [way]
    assert ("returns freed memory to the system at once" in told) == (way == "returned")


@pytest.mark.parametrize(("options", "way"), [((), "kept"), (("--compare", "2"), "returned")])
def test_the_plain_step_needs_room_where_it_runs_too(
    options: tuple[str, ...], way: str, trained: Callable[..., str], ways: list[str]
) -> None:
    trained(*options, plain_bytes=hardware.free_bytes())
    assert ways == [way]


def test_training_on_a_gpu_leaves_the_heap_alone(trained: Callable[..., str], ways: list[str]) -> None:
    assert "a100-80gb" in trained(device="a100-80gb", peak_bytes=64 * GIB)
    assert not ways


def test_training_with_a_host_budget_that_says_nothing(trained: Callable[..., str]) -> None:
    assert "--host-budget much can't be read" in trained("--host-budget", "much")


@pytest.mark.parametrize(("share", "found"), [(0.2, ["kept"]), (0.3, ["returned"]), ("90%", []), ("0.5x", [])])
@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_scripts_with_a_budget_in_bytes(
    share: float | str,
    found: list[str],
    is_on_gpu: bool,
    memfit: Shell,
    ways: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_on_gpu:
        monkeypatch.setattr(hardware.accelerators, "current_kind", lambda: "cuda")
    (tmp_path / "script.py").write_text("raise SystemExit(7)")
    budget = share if isinstance(share, str) else f"{int(share * hardware.free_bytes())}B"
    assert memfit("run", "--budget", budget, str(tmp_path / "script.py"))[0] == 7
    assert ways == ([] if is_on_gpu else found)


@pytest.mark.parametrize(("share", "found"), [(0.2, ["kept"]), (0.3, []), ("2x", [])])
def test_planning_measures_steps_as_training_runs_them(
    share: float | str, found: list[str], memfit: Shell, ways: list[str]
) -> None:
    budget = share if isinstance(share, str) else f"{int(share * hardware.free_bytes())}B"
    memfit.text("plan", LEAN, "--budget", budget, "--points", "1")
    assert ways == found


@pytest.mark.parametrize(("code_seconds", "said"), [(0.0, "prepare"), (45.6, "prepare, make code (about 45.60 s)")])
def test_the_bar_says_how_long_code_takes_to_make(code_seconds: float, said: str, trained: Callable[..., str]) -> None:
    lines = trained(code_seconds=code_seconds).splitlines()
    assert any(line == said or line.startswith(f"{said}: ") for line in lines), lines


@pytest.mark.parametrize(
    ("code", "strays", "is_told"),
    [
        ("", [], False),
        ("", [["--budget", "6GiB"]], True),
        ("parser.add_argument('--budget')", [["--budget", "6GiB"]], False),
        ("budget: str = ''  # of a dataclass that is parsed", [["--budget=6GiB"]], False),
    ],
)
def test_on_a_gpu_the_budget_is_nine_tenths(
    memfit: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, strays: list[list[str]], is_told: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"raise SystemExit(7)\n{code}")
    monkeypatch.setattr("memfit.hardware.accelerators.current_kind", lambda: "cuda")
    status, _, told = memfit("run", str(script), *(word for stray in strays for word in stray))
    assert (
        status == 7
        and "the budget is 90% of the device" in told
        and ("stands before the script: memfit run" in told) == is_told
    )
