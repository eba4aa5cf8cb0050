"""Every example of the README and the docs runs as it is written.

A block of the README, the home page, the Quickstart and the guides stands by itself: it runs in a folder with nothing
but the files that it names, as its page shows them. All blocks of Python of any other page are one program, those of
the shell one script; a `mine.py` or `plan.json` that such a page does not show is a small one. A block with a title is
a file. Pages in Chinese have the blocks of those in English (`test_chinese.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import memfit
from tests import workloads
from tests.docs import outputs
from tests.docs.pages import (
    ALONE,
    CHINESE,
    DOCS,
    PAGES,
    README,
    ROOT,
    Block,
    blocks,
    is_run,
    name_of,
    run_alone,
    run_python,
    run_shell,
)

ELSEWHERE = {"docs/guides/jittor.md": "tests/jittor", "docs/guides/keras.md": "tests/keras"}
"""Pages whose examples need an environment of their own, and the tests that run them there."""
OFTEN = {"docs/guides/any-step.md"}
"""Pages whose blocks take a second or two. CI runs those of the others, which plan or time steps."""
LONG = {
    "docs/reference/devices.md",
    "docs/reference/frozen-weights.md",
    "docs/reference/levers.md",
    "docs/reference/verbs.md",
}
"""Pages of real sizes, and long ones whose verbs have tests of their own: CI runs them."""
BRIEFLY = "from memfit.hardware import measurement; measurement._SECONDS = 0.0; from memfit.cli.app import main; main()"
"""The command line, with one run of what it measures of a device."""
OTHERWISE = {
    "docs/concepts/plan.md": {"memfit plan": "memfit plan --precision 32-true --points 1"},
    "docs/guides/fleet.md": {"--within 24h\n": "--within 24h --ranks 1-2\n"},
    "docs/guides/ladder.md": {"memfit tools ladder": "memfit tools ladder --seconds 0.01", "=0.05": "=0.01"},
    "docs/guides/resume.md": {"mine.py:workload --budget 1GiB": "tests.workloads:preempted --budget 1GiB"},
    "docs/reference/devices.md": {"memfit tools probe-devices": f"python -c '{BRIEFLY}' tools probe-devices"},
    "docs/reference/levers.md": {"points=2": "points=1"},
    "docs/reference/verbs.md": {
        'numerics="exact")\nexcept': 'numerics="exact", precisions=["32-true"])\nexcept',
        "points=3": 'precisions=["32-true"], points=2',
        "min_run_seconds=0.05": "min_run_seconds=0.01",
    },
}
"""What is put in the place of what would take too long, or needs a scheduler."""
SAID = {
    "docs/internals/allocator.md": ["41 42 66\n41 41 80\n", "total_reserved: 66.0MiB"],
    "docs/reference/devices.md": ["NVIDIA A100 SXM4, 80 GB", "measured by memfit tools probe-devices", "58.3 TFLOP/s"],
}
"""What examples print, beside what they assert themselves and what their page shows."""
SHARDING = "docs/internals/sharding.md"
MORE = {
    "docs/reference/devices.md": ['MEMFIT_DEVICES="$PWD/machine.toml" memfit devices cpu', "memfit devices 4070"],
}
"""Commands after a page's own, which show what those did."""


def blocks_alone() -> Iterator[object]:
    """Yield each block that stands by itself, once where several pages have it, with the outputs that they show."""
    found: dict[tuple[str, ...], tuple[Path, list[Block]]] = {}
    for page in ALONE:
        if name_of(page) in ELSEWHERE:
            continue
        files = {block.file: block.code for block in blocks(page) if block.file}
        for block in filter(is_run, blocks(page)):
            key = (block.code, *(code for file, code in files.items() if block.names(file)))
            found.setdefault(key, (page, []))[1].append(block)
    for page, same in found.values():
        marks = () if name_of(page) in OFTEN else (pytest.mark.ci,)
        first = same[0].code.strip().splitlines()[0]
        yield pytest.param(page, same, marks=marks, id=f"{page.stem}: {same[0].file or first[:60]}")


@pytest.mark.parametrize(("page", "same"), list(blocks_alone()))
def test_a_block_runs_by_itself(page: Path, same: list[Block], tmp_path: Path) -> None:
    code = same[0].code
    for usual, here in OTHERWISE.get(name_of(page), {}).items():
        code = code.replace(usual, here)
    environment = {**outputs.ENVIRONMENT, "TRACKIO_DIR": str(tmp_path / "trackio")}
    printed = run_alone(page, replace(same[0], code=code), tmp_path, environment)
    if page.stem == "trackers" and not same[0].file:  # a command, or a loop
        run_shell("python -m tests.docs.logged", tmp_path, environment)
    for block in same:
        assert outputs.missing(block.output, printed) == [], printed


