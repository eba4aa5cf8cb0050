"""Kernels in a trace: operators that a compiler fuses into one, as the text of its operators."""

from __future__ import annotations

import json

from msgspec.structs import replace

from memfit.ir.trace import Op, Trace

_KERNEL = "kernel\n"
_IN_PLACE = " bytes in place"


def kernel_text(members: tuple[str, ...], reused_bytes: int = 0) -> str:
    """Return the signature of a kernel.

    Args:
        members: The signatures of its operators.
        reused_bytes: The bytes that it writes over its dying inputs, less what it holds for others in its function.
    """
    return _KERNEL + "\n".join([*members, f"{reused_bytes}{_IN_PLACE}"])


def is_kernel(signature: str) -> bool:
    """Tell whether a signature is a kernel's."""
    return signature.startswith(_KERNEL)


def members_of(signature: str) -> tuple[str, ...]:
    """Return the signatures of a kernel's operators."""
    return tuple(signature.removeprefix(_KERNEL).split("\n")[:-1])


def reused_bytes_of(signature: str) -> int:
    """Return the bytes that a kernel writes over its dying inputs."""
    return int(signature.rpartition("\n")[2].removesuffix(_IN_PLACE))


def unfused(trace: Trace) -> Trace:
    """Return a trace with the operators of its kernels one by one, for their costs; its storages are of no use then."""
    if not any(map(is_kernel, trace.signatures)):
        return trace
    index = {text: number for number, text in enumerate(trace.signatures)}
    ops: list[Op] = []
    for op in trace.ops:
        text = trace.signatures[op.signature]
        if not is_kernel(text):
            ops.append(op)
            continue
        for member in members_of(text):
            ops.append(replace(op, name=str(json.loads(member)["op"]), signature=index[member]))
    used = [text for text in trace.signatures if not is_kernel(text)]
    number = {index[text]: position for position, text in enumerate(used)}
    return replace(
        trace,
        ops=[replace(op, signature=number[op.signature]) for op in ops],
        signatures=used,
        works=[trace.works[index[text]] for text in used],
    )
