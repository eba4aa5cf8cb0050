"""Every example of the README and the docs runs as it is written.

The blocks of Python of a page are one program, those of the shell one script. A block with a title is a file. Pages
that use a `mine.py` or a `plan.json` of the reader's find small ones.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import memfit
from tests import workloads
from tests.docs.pages import DOCS, PAGES, ROOT, Block, blocks, name_of, run_python, run_shell

MINE = {"docs/guides/resume.md": "lean"}
"""Pages whose `mine.py` needs batches that come back on resume; all others have a quicker one."""
ELSEWHERE = {"docs/guides/jittor.md": "tests/jittor", "docs/guides/keras.md": "tests/keras"}
"""Pages whose examples need an environment of their own, and the tests that run them there."""
LONG = {
    "docs/guides/another-card.md",
    "docs/guides/budget.md",
    "docs/guides/compare-cards.md",
    "docs/guides/compile.md",
    "docs/guides/devices.md",
    "docs/guides/fleet.md",
    "docs/guides/ladder.md",
    "docs/guides/memory-in-a-run.md",
    "docs/guides/offload.md",
    "docs/guides/on-a-gpu.md",
    "docs/guides/out-of-memory.md",
    "docs/guides/precision.md",
    "docs/guides/resume.md",
    "docs/guides/script.md",
    "docs/guides/sharding.md",
    "docs/guides/structure.md",
    "docs/guides/trackers.md",
    "docs/guides/trainers.md",
    "docs/guides/varying-shapes.md",
    "docs/guides/video.md",
    "docs/quickstart.md",
    "docs/reference/levers.md",
    "docs/reference/verbs.md",
}
"""Pages of real sizes, of timed steps, and long ones whose verbs have tests of their own: CI runs them."""
BRIEFLY = "from memfit.hardware import measurement; measurement._SECONDS = 0.0; from memfit.cli.app import main; main()"
"""The command line, with one run of what it measures of a device."""
OTHERWISE = {
    "docs/concepts/plan.md": {"memfit plan": "memfit plan --precision 32-true --points 1"},
    "docs/guides/another-card.md": {
        "byte_lm.py:workload --device t4 --budget 160MiB": "mine.py:workload --device t4 --budget 0.9x",
        "memfit plan": "memfit plan --precision 16-mixed --points 1",
    },
    "docs/guides/budget.md": {"memfit plan": "memfit plan --precision 32-true --points 2"},
    "docs/guides/compare-cards.md": {"memfit plan": "memfit plan --precision bf16-mixed"},
    "docs/guides/compile.md": {
        'compile=True, precisions=["32-true"])': 'compile=True, precisions=["32-true"], points=1)'
    },
    "docs/guides/devices.md": {"memfit tools probe-devices": f"python -c '{BRIEFLY}' tools probe-devices"},
    "docs/guides/fleet.md": {
        "--within 24h\n": "--within 24h --ranks 1-2\n",
        "memfit plan": "memfit plan --precision 32-true",
    },
    "docs/guides/ladder.md": {
        "--html": "--numerics exact --html",
        "memfit tools ladder": "memfit tools ladder --seconds 0.01",
        "min_run_seconds=0.05": "min_run_seconds=0.01",
    },
    "docs/guides/offload.md": {
        '"points": 1': '"points": 1, "precisions": ["32-true"]',
        "memfit plan": "memfit plan --precision 32-true --points 1",
    },
    "docs/guides/out-of-memory.md": {"memfit plan": "memfit plan --precision 32-true --points 1"},
    "docs/guides/precision.md": {"batch_size=2": "batch_size=1"},
    "docs/guides/resume.md": {
        "until memfit train mine.py:workload": "until memfit train mine.py:preempted",
        "--steps 10000": "--steps 4",
        'numerics="exact"': 'numerics="exact", precisions=["32-true"]',
    },
    "docs/guides/script.md": {"points=1": 'precisions=["32-true"], points=1'},
    "docs/guides/sharding.md": {"torch.randn(64, 256)": "torch.randn(16, 256)"},
    "docs/guides/structure.md": {"points=1": 'precisions=["32-true"], points=1'},
    "docs/guides/trainers.md": {"points=1)": 'points=1, numerics="exact")'},
    "docs/guides/varying-shapes.md": {"points=3": "points=2"},
    "docs/quickstart.md": {
        'numerics="exact")': 'numerics="exact", precisions=["32-true"], points=1)',
        "--numerics exact -o": "--numerics exact --precision 32-true --points 2 -o",
        "--steps 20": "--steps 1",
        "--checkpoint-every 10": "--checkpoint-every 1",
    },
    "docs/reference/levers.md": {"points=2": "points=1"},
    "docs/reference/verbs.md": {
        'numerics="exact")\nexcept': 'numerics="exact", precisions=["32-true"])\nexcept',
        "points=3": 'precisions=["32-true"], points=2',
        "min_run_seconds=0.05": "min_run_seconds=0.01",
    },
}
"""What is put in the place of what would take too long, or needs a scheduler."""
SAID = {
    "docs/guides/another-card.md": ["24 calls take the flash kernel"],
    "docs/guides/budget.md": ["Frontier"],
    "docs/guides/devices.md": ["NVIDIA A100 SXM4, 80 GB", "measured by memfit tools probe-devices", "58.3 TFLOP/s"],
    "docs/guides/fleet.md": ["Fewest cards: ", "Cheapest: ", "as you gave it", "l4"],
    "docs/guides/resume.md": ["damaged checkpoint", "another plan"],
    "docs/internals/allocator.md": ["41 42 66\n41 41 80\n", "total_reserved: 66.0MiB"],
    "docs/guides/trackers.md": ["4 trackers have 3 steps each"],
    "docs/quickstart.md": ["100.0 MiB", "checkpointing", "Holds: measured"],
}
"""What examples print, beside what they assert themselves."""
SHARDING = "docs/internals/sharding.md"
MORE = {
    "docs/guides/devices.md": ['MEMFIT_DEVICES="$PWD/machine.toml" memfit devices cpu', "memfit devices 4070"],
    "docs/guides/trackers.md": ["python -m tests.docs.logged"],
}
"""Commands after a page's own, which show what those did."""


