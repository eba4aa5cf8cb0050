"""Which signatures are of collectives that were put in on paper, and which of other operators of memfit."""

from __future__ import annotations

import pytest

from memfit.ir.collectives import BUBBLE, RING, SUM, Collective, is_unmeasurable, text, waited


@pytest.mark.parametrize("name", [SUM, RING])
def test_what_is_waited_for_on_paper_is_read_back(name: str) -> None:
    assert waited(text(name, 4096, 4)) == Collective(name, 4096, 4)
    assert is_unmeasurable(text(name, 4096, 4))


@pytest.mark.parametrize("name", ["memfit.wait.default", "memfit.send.default", "memfit.summed.default"])
def test_other_operators_of_memfit_are_measured(name: str) -> None:
    signature = f'{{"op":"{name}","args":[{{"t":["float32",[2,3],[3,1]]}}]}}'
    assert waited(signature) is None and not is_unmeasurable(signature)


def test_a_pipeline_that_fills_is_not_waited_for_as_a_collective() -> None:
    assert waited(text(BUBBLE, 8, 2)) is None and is_unmeasurable(text(BUBBLE, 8, 2))
