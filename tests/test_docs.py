"""The examples of the README and the docs run as they are written, and their figures are measured ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memfit

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_library_examples_run(tmp_path: Path) -> None:
    program = "\n".join(blocks((ROOT / "docs" / "library.md").read_text(), "python"))
    missing = [name for name in memfit.__all__ if name[0].islower() and f"memfit.{name}" not in program]
    assert missing == []
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/small/report.html").exists()


def test_allocator_examples_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "allocator.md").read_text()
    program, (shell,) = "\n".join(blocks(text, "python")), blocks(text, "sh")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("41 42 66\n41 41 80\n")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", shell]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "total_reserved: 66.0MiB" in done.stdout


@pytest.mark.parametrize("page", ["compile", "ladder", "levers", "loops", "steps", "structure"])
def test_examples_run(page: str, tmp_path: Path) -> None:
    program = "\n".join(blocks((ROOT / "docs" / f"{page}.md").read_text(), "python"))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sharding_examples_run(tmp_path: Path) -> None:
    program = "\n".join(blocks((ROOT / "docs" / "sharding.md").read_text(), "python"))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(peaks) == 5 and peaks == sorted(peaks, reverse=True)


def test_allocator_figures_are_those_of_the_result_file() -> None:
    from benchmarks.tables import results

    summary, text = results("allocator")["summary"], (ROOT / "docs" / "allocator.md").read_text()
    words = " ".join(text.split())
    said = re.search(
        r"Over ([\d,]+) sequences of ([\d,]+) random requests in all \(([\d,]+) retries, ([\d,]+) out of", words
    )
    assert said is not None
    figures = [int(figure.replace(",", "")) for figure in said.groups()]
    assert figures == [summary[key] for key in ("sequences", "requests", "retries", "out_of_memory")]
    assert summary["differ"] == 0
    assert " 0 sequences differed" in words


def test_figures_of_random_programs_are_those_of_the_result_file() -> None:
    from benchmarks.tables import results

    summary, words = results("fuzzing")["summary"], " ".join((ROOT / "docs" / "accuracy.md").read_text().split())
    assert f"Over {summary['fuzzed']:,} programs {summary['fuzzed_wrong']} were wrong" in words


def test_figures_of_large_models_are_those_of_the_result_file() -> None:
    from benchmarks.tables import results

    cases = {case["case"]: case for case in results("large")["cases"]}
    one, seven, plan = (
        cases[f"{what}, A100{more}"]
        for what, more in (("estimate 1 B", ""), ("estimate 7 B", ""), ("plan 1 B", ", 40 GiB"))
    )
    words = " ".join((ROOT / "docs" / "gpus.md").read_text().split())
    assert f"takes {one['seconds']:.0f} seconds and {one['resident_bytes'] / 2**20:.0f} MiB of memory" in words
    assert f"7-billion-parameter one {seven['seconds']:.0f} seconds" in words
    assert f"a plan with its whole frontier takes {plan['seconds']:.0f} seconds" in words


@pytest.mark.slow
def test_training_examples_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    program = "\n".join(blocks(text, "python"))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (shell,) = blocks(text, "sh")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(ROOT)
    names = {"mine.py:workload": "tests.workloads:preempted", "--steps 10000": "--steps 4"}
    for name, other in names.items():
        assert name in shell
        shell = shell.replace(name, other)
    command = ["bash", "-euo", "pipefail", "-c", shell]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_gpu_examples_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "gpus.md").read_text()
    python, (shell,) = "\n".join(blocks(text, "python")), blocks(text, "sh")
    done = subprocess.run([sys.executable, "-c", python], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", shell]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 calls take the flash kernel" in done.stdout
    assert memfit.load_plan(tmp_path / "t4.json").device == "t4"


@pytest.mark.slow
def test_device_examples_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "devices.md").read_text()
    (entry,) = blocks(text, "toml")
    (tmp_path / "mine.toml").write_text(entry)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MEMFIT_DEVICES": str(tmp_path / "mine.toml"), "COLUMNS": "200"}
    more = ['MEMFIT_DEVICES="$PWD/machine.toml" memfit devices cpu', "memfit devices 4070"]
    script = "\n".join([*blocks(text, "sh"), *more])
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NVIDIA A100 SXM4, 80 GB" in done.stdout and "58.3 TFLOP/s" in done.stdout
    assert "measured by memfit devices --probe" in done.stdout
    program = [sys.executable, "-c", "\n".join(blocks(text, "python"))]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)  # it plans, trains and climbs a ladder: eight minutes beside other work
def test_readme_examples_run(tmp_path: Path) -> None:
    (python,), (shell,) = blocks(README, "python"), blocks(README, "sh")
    library, _, use = python.partition("mine = workload()")
    (tmp_path / "mine.py").write_text(library)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = f"{library}\nmine = workload(){use}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "160.0 MiB" in done.stdout
    assert "checkpointing" in done.stdout
    command = ["bash", "-euo", "pipefail", "-c", shell]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The plan is what it says." in done.stdout
    assert (tmp_path / "runs/mine/report.html").stat().st_size < 1_000_000


def test_tables_of_predictions_are_those_of_the_result_file() -> None:
    from benchmarks.tables import PAGES, TABLES, with_tables

    marks = set()
    for page in PAGES:
        text = page.read_text()
        assert with_tables(text) == text
        tables = re.findall(r"^<!-- (\w+): [^>]*-->\n(.+?)^<!-- /\1 -->", text, flags=re.DOTALL | re.MULTILINE)
        marks |= {mark for mark, _ in tables}
        for _, table in tables:
            assert with_tables(text.replace(table, "| wrong |\n")) == text
    assert set(TABLES) == marks