def pages_with_examples() -> list[object]:
    """Return the pages whose examples are run here; the README's are the quickstart's."""
    names = [name_of(page) for page in PAGES if blocks(page, "python") or blocks(page, "sh")]
    here = [name for name in names if name not in ELSEWHERE and name != "README.md"]
    return [pytest.param(name, marks=(pytest.mark.ci,) * (name in LONG)) for name in here]


@pytest.fixture(scope="session")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Makes a plan for a workload that stands for the reader's, once."""

    @functools.cache
    def make(name: str) -> bytes:
        path, workload = tmp_path_factory.mktemp("plan") / "plan.json", getattr(workloads, name)()
        budget = int(0.8 * memfit.estimate(workload).peak_bytes)
        plan = memfit.plan(workload, budget=budget, numerics="exact", precisions=["32-true"], points=2)
        plan.save(path)
        return path.read_bytes()

    return make


@pytest.mark.parametrize("name", pages_with_examples())
def test_examples_run(name: str, plan_of: Callable[[str], bytes], tmp_path: Path) -> None:
    page, mine = ROOT / name, MINE.get(name, "quick")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "mine.py").write_text(f"from tests.workloads import preempted, {mine} as workload\n")
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.code)
    environment = {"COLUMNS": "200", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for block in (block for block in blocks(page, "toml") if block.file != "prices.toml"):
        (tmp_path / "devices.toml").write_text(block.code)
        environment["MEMFIT_DEVICES"] = str(tmp_path / "devices.toml")
    program = _program(page)
    script = "\n".join([*(block.code for block in blocks(page, "sh")), *MORE.get(name, ())])
    if "plan.json" in script and "-o plan.json" not in script:
        (tmp_path / "plan.json").write_bytes(plan_of(mine))
    for usual, here in OTHERWISE.get(name, {}).items():
        assert usual in script + program
        program, script = program.replace(usual, here), script.replace(usual, here)
    printed = run_python(program, tmp_path, environment)
    printed += run_shell(script, tmp_path, environment)
    missing = [words for words in SAID.get(name, ()) if words not in printed]
    assert missing == [], printed
    if name == SHARDING:  # the more is shared, the less is held
        peaks = [int(n) for n in re.findall(r"^(?:ddp|zero\d|checkpointed) (\d+)", printed, flags=re.MULTILINE)]
        assert len(peaks) == 5 and peaks == sorted(peaks, reverse=True)


def _program(page: Path) -> str:
    """Return a page's program, with its files' code before it, which it goes on from."""
    return "\n".join(block.code for block in blocks(page, "python"))


def test_each_page_says_what_its_blocks_are() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in {"python", "sh", "toml", "json", "text", ""}, (page, block)
            if block.language == "":  # is not run: how to install, and commands that take hours
                assert all(_is_set_up(line) for line in block.code.splitlines() if line.strip()), (page, block)


def _is_set_up(line: str) -> bool:
    return "pip install" in line or line.startswith(("make ", "python3 -m venv", "jittor-venv/bin/"))


def test_examples_of_other_environments_are_run_there() -> None:
    for name, folder in ELSEWHERE.items():
        assert f'"{Path(name).name}"' in (ROOT / folder / "test_docs.py").read_text()
        assert blocks(ROOT / name, "sh") == []


def test_the_readme_shows_the_quickstart() -> None:
    readme, quickstart = ROOT / "README.md", DOCS / "quickstart.md"
    (mine, use), (whole, in_a_loop) = blocks(readme, "python"), blocks(quickstart, "python")
    assert mine == whole and mine.file == "mine.py"
    _are_lines_of(use, in_a_loop, besides={"    print(step(mine.batch).loss)"})
    (shell,), (more,) = blocks(readme, "sh"), blocks(quickstart, "sh")
    _are_lines_of(shell, more)
    kept = (ROOT / "examples" / "mine.py").read_text()
    assert kept.endswith(mine.code)


def _are_lines_of(block: Block, whole: Block, besides: set[str] | None = None) -> None:
    lines = {line.split("#")[0].rstrip() for line in whole.code.splitlines()} | (besides or set())
    missing = [line for line in block.code.splitlines() if line.split("#")[0].rstrip() not in lines]
    assert missing == []


def test_the_verbs_are_all_shown() -> None:
    program = _program(DOCS / "reference" / "verbs.md")
    missing = [name for name in memfit.__all__ if name[0].islower() and f"memfit.{name}" not in program]
    assert missing == []
