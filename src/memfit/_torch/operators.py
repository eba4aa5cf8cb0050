"""Schemas, kernels and libraries of operators."""

import operator
from collections.abc import Callable
from typing import Any

import torch

schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""The schema of an operator: its arguments and returns, and the arguments that it writes."""

packet_of: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")
"""The packet of an operator: all overloads of its name."""


def call_at(func: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator's kernel for a dispatch key."""
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
