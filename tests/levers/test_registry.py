"""The registry: its table of conflicts refuses what it names and nothing else, and each lever is told in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import PlanError
from memfit.ir import ChunkedLoss, Levers, Region
from memfit.levers import CONFLICTS, LeversOn, check_lever_names, lever_names, met
from memfit.levers.chunked_loss import HEAD_INSIDE
from memfit.levers.registry import conflict_table

NAMES = sorted({name for row in CONFLICTS for name in (row.one, row.other)})


@given(used=st.sets(st.sampled_from(NAMES)), allowed=st.sampled_from(["exact", "changed"]))
def test_what_is_refused_is_what_the_table_names(used: set[str], allowed: str) -> None:
    named = [row for row in CONFLICTS if {row.one, row.other} <= used and not (row.unless and allowed == row.unless)]
    assert met(CONFLICTS, used, allowed) == named  # type: ignore[arg-type]
    if not named:
        check_lever_names(used, allowed)  # type: ignore[arg-type]
    else:
        with pytest.raises(PlanError) as error:
            check_lever_names(used, allowed, where="here: ")  # type: ignore[arg-type]
        first = named[0]
        assert all(part in str(error.value) for part in ("here: ", first.one, first.other, first.why, first.row()))
        assert first.row() in conflict_table()


def test_pairs_are_named_once() -> None:
    pairs = [frozenset((row.one, row.other)) for row in CONFLICTS]
    assert len(set(pairs)) == len(pairs)
    assert all(conflict.why and conflict.instead for conflict in CONFLICTS)


def test_levers_have_the_names_of_the_table() -> None:
    assert lever_names(LeversOn(Levers(microbatch_size=4), 4)) == set()
    regions = (Region(("body",), offload=True), Region(("body.last",)))
    used = Levers(
        precision="tf32",
        microbatch_size=2,
        regions=regions,
        chunked_loss=ChunkedLoss(head="head", rows=1),
        optimizer="in-backward",
    )
    assert lever_names(LeversOn(used, 4)) == {
        "tf32",
        *("precision", "microbatches", "activation checkpointing", "activation offload", "chunked loss"),
        "optimizer in the backward pass",
    }


@pytest.mark.parametrize(("head", "inside"), [("body.head", True), ("body", True), ("body2.head", False), ("x", False)])
def test_regions_around_the_head_are_found(head: str, inside: bool) -> None:
    for modules, expected in ((("body",), inside), (("",), True)):
        levers = Levers(microbatch_size=1, regions=(Region(modules),), chunked_loss=ChunkedLoss(head=head, rows=1))
        assert (HEAD_INSIDE in lever_names(LeversOn(levers, 1))) == expected
