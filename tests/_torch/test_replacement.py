"""An attribute that is replaced comes back, also where the context is left by an error."""

from __future__ import annotations

import types

import pytest

from memfit._torch.replacement import replaced


def test_an_attribute_comes_back() -> None:
    owner = types.SimpleNamespace(value=1)
    with pytest.raises(RuntimeError), replaced(owner, "value", 2):
        assert owner.value == 2
        raise RuntimeError
    assert owner.value == 1
