"""The example notebook, run as a reader runs it: every cell, in a kernel of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_kept_without_outputs() -> None:
    nbformat.validate(read())
    code = [cell for cell in read().cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_each_cell_imports_what_it_uses() -> None:
    code = [cell.source for cell in read().cells if cell.cell_type == "code"]
    options = "--isolated --select F821 --output-format concise -".split()
    command = [sys.executable, "-m", "ruff", "check", *options]
    for source in code:
        found = subprocess.run(
            command, input=source.removeprefix("%%writefile first_steps.py"), capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout


@pytest.mark.ci  # `make test` runs the same verbs by the quickstart
@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    notebook = read()
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data", "stream"}
    streams = [output.text for output in outputs if output.output_type == "stream"]
    assert streams[0] == "Writing first_steps.py\n"
    assert not [text for text in streams if "Warning" in text or "Error" in text]
    data = [output.data for output in outputs if output.output_type == "execute_result"]
    lines = [str(one["text/plain"]) for one in data]
    workload, estimate, plan, result, found, run, report = lines
    assert workload.startswith("<Workload 'first steps': Sequential with 791,818 parameters")
    assert re.fullmatch(r"<Prediction [\d.]+ MiB, at most [\d.]+ MiB, [\d.]+ m?s a step>", estimate)
    assert plan.startswith("<Plan for 'first steps' on cpu: ") and plan.endswith(", exact>")
    assert result.startswith("StepResult(loss=") and "skipped=False" in result
    assert found.startswith("<Verification verified: exact, ")
    assert run.startswith("<RunRecord of 'first steps (its one batch, repeated)': finished after 10 steps, loss ")
    assert "report.html" in report and (tmp_path / "runs" / "first_steps" / "report.html").is_file()
    assert 'class="plot"' in data[2]["text/html"] and "<iframe" in data[-1]["text/html"]
    bars = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    assert [text.partition(":")[0] for text in bars] == [f"memfit.{n}" for n in ("estimate", "plan", "verify", "train")]
