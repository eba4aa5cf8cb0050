"""Which signatures are of collectives that were put in on paper, and which of other operators of memfit."""

from __future__ import annotations

import pytest

from memfit.ir import BUBBLE, RING, SUM, Collective, collective_text, is_unmeasurable, waited


@pytest.mark.parametrize("name", [SUM, RING])
def test_what_is_waited_for_on_paper_is_read_back(name: str) -> None:
    assert waited(collective_text(name, 4096, 4)) == Collective(name, 4096, 4)
    assert is_unmeasurable(collective_text(name, 4096, 4))


@pytest.mark.parametrize("name", ["memfit.wait.default", "memfit.send.default", "memfit.summed.default"])
def test_other_operators_of_memfit_are_measured(name: str) -> None:
    signature = f'{{"op":"{name}","args":[{{"t":["float32",[2,3],[3,1]]}}]}}'
    assert waited(signature) is None and not is_unmeasurable(signature)


def test_a_pipeline_that_fills_is_not_waited_for_as_a_collective() -> None:
    assert waited(collective_text(BUBBLE, 8, 2)) is None and is_unmeasurable(collective_text(BUBBLE, 8, 2))
