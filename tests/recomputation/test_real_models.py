"""Checkpointed regions in models as people write and wrap them: bitwise the plain training, or an error."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from memfit.errors import RecomputationError
from memfit.hardware import allocated
from memfit.ir import Region
from memfit.recomputation import checkpointed
from tests.covering import each
from tests.recomputation.steps import Chain, Residual, blocks, differing, executed, loss, results

transformers = pytest.importorskip("transformers")


def regions(*runs: str | tuple[str, ...], keep: tuple[str, ...] = ()) -> list[Region]:
    return [Region((run,) if isinstance(run, str) else run, keep) for run in runs]


def model_of(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
    own: dict[str, Any] = {
        "GPT2": {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 16},
        "Llama": {**sizes, "num_key_value_heads": 2, "attention_dropout": 0.1},
        "Bert": {**sizes, "max_position_embeddings": 16},
    }
    build = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, **own[kind], **options)
    model = getattr(transformers, build)(config).train()
    assert isinstance(model, nn.Module)
    return model


def lm_loss(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(32).view(2, 16) % 60
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


def layers(prefix: str, *indices: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{i}" for i in indices)


GPT2, LLAMA = "transformer.h", "model.layers"
MODELS = {"GPT2": (GPT2, "mlp"), "Llama": (LLAMA, "mlp"), "Bert": ("bert.encoder.layer", "attention")}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_models_train_bitwise_the_same(name: str) -> None:
    prefix, part = MODELS[name]
    plain = results(model_of(name, use_cache=False), lm_loss)
    for chosen in (
        regions(*layers(prefix, 0, 1, 2, 3)),
        regions(layers(prefix, 0, 1, 2)),
        regions(layers(prefix, 0, 1), layers(prefix, 2, 3), keep=("aten.addmm.default#1", "aten.mm.default#3")),
        regions(layers(prefix, 0, 1, 2, 3), f"{prefix}.1.{part}", f"{prefix}.3.{part}"),
    ):
        assert not differing(results(model_of(name, use_cache=False), lm_loss, chosen), plain)


def test_no_boundary_between_transformers_layers_is_kept() -> None:
    """The layers' outputs are what the next ones get, as the same tensor objects."""

    def kept_bytes(chosen: list[Region]) -> int:
        model = model_of("GPT2", use_cache=False)
        with checkpointed(model, chosen):
            lm_loss(model)
            with allocated() as meter:
                value = lm_loss(model)
            del value
        return meter.net_bytes

    apart, together = kept_bytes(regions(*layers(GPT2, 0, 1, 2, 3))), kept_bytes(regions(layers(GPT2, 0, 1, 2, 3)))
    assert apart - together >= 3 * 2 * 16 * 32 * 4


@pytest.mark.parametrize("name", MODELS)
def test_transformers_models_that_checkpoint_themselves(name: str) -> None:
    """Inside of regions, and around them: theirs is within the layer's `__call__`."""
    prefix, part = MODELS[name]

    def built() -> nn.Module:
        model = model_of(name, use_cache=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers 5 renames the switch
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    plain = results(built(), lm_loss)
    assert not differing(results(model_of(name, use_cache=False), lm_loss), plain)
    for chosen in (
        regions(layers(prefix, 0, 1), f"{prefix}.3.{part}"),
        regions(layers(prefix, 1, 2, 3), f"{prefix}.1.{part}"),
        regions(prefix.rpartition(".")[0], layers(prefix, 0, 1)),
    ):
        assert not differing(results(built(), lm_loss, chosen), plain)


def test_a_cache_is_found_and_named() -> None:
    model = model_of("Llama", use_cache=True)
    with checkpointed(model, regions(layers(LLAMA, 0, 1))):
        with pytest.raises(RecomputationError, match=r"'model\.layers\.0'.*use_cache=False"):
            lm_loss(model).backward()


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, Any]