def test_outputs_that_are_not_printed_are_found() -> None:
    printed = "Fits: 97.2 of 100.0 MiB\nPeak   97.2 MiB predicted\n"
    assert outputs.missing("Fits: 99.0 of 100.0 MiB\n…\nPeak   1.5 GiB measured\n", printed) == []
    assert outputs.missing("Passes: 99.0\n", printed) == ["Passes: 99.0"]
    assert outputs.shortened(["1", "2", "3", "4"], "a\n…\nb\n") == ["1", "…", "4"]
    assert outputs.lines_of("capture\nsolve: 1/3, 0:13 so far\nPeak: 1\n") == ["Peak: 1"]


def test_what_is_done_otherwise_is_there() -> None:
    for name, instead in OTHERWISE.items():
        codes = [block.code for block in blocks(ROOT / name)]
        assert [usual for usual in instead if not any(usual in code for code in codes)] == []


def pages_in_order() -> Iterator[object]:
    """Yield the pages whose examples are read from the top."""
    for page in PAGES:
        if page not in ALONE and page not in CHINESE and any(map(is_run, blocks(page))):
            yield pytest.param(name_of(page), marks=(pytest.mark.ci,) * (name_of(page) in LONG))


@pytest.fixture(scope="session")
def plan_of_mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for the workload that stands for the reader's."""
    path, workload = tmp_path_factory.mktemp("plan") / "plan.json", workloads.quick()
    budget = int(0.8 * memfit.estimate(workload).peak_bytes)
    plan = memfit.plan(workload, budget=budget, numerics="exact", precisions=["32-true"], points=2)
    plan.save(path)
    return path


@pytest.mark.parametrize("name", list(pages_in_order()))
def test_examples_of_a_page_run_in_order(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    page = ROOT / name
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "mine.py").write_text("from tests.workloads import quick as workload\n")
    environment = {"COLUMNS": "200"}
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.code)
        if block.file == "devices.toml":
            environment["MEMFIT_DEVICES"] = str(tmp_path / block.file)
    program = _program(page)
    script = "\n".join([*(block.code for block in blocks(page, "sh")), *MORE.get(name, ())])
    if "plan.json" in script and "-o plan.json" not in script:
        (tmp_path / "plan.json").write_bytes(request.getfixturevalue("plan_of_mine").read_bytes())
    for usual, here in OTHERWISE.get(name, {}).items():
        program, script = program.replace(usual, here), script.replace(usual, here)
    printed = run_python(program, tmp_path, environment)
    printed += run_shell(script, tmp_path, environment)
    missing = [words for words in SAID.get(name, ()) if words not in printed]
    assert missing == [], printed
    if name == SHARDING:  # the more is shared, the less is held
        peaks = [int(n) for n in re.findall(r"^(?:ddp|zero\d|checkpointed) (\d+)", printed, flags=re.MULTILINE)]
        assert len(peaks) == 5 and peaks == sorted(peaks, reverse=True)


def _program(page: Path) -> str:
    """Return a page's program."""
    return "\n".join(block.code for block in blocks(page, "python"))


def test_each_page_says_what_its_blocks_are() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in {"python", "sh", "toml", "json", "text", ""}, (page, block)
            if block.language == "":  # is not run: how to install, and commands that take hours
                assert all(_is_set_up(line) for line in block.code.splitlines() if line.strip()), (page, block)


def _is_set_up(line: str) -> bool:
    return "pip install" in line or line.startswith(("make ", "python3 -m venv", "jittor-venv/bin/", "torchrun "))


def test_files_of_a_name_are_the_same_on_the_pages_that_one_reads_first() -> None:
    first = (README, DOCS / "index.md", DOCS / "quickstart.md", DOCS / "guides/out-of-memory.md")
    shown = {(block.file, block.code) for page in first for block in blocks(page) if block.file}
    assert sorted(file for file, _ in shown) == ["mine.py", "train.py"]
    assert (ROOT / "examples" / "mine.py").read_text().endswith(dict(shown)["mine.py"])


def test_examples_of_other_environments_are_run_there() -> None:
    for name, folder in ELSEWHERE.items():
        assert f'"{Path(name).name}"' in (ROOT / folder / "test_docs.py").read_text()
        assert blocks(ROOT / name, "sh") == []


def test_the_verbs_are_all_shown() -> None:
    program = _program(DOCS / "reference" / "verbs.md")
    missing = [name for name in memfit.__all__ if name[0].islower() and f"memfit.{name}" not in program]
    assert missing == []
