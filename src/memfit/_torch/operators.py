"""Schemas, kernels and libraries of operators, and those on lists of tensors."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils

from memfit._torch.compilers import disable_dynamo

schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""The schema of an operator: its arguments and returns, and the arguments that it writes."""

packet_of: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")
"""The packet of an operator: all overloads of its name."""


@disable_dynamo
def call_at(func: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator's kernel for a dispatch key, out of compiled code: Dynamo warned of it before PyTorch 2.13."""
    return func._op_dk(key, *args, **kwargs)


def destroy_library(library: torch.library.Library) -> None:
    """Unregister the operators and kernels of a library.

    The Python dispatcher, under which compilers trace, keeps which kernel it took for a key: it looks again.
    """
    for kernel in library._op_impls:
        namespace, name, _ = kernel.split("/")
        packet, _, overload = name.partition(".")
        getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")._dispatch_cache.clear()
    library._destroy()


@functools.cache
def drawing_operators() -> tuple[tuple[Any, int], ...]:
    """Return the operators with kernels for the CPU that take a generator, and the generator's place.

    All random numbers on the CPU are drawn by them: other operators call them.
    """
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, qualified = full.partition("::")
        if namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"):
            name, _, overload = qualified.partition(".")
            func = getattr(getattr(torch.ops.aten, name), overload or "default", None)
            names = [] if func is None else [argument.name for argument in schema_of(func).arguments]
            if "generator" in names:
                found.append((func, names.index("generator")))
    return tuple(found)


def before_backends(library: torch.library.Library, func: Any, kernel: Callable[..., Any]) -> None:
    """Register a kernel that runs before that of any device, for as long as a library lives.

    Args:
        kernel: Called with a function that runs the device's kernel, and the operator's arguments.
    """
    later = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(functools.partial(func.redispatch, keys & later), *args, **kwargs)

    library.impl(func, run, "BackendSelect", with_keyset=True)


foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
optimizer_types = optimizer._foreach_supported_types
supported_types = (optimizer_types, _foreach_utils._foreach_supported_types)
"""The tensor types for which optimizers, and the clipping of gradients, use operators on lists."""