class Tied(nn.Module):
    """Shared modules, tied weights, in-place operators, BatchNorm, frozen parts, dataclasses, control flow."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=inplace)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.data = Dataclassed()
        self.more = Dataclassed()
        self.head = nn.Linear(16, 16)
        self.head.weight = self.embed.weight
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.embed(x)))
        x = self.norm(self.frozen(x))
        for _ in range(2 if x.mean() > -100 else 3):
            out = self.data(Output(x, {"scale": 2.0}))
            out = self.more(out, again=True)
            x = out.hidden + out.extra["y"]
        x = nn.functional.dropout(x, 0.2)
        return self.head(self.embed(x))


class Dataclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.bn = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, given: Output, *, again: bool = False) -> Output:
        y = self.bn(self.f(given.hidden)) * given.extra["scale"]
        y = y.add_(1.0)
        y = y.relu_() if again else y.tanh()
        return Output(y, {"scale": 0.5, "y": y.sin()})


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


@pytest.mark.parametrize(
    "chosen",
    [
        regions("embed", "norm", "frozen", "data", "head"),
        regions(("embed", "norm", "act")),
        regions(("data", "more"), "frozen"),
        regions(("data", "more"), "data.bn", "more.f"),
        regions("", ("embed", "norm"), ("data", "more"), "more.bn", "head"),
        regions(
            ("data", "more"), keep=("aten.addmm.default#0", "aten.native_batch_norm.default#1", "aten.tanh.default#0")
        ),
    ],
    ids=str,
)
def test_models_with_everything_train_bitwise_the_same(chosen: list[Region]) -> None:
    assert not differing(results(tied(), loss, chosen), results(tied(), loss))


def test_outputs_that_are_dataclasses_are_wired() -> None:
    """So that no tensor between two modules is kept."""
    found = executed(tied(), loss, regions(("data", "more")))
    plain = executed(tied(), loss)
    assert found["aten.tanh.default"] - plain["aten.tanh.default"] == 2


@pytest.fixture
def _process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29571", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.usefixtures("_process_group")
def test_distributed_data_parallel(options: dict[str, Any]) -> None:
    def wrapped() -> nn.Module:
        return nn.parallel.DistributedDataParallel(tied(), **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = results(wrapped(), loss)
        for chosen in (
            regions("module.embed", ("module.data", "module.more")),
            regions("module", ("module.data", "module.more")),
        ):
            assert not differing(results(wrapped(), loss, chosen), plain)


class Backend:
    """Counts the graphs that it is given to compile, and how often compiled code runs."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def compiled(inner: Any, inner_inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                self.runs += 1
                return inner(*args)

            return make_boxed_func(run)

        return aot_autograd(fw_compiler=compiled, bw_compiler=lambda g, i: make_boxed_func(g.forward))(graph, inputs)


def compiled_chain(what: str, backend: Backend) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = Chain(blocks=3)
    if what == "model":
        return torch.compile(model, backend=backend)
    if what == "model in place":
        model.compile(backend=backend)
    elif what == "block":
        model.blocks[1] = torch.compile(model.blocks[1], backend=backend)
    elif what == "block in place":
        model.blocks[1].compile(backend=backend)
    else:
        model.blocks[1].f[1] = Residual(32)
        model.blocks[1].f[1].compile(backend=backend)
    return model


@pytest.mark.parametrize(
    ("chosen", "what"),
    each(
        [[blocks(0, 1)], [blocks(1)], [blocks(0, 1, 2), Region(("blocks.1.f",))], [Region(("",)), blocks(1, 2)]],
        ["model", "model in place", "block", "block in place", "part in place"],
    ),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own, of arguments
def test_models_under_compile(what: str, chosen: list[Region]) -> None:
    plain = results(compiled_chain(what, Backend()), loss)
    backend = Backend()
    model = compiled_chain(what, backend)
    names = {name.replace("_orig_mod.", ""): name for name, _ in reversed(list(model.named_modules()))}
    named = [Region(tuple(names[fqn] for fqn in region.modules)) for region in chosen]
    assert not differing(results(model, loss, named), plain)
    assert not any("_Recomputed" in repr(vars(m)) for m in model.modules())
    if what in ("block", "block in place", "part in place"):
        assert backend.graphs >= 1 and backend.runs > 3  # compiled code runs in each step, and again


def test_parts_without_gradients() -> None:
    torch.manual_seed(0)
    model = Chain()
    for parameter in model.blocks[:2].parameters():
        parameter.requires_grad_(False)
    assert not differing(results(model, loss, [blocks(0, 1, 2, 3)]), results(model, loss))
    found, plain = executed(model, loss, [blocks(0, 1, 2, 3)]), executed(model, loss)
    assert found["aten.gelu.default"] - plain["aten.gelu.default"] == 4  # of which nothing is kept between them
