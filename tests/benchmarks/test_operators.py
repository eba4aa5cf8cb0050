"""The comparison of fake operators with real ones notices each kind of difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.operators.comparing import Fakes, Operators, differences
from benchmarks.operators.listed import listed, listed_peak
from benchmarks.operators.samples import LAYOUTS, laid_out

X = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        (X.mT.contiguous().mT, "stride"),
        (X.double(), "dtype"),
        (torch.zeros(30)[:24].view(2, 3, 4), "nbytes"),
        (X[:1], "shape"),
        ((X, X), "outputs"),
    ],
)
def test_a_difference_is_noticed(fake: Any, said: str) -> None:
    assert not differences((X.clone(), {}), (X.clone(), {}))
    (found,) = differences((X, {}), (fake, {}))
    assert said in found


def test_each_layout_keeps_the_values_that_it_does_not_expand() -> None:
    for layout in LAYOUTS:
        arguments = laid_out((X.view(2, 3, 2, 2), (), {}), layout)
        assert layout == "expanded" or torch.equal(arguments[0], X.view(2, 3, 2, 2))
    assert laid_out((X, (), {}), "channels last") is None


def test_operators_of_both_passes_agree_and_a_wrong_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(fakes: Fakes) -> list[str]:
        x = X.clone().mT.requires_grad_()
        with Operators(fakes) as mode:
            torch.nn.functional.batch_norm(x, None, None, training=True).logaddexp(X.mT.clone()).sum().backward()
        assert len(mode.seen) > 4
        return [name for name, _, _ in mode.found]

    assert step(Fakes()) == []
    fakes = Fakes()
    run = fakes.recorder.run

    def other(func: Any, args: Any, kwargs: Any) -> Any:
        out = run(func, args, kwargs)
        return out.double() if "logaddexp" in str(func) else out

    monkeypatch.setattr(fakes.recorder, "run", other)
    assert step(fakes) == ["aten.logaddexp.default"]


def test_known_differences_have_reasons_and_others_none() -> None:
    assert "sort" in listed("aten._fft_c2c.default", "output 0: stride (1, 5), fake (5, 1)")
    assert listed_peak("ormqr") and listed_peak("mm") == ""
    assert listed("aten._fft_c2c.default", "output 0: dtype") == "" == listed("aten.mm.default", "output 0: stride")
