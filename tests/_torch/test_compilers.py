"""What memfit relies on of Dynamo, AOTAutograd and Inductor."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest
import torch
from torch import fx

from memfit import _torch
from tests import warm
from tests.recomputation.splitting import split_by


def test_disable_dynamo_keeps_a_function_out_of_compiled_code() -> None:
    @_torch.disable_dynamo
    def apart(x: torch.Tensor) -> torch.Tensor:
        assert not torch.compiler.is_compiling()
        return x + 1

    assert torch.compile(lambda x: apart(x) * 2, backend="eager")(torch.ones(1)).tolist() == [4.0]


def test_is_compiled_function_tells_what_torch_compile_returned() -> None:
    assert not _torch.is_compiled_function(untraced)
    assert _torch.is_compiled_function(torch.compile(untraced, backend="eager"))


def test_compiles_tells_whether_anything_was_given_to_torch_compile() -> None:
    code = """
import torch
from memfit._torch import compiles
before = [compiles()]
import torch._dynamo
torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1).zero_grad()
before.append(compiles())
compiled = torch.compile(torch.sin, backend="eager")
print(*before, compiles())
"""
    done = warm.run(["-c", code])
    assert done.stdout.split() == ["False", "False", "True"], done.stderr


def test_skip_keeps_dynamo_out_of_a_function_and_what_it_calls() -> None:
    _torch.skip(untraced)
    assert torch.compile(untraced, backend=refusing)(torch.ones(1)).tolist() == [2.0]


def untraced(x: torch.Tensor) -> torch.Tensor:
    """Return one more."""
    return x + 1


def refusing(module: fx.GraphModule, inputs: Any) -> Any:
    """A backend that must not be asked."""
    raise AssertionError("this was compiled")


def test_current_compile_id_is_there_while_a_backend_compiles_and_the_joint_graph_is_split() -> None:
    """The `default_partition` of the joint graph gives the same loss and gradients; `default_op_list` its nodes."""
    ids: list[Any] = []
    fusible: list[bool] = []

    def partition(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        ids.append(_torch.current_compile_id())
        fusible.extend(
            bool(_torch.default_op_list().is_fusible(node))
            for node in joint.graph.nodes
            if node.target is torch.ops.aten.sin.default
        )
        return _torch.default_partition(joint, num_fwd_outputs)

    assert _torch.current_compile_id() is None
    x = torch.full((3,), 0.5, requires_grad=True)
    out = torch.compile(lambda x: x.sin().sum(), backend=split_by(partition))(x)
    out.backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().cos()) and torch.equal(out, x.detach().sin().sum())
    assert fusible == [True]
    assert len(ids) == 1 and ids[0] is not None and isinstance(ids[0].frame_id, int)


def test_boxed_code_takes_a_list() -> None:
    made = _torch.boxed(lambda x, y: x + y)
    assert made([1, 2]) == 3
    assert vars(_torch.mark_boxed(lambda given: given)).items() <= vars(made).items()


def test_compiler_errors_are_those_of_back_ends_too_and_name_what_went_wrong_inside() -> None:
    with pytest.raises(_torch.compiler_errors()) as raised:
        torch.compile(lambda x: x + 2, backend=refusing)(torch.ones(1))
    assert isinstance(raised.value.inner_exception, AssertionError)  # type: ignore[attr-defined]


def test_code_is_not_compiled_more_often_than_recompilations_limited_allows() -> None:
    doubled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    with _torch.recompilations_limited():
        assert [doubled(torch.ones(size)).numel() for size in (*range(2, 66), 2)] == [*range(2, 66), 2]
        with pytest.raises(_torch.compiler_errors()):
            doubled(torch.ones(66))


def test_seen_code_is_new_to_dynamo_once_it_is_forgotten_and_what_was_seen_before_is_not() -> None:
    compiled: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    def before(x: torch.Tensor) -> torch.Tensor:
        return x + 3

    def within(x: torch.Tensor) -> torch.Tensor:
        return x + 4

    functions = [torch.compile(function, backend=backend) for function in (before, within)]
    seen, x = _torch.SeenCode(), torch.ones(2)
    functions[0](x)
    with seen.collecting():
        functions[0](x)
        functions[1](x)
    assert len(compiled) == 2
    for count in (3, 4):  # it can be seen, and forgotten, again
        seen.forget()
        functions[0](x)
        assert len(compiled) == count - 1
        with seen.collecting():
            functions[1](x)
        assert len(compiled) == count
    torch._dynamo.reset()  # which goes over all that was seen, and so do the ends of code objects
    del functions, within
    gc.collect()
    seen.forget()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of what Inductor imports
def test_inductor_has_the_settings_and_the_hooks_that_plans_need() -> None:
    """Of `functorch_config`, `inductor_config`, `InductorChoices`, `CustomPartitionerFn`, `compile_fx` and `V`."""
    with (
        _torch.functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        _torch.inductor_config.patch(
            custom_partitioner_fn=None,
            allow_buffer_reuse=False,
            realize_reads_threshold=1,
            layout_optimization=False,
            reorder_for_peak_memory=False,
        ),
    ):
        assert _torch.inductor_config.realize_reads_threshold == 1
    assert callable(_torch.InductorChoices.can_fuse) and callable(_torch.compile_fx)
    assert "inner_compile" in inspect.signature(_torch.compile_fx).parameters
    with _torch.V.set_choices_handler(_torch.InductorChoices()):
        pass
    assert _torch.CustomPartitionerFn.__abstractmethods__ == {"__call__", "uuid"}
    assert _torch.get_hash_for_files((__file__,), "a") != _torch.get_hash_for_files((__file__,), "b")
