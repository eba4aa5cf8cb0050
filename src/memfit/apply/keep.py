"""What a pass through a region keeps all the same: outputs of operators, which its recomputation takes up again.

The modes of `torch.utils.checkpoint.create_selective_checkpoint_contexts` do the same for a policy that is asked about
each call. Ours look up one table, hand what is kept to a region around this one, which drops it and makes it again, and
run an operator again whose output was taken already or changed since, rather than refuse.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.apply.offload import Away, ChangedError, is_worth_moving
from memfit.ir.remat import Keep

_NEVER = {"aten.detach.default", "prim.device.default"}  # of which a recomputation runs other numbers


def hooks_around() -> Any:
    """Return the innermost hooks of saved tensors that are on, as (pack, unpack); None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class Dropping:
    """Whose methods are hooks of saved tensors that drop what they get, and make it again."""


class Wanted:
    """The occurrences of each operator that a region keeps.

    Args:
        keep: Their names, as "overload#occurrence".
    """

    def __init__(self, keep: Keep) -> None:
        self._of_name: dict[str, set[int]] = {}
        for name, _, occurrence in (key.rpartition("#") for key in keep):
            if name not in _NEVER:
                self._of_name.setdefault(name, set()).add(int(occurrence))
        self._of: dict[Any, set[int]] = {}

    def of(self, operator: Any) -> set[int]:
        """Return the occurrences of an operator that are kept; none where it changes what it is given."""
        found = self._of.get(operator)
        if found is None:
            is_mutable = isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable
            found = self._of[operator] = set() if is_mutable else self._of_name.get(str(operator), set())
        return found


class Kept:
    """The outputs that one pass keeps.

    Args:
        wanted: Of which operators.
        offload: Whether they wait in host memory.

    Attributes:
        outputs: By operator and occurrence, with the shapes of its arguments.
        counts: How often each operator that matters ran.
        sent: Those outputs that wait in host memory; None where they stay on the device.
    """

    def __init__(self, wanted: Wanted, offload: bool = False) -> None:
        self.wanted = wanted
        self.sent: list[Away] | None = [] if offload else None
        self.outputs: dict[tuple[Any, int], tuple[list[torch.Size], Any]] = {}
        self.counts = Counter[Any]()


class _Item:
    """A tensor that is kept, and how it was then."""

    def __init__(
        self,
        tensor: torch.Tensor,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], Any],
        sent: list[Away] | None,
    ) -> None:
        # An alias, since the tensor itself gets the graph's history; under the guard it shares its version.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            alias = tensor.detach()
        self.version = alias._version
        self.held: Any
        if sent is not None and is_worth_moving(tensor):
            self.held = Away(alias)
            sent.append(self.held)
        else:
            self.held, self.unpack = pack(alias), unpack

    def tensor(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            ChangedError: It was changed in place.
        """
        if isinstance(self.held, Away):
            return self.held.take()
        found: torch.Tensor = self.unpack(self.held)
        if found._version != self.version:
            raise ChangedError
        return found


def _shapes(args: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]


def _as_it_is(value: Any) -> Any:
    return value


class Keeping(TorchDispatchMode):
    """The mode in which a call of a pass runs; the hooks of the region around it get what is kept."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        hooks = hooks_around()
        is_inside = hooks is not None and isinstance(getattr(hooks[0], "__self__", None), Dropping)
        self.hooks = hooks if is_inside else (_as_it_is, _as_it_is)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        wanted = self.kept.wanted.of(func)
        if wanted:
            occurrence = self.kept.counts[func]
            self.kept.counts[func] += 1
            if occurrence in wanted:
                pack, unpack = self.hooks
                items = tree_map_only(torch.Tensor, lambda t: _Item(t, pack, unpack, self.kept.sent), out)
                self.kept.outputs[func, occurrence] = (_shapes(args), items)
        return out


class Reusing(TorchDispatchMode):
    """The mode in which all the calls of a pass run again."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.counts = kept, Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = self.kept.wanted.of(func)
        if wanted:
            occurrence = self.counts[func]
            self.counts[func] += 1
            if (func, occurrence) in self.kept.outputs:
                shapes, items = self.kept.outputs.pop((func, occurrence))
                if shapes != _shapes(args):
                    raise RuntimeError(f"{func}, whose output is kept, is given tensors of other shapes")
                with contextlib.suppress(ChangedError):
                    return tree_map_only(_Item, _Item.tensor, items)
        return func(*args, **(kwargs or {}))
