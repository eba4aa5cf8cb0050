"""Dynamo and the graphs that it makes. Slow modules are imported by the functions that need them."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any

from torch import _compile, fx
from torch._guards import CompileContext

_MOST = 64  # compilations of one code object: layers of one class are that, where a model breaks into several graphs

disable_dynamo = _compile._disable_dynamo
current_compile_id = CompileContext.current_compile_id


def is_compiled_function(function: Callable[..., Any]) -> bool:
    """Tell whether a function is one that `torch.compile` returned."""
    return hasattr(function, "_torchdynamo_orig_callable")


def compiles() -> bool:
    """Tell whether anything of this process was given to `torch.compile`."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and any(backend is not None for backend in eval_frame.cached_backends.values())


def skip(function: Callable[..., Any]) -> None:
    """Exclude a function from the code that Dynamo compiles."""
    from torch._dynamo.decorators import skip

    skip(function)


def default_partition(module: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph module of a joint one, by its nodes' tags."""
    from torch._functorch.partitioners import default_partition

    parts: tuple[fx.GraphModule, fx.GraphModule] = default_partition(module, None, num_fwd_outputs=forward_outputs)
    return parts


@functools.cache
def default_op_list() -> Any:
    """Return the operators that PyTorch's own partitioner considers fusible, by kind."""
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes its arguments as a list, which it empties."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    code: Callable[..., Any] = make_boxed_func(function)
    return code


def mark_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as code that takes its arguments as a list, which it empties."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the errors of Dynamo and of the compilers that it calls."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def recompilations_limited() -> AbstractContextManager[None]:
    """Have Dynamo raise an error where it compiled the same code as often as it may, until the context is left.

    It would run on without compiled code otherwise, and say so in a log.
    """
    from torch._dynamo import config

    limited: AbstractContextManager[None] = config.patch(fail_on_recompile_limit_hit=True, recompile_limit=_MOST)
    return limited


class SeenCode:
    """The code objects that Dynamo sees for the first time in some contexts, as those of a model's methods.

    Dynamo keeps what it compiled of each code object for the life of the process: compilations of copies that are gone
    count for its limit, and a function that it once gave up on it leaves alone. Once forgotten, a code object is new to
    it. What it had seen before, as code that the user compiles, is left as it is.
    """

    def __init__(self) -> None:
        self._seen: list[weakref.ref[CodeType]] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Note the code objects that Dynamo sees for the first time, until the context is left."""
        from torch._dynamo.convert_frame import input_codes

        count = len(input_codes.seen)
        try:
            yield
        finally:
            codes = (reference() for reference in input_codes.seen[count:])
            self._seen += [weakref.ref(code) for code in codes if code is not None]

    def forget(self) -> None:
        """Have Dynamo forget the code objects that were noted; none of them may be running."""
        if not self._seen:
            return
        from torch._C._dynamo.eval_frame import reset_code
        from torch._dynamo.convert_frame import compile_lock, input_codes

        codes = {id(code): code for reference in self._seen if (code := reference()) is not None}
        with compile_lock:
            input_codes.seen[:] = [reference for reference in input_codes.seen if id(reference()) not in codes]
            for key, code in codes.items():
                input_codes.seen_ids.discard(key)
                reset_code(code)
        self._seen.clear()
