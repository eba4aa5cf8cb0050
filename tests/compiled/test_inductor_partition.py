"""The settings that memfit's code is made with, whatever the user's are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from memfit._torch import boxed, default_partition

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def passes_with_cuda_graphs(lower: Callable[[fx.GraphModule, Sequence[Any], Any], Any]) -> list[bool]:
    """Return of each pass of a graph whether CUDA graphs are asked for, where the user turned them on."""
    from memfit._torch import inductor_config

    found: list[bool] = []

    def compile_pass(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        found.append(options["cudagraphs"].value)
        return boxed(module.forward)

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    with inductor_config.patch({"triton.cudagraphs": True}):
        compiled = torch.compile(model, backend=lambda module, inputs: lower(module, inputs, compile_pass))
        compiled(torch.ones(2, 4)).sum().backward()
    return found


def test_code_runs_without_cuda_graphs_whose_pools_no_plan_counts() -> None:
    from memfit._torch import compile_fx
    from memfit.compiled.inductor_partition import lower

    assert passes_with_cuda_graphs(lambda module, inputs, own: lower(module, inputs, default_partition, own)) == [
        False,
        False,
    ]
    assert all(passes_with_cuda_graphs(lambda module, inputs, own: compile_fx(module, inputs, inner_compile=own)))
