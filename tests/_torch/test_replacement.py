"""An attribute that is replaced comes back, also where the context is left by an error."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from memfit._torch import replaced, replaced_here
from memfit.foundations import turn


def test_an_attribute_comes_back() -> None:
    owner = types.SimpleNamespace(value=1)
    with pytest.raises(RuntimeError), replaced(owner, "value", 2):
        assert owner.value == 2
        raise RuntimeError
    assert owner.value == 1


@pytest.mark.parametrize("name", ["numpy", "tolist", "__array__", "resize_"], ids=str)
def test_replaced_here_is_for_the_thread_that_has_the_turn(name: str) -> None:
    """Inherited functions too, which the class then has no longer."""
    before, found = vars(torch.Tensor).get(name), []

    def call() -> None:
        found.append(getattr(torch.Tensor, name)(torch.ones(0)) == "ours")

    with pytest.raises(RuntimeError), turn(), replaced_here(torch.Tensor, name, lambda tensor: "ours"):
        call()
        theirs = threading.Thread(target=call)
        theirs.start()  # by the thread that has the turn
        theirs.join()
        raise RuntimeError
    assert found == [True, True] and vars(torch.Tensor).get(name) is before
