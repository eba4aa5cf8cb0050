from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest
import torch

from memfit.workload import Workload, tensors_of

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"gpt2": ["transformers"], "digits_resnet": ["sklearn"], "brain": ["monai", "nilearn"], "byte_lm": []}

each_example = pytest.mark.parametrize("name", sorted(NEEDS))


@cache
def workload_of(name: str) -> Workload:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    workload: Workload = module.workload()
    return workload


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, "large_gpt", "llama_lora", "mine", "training"}


@pytest.mark.ci
def test_adapters_of_a_llama_are_all_that_is_trained() -> None:
    pytest.importorskip("transformers")
    from examples import llama_lora

    with torch.device("meta"):
        made = llama_lora.llama_8b().model
    dtypes = {(p.dtype, p.requires_grad) for p in made.parameters()}
    assert dtypes == {(torch.bfloat16, False), (torch.float32, True)}
    assert sum(p.numel() for p in made.parameters() if not p.requires_grad) == pytest.approx(8.03e9, rel=0.001)
    assert sum(p.numel() for p in made.parameters() if p.requires_grad) == pytest.approx(41.94e6, rel=0.001)  # peft's
    small = llama_lora.llama("small", layers=1, width=512, tokens=8)
    small.loss_fn(small.model, small.batch).backward()
    assert {p.grad is None for p in small.model.parameters() if p.requires_grad} == {False}


@pytest.mark.ci
def test_large_gpts_have_their_sizes_and_a_step_that_runs() -> None:
    pytest.importorskip("transformers")
    from examples import large_gpt

    with torch.device("meta"):
        made = {name: getattr(large_gpt, name)().model for name in ("gpt_1b", "gpt_7b", "gpt_175b")}
    billions = {name: sum(p.numel() for p in model.parameters()) / 1e9 for name, model in made.items()}
    assert billions == pytest.approx({"gpt_1b": 1.02, "gpt_7b": 6.66, "gpt_175b": 174.6}, rel=0.01)
    small = large_gpt.gpt("small", n_layer=1, width=64, n_head=2, batch_size=1)
    small.loss_fn(small.model, small.batch).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in small.model.parameters())


@each_example
def test_a_step_is_finite_and_reaches_every_parameter_by_gradients_and_the_optimizer(name: str) -> None:
    workload = workload_of(name)
    assert isinstance(workload, Workload) and workload.model.training
    torch.manual_seed(0)
    loss = workload.loss_fn(workload.model, workload.batch)
    mean = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    mean.backward()
    assert mean.isfinite() and mean.dim() == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in workload.model.parameters())
    workload.optimizer.zero_grad()
    optimized = {id(p) for group in workload.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in workload.model.parameters()}
    assert any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in workload.model.modules())


@each_example
def test_batches_are_shaped_like_the_batch_and_evaluation_gives_finite_figures(name: str) -> None:
    workload = workload_of(name)
    assert workload.batches is not None and workload.evaluate is not None
    batch = next(iter(workload.batches))
    assert type(batch) is type(workload.batch)
    ours, given = ([(t.shape, t.dtype) for t in tensors_of(each)] for each in (batch, workload.batch))
    assert ours == given
    workload.model.eval()
    with torch.no_grad():
        figures = workload.evaluate(workload.model)
    workload.model.train()
    assert figures and all(0 <= value < 10 for value in figures.values())
