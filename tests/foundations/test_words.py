"""Messages in the words of an interface: no argument that its user can't give is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import memfit
from memfit.errors import UsageError
from memfit.foundations import LOOP, Words, options

NAMES = ("budget", "host_budget", "measure", "precision", "overwrite", "limit", "numerics")
COMMAND = options({name: f"--{name.replace('_', '-')}" for name in NAMES})
TRAINER = Words({"microbatch_size": "per_device_train_batch_size="}, {"batch": "the batch"})


@pytest.mark.parametrize(
    ("said", "on_the_command_line"),
    [
        ("budget='plenty' can't be read: give budget=", "--budget plenty can't be read: give --budget"),
        ("no plan fits budget=1.0 KiB (1024 bytes)", "no plan fits --budget 1.0 KiB (1024 bytes)"),
        ("give a larger budget=, or numerics='reduced'.", "give a larger --budget, or --numerics reduced."),
        ("leave host_budget out (host_budget=None)", "leave --host-budget out (no --host-budget)"),
        ("overwrite=True, or measure=False", "--overwrite, or --no-measure"),
        ("precisions=['tf32', '32-true'], limit_bytes=8", "--precision tf32 --precision 32-true, --limit 8"),
        ("memfit.plan(workload, budget=8) in notes/host_budget.md", ""),
        ("--limit='90%' and levers.precision and plan.budget=8", ""),
        ("Workload.batch_size=1 and channels=3", ""),
    ],
)
def test_arguments_are_options(said: str, on_the_command_line: str) -> None:
    assert COMMAND.of(said) == (on_the_command_line or said)


def test_under_a_trainer_and_in_a_loop_there_is_no_workload() -> None:
    said = "lower microbatch_size=4 or make Workload.batch smaller; Workload.batch_size=1 and Workload.values stay"
    expected = "lower per_device_train_batch_size=4 or make the batch smaller"
    assert TRAINER.of(said).startswith(expected) and TRAINER.of(said).endswith(said.partition(";")[2])
    assert LOOP.of("make Workload.batch smaller") == "make the loop's batch smaller"


def test_errors_that_leave_are_in_these_words_and_keep_what_else_they_have() -> None:
    error = UsageError("budget='x'", 3)
    with pytest.raises(UsageError) as caught, COMMAND.spoken():
        raise error
    assert caught.value is error and caught.value.args == ("--budget x", 3)


def test_each_argument_that_a_command_and_the_library_share_is_named_as_the_option() -> None:
    """Of all texts in memfit: what names an argument that a command has too is translated, and leaves no sign of it."""
    asked = re.compile(r"(?<![\w./(-])(budget|host_budget|numerics|measure)=")
    found = [
        node.value
        for path in Path(memfit.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and asked.search(node.value)
        if "(" not in node.value and "\n" not in node.value
    ]
    assert len(found) > 30
    assert not [text for text in found if asked.search(COMMAND.of(text))]
