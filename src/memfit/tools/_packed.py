"""Samples of a padded batch in packed rows without padding, for models that are proven to keep them apart."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memfit.capture import nothing_changes
from memfit.errors import UsageError, WorkloadError
from memfit.foundations import public
from memfit.tools._by_length import ByLength
from memfit.training import Step, modes_restored
from memfit.workload import Workload, class_name, packed

_LABELS, _IDS, _POSITIONS, _IGNORED = "labels", "input_ids", "position_ids", -100


class Packed:
    """Packs the samples of a padded batch one after the other, without the padding.

    A batch of samples × tokens, padded at either end, becomes one row (or a few) of the tokens that count. Its
    `position_ids` begin at 0 in each sample, and the mask is left out: transformers' decoders then build a mask that
    keeps samples apart. The first label of each sample becomes -100, so that no token is predicted from the sample
    before. `workload` proves on a model that samples stay apart, and that the loss and its gradients are those of the
    padded batch to rounding.

    M. M. Krell et al. (2021), *Efficient Sequence Packing without Cross-contamination: Accelerating Large Language
    Models without Impacting Performance*. Samples are packed within their batch here, so that updates stay the same.

    Args:
        rows: Rows of the packed batch (> 0), with about as many tokens each: a plan can cut these into microbatches.
        multiple_of: Rows are filled up to a multiple of so many tokens (> 0), with a sample that counts for nothing.
            Batches of many lengths then have few shapes.
        entry: The entry of the batch that is not 0 where tokens count, as a tensor of samples × tokens.
        shifts: Whether `labels` are the tokens themselves, which the loss compares with the logits of the token before,
            as transformers' models do. False where labels are shifted already: the first label of a sample counts.

    Raises:
        UsageError: `rows` or `multiple_of` is not above 0.
    """

    def __init__(self, rows: int = 1, multiple_of: int = 1, entry: str = "attention_mask", shifts: bool = True) -> None:
        if rows < 1 or multiple_of < 1:
            raise UsageError(f"Packed(rows={rows}, multiple_of={multiple_of}): give whole numbers above 0")
        self.rows, self.multiple_of, self.entry, self.shifts = rows, multiple_of, entry, shifts

    @public
    def __call__(self, batch: Any) -> dict[Any, Any]:
        """Return a padded batch packed: its tensors of samples × tokens as rows × tokens, with `position_ids`.

        Raises:
            WorkloadError: A tensor of the batch is none of samples × tokens, no token counts, or some count for nothing
                between others.
        """
        return packed(batch, rows=self.rows, multiple_of=self.multiple_of, entry=self.entry, shifts=self.shifts)

    @public
    def workload(
        self, workload: Workload, *, numerics: Literal["reordered", "changed"] = "reordered", samples: int | None = None
    ) -> Workload:
        """Return a workload with its batch packed, and its `batches` as they come, after a proof on its model.

        The model runs three times forward and backward, in evaluation mode, on samples of the workload's batch; nothing
        of the workload is changed. (1, 2) The loss and the gradients of the packed samples are compared with those of
        the padded ones. (3) Of some packed samples the loss is computed alone: its gradient must be 0 at the embeddings
        of all other samples' tokens.

        Args:
            workload: The workload with the padded batch, with data and `labels`.
            numerics: "changed" allows another loss than that of the padded batch, such as a mean over samples of their
                means over tokens. Samples are kept apart all the same.
            samples: How many of the batch's samples are compared, the shortest of them (≥ 2); None for all. For padded
                batches that memory does not hold.

        Raises:
            UsageError: `numerics` is another class, or `samples` is below 2.
            WorkloadError: The model mixes packed samples, the loss differs, or the batch can't be packed.
        """
        if numerics not in ("reordered", "changed") or (samples is not None and samples < 2):
            raise UsageError(
                f"Packed.workload(numerics={numerics!r}, samples={samples}): give 'reordered' or 'changed', and two"
                " samples or more, or None"
            )
        result = dataclasses.replace(
            workload,
            batch=self(workload.batch),
            batches=None if workload.batches is None else _PackedBatches(workload.batches, self),
            batch_size=None,
            split=None,
        )
        count = len(workload.batch[self.entry])
        batch = workload.batch
        if samples is not None and samples < count:
            batch = ByLength(self.entry)(batch, count - samples, count)
        # One row, in which all samples may mix.
        row = Packed(1, self.multiple_of, self.entry, self.shifts)(batch)
        with nothing_changes(workload), modes_restored(workload.model):
            workload.model.eval()
            _prove_apart(workload, row)
            if numerics == "reordered":
                _prove_equal(workload, batch, row)
        return result


class _PackedBatches:
    """Batches that are packed as they come; their position, generators and length are those of the padded ones."""

    def __init__(self, batches: Iterable[Any], pack: Packed) -> None:
        self._batches, self._pack = batches, pack

    def __iter__(self) -> Iterator[dict[Any, Any]]:
        return map(self._pack, self._batches)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_batches" not in vars(self):
            raise AttributeError(name)
        return getattr(self._batches, name)


def _prove_equal(workload: Workload, padded: Any, row: dict[Any, Any]) -> None:
    """Compare the loss and the gradients of a packed row with those of the padded batch; raise where they differ."""
    losses, gradients = zip(*(_step_of(workload).gradients(batch) for batch in (padded, row)), strict=True)
    norms = [
        sum(float(gradient.double().square().sum()) for gradient in found.values()) ** 0.5
        for found in (gradients[0], {n: gradients[1][n] - gradient for n, gradient in gradients[0].items()})
    ]
    share = norms[1] / norms[0] if norms[0] else 0.0
    tolerance = max(torch.finfo(p.dtype).eps for p in workload.model.parameters() if p.is_floating_point()) ** 0.5
    if abs(losses[1] - losses[0]) <= tolerance * abs(losses[0]) and share <= tolerance:
        return
    raise WorkloadError(
        f"packing would change the training: the padded batch's loss is {losses[0]:.7g}, the packed one's"
        f" {losses[1]:.7g}, and its gradients differ by {share:.2g} of their norm, where rounding explains"
        f" {tolerance:.1g}. Usual reasons: Workload.loss_fn does not give position_ids to the model (call"
        " model(**batch)); it is a mean over samples; it shifts labels by itself (Packed(shifts=False) if they are"
        " shifted in the batch); first tokens of samples padded at their beginning have labels, predicted from padding"
        " (label them -100). numerics='changed' allows another loss"
    )


def _prove_apart(workload: Workload, row: dict[Any, Any]) -> None:
    """Compute the loss of every second sample of a row alone; raise where others' tokens have a part in it.

    A gradient of exactly 0 is asked for, at the embeddings of others' tokens: attention weights of 0 leave nothing, and
    rounding plays no part. Where samples mix, neighbours do, in one direction at least.
    """
    labels, ids = row.get(_LABELS), row.get(_IDS)
    if labels is None or ids is None:
        raise WorkloadError(
            f"packing can't be proven: the batch has no {_LABELS if labels is None else _IDS!r}. Packed.workload knows"
            f" by them which tokens the loss is of: put {_IDS!r} and {_LABELS!r} (-100 for none) into the batch"
        )
    sample = (torch.diff(row[_POSITIONS], prepend=row[_POSITIONS][:, :1] - 1) != 1).cumsum(1)
    told = sample[labels != _IGNORED].unique()
    if len(told) < 2:
        raise WorkloadError(
            f"packing can't be proven: {len(told)} samples have labels, and samples are kept apart from others. Give a"
            " batch of two samples or more"
        )
    is_told = torch.isin(sample, told[1::2])
    with _embedded(workload.model, ids) as embedded:
        _step_of(workload).gradients({**row, _LABELS: labels.masked_fill(~is_told, _IGNORED)})
    gradients = [found.grad for found in embedded if found.grad is not None]
    if not gradients:
        raise WorkloadError(
            "packing can't be proven: the loss depends on no nn.Embedding that the model calls with the batch's"
            " 'input_ids'. memfit looks there for tokens that one sample has of another. Sort samples by length"
            " instead, with Workload(split=memfit.tools.ByLength())"
        )
    mixed = max(int((gradient[~is_told] != 0).any(-1).sum()) for gradient in gradients)
    if mixed:
        raise WorkloadError(
            f"{class_name(workload.model)} mixes the samples of a packed row: the loss of {int(is_told.sum())} tokens"
            f" depends on {mixed} of the {int((~is_told).sum())} tokens of other samples. transformers' decoders keep"
            " them apart by position_ids, but not with a cache: call model(**batch, use_cache=False). Encoders,"
            " recurrent models, and those that take no position_ids can't be packed: sort samples by length, with"
            " Workload(split=memfit.tools.ByLength())"
        )


def _step_of(workload: Workload) -> Step:
    """Return a step of a whole batch, as Workload.loss_fn takes it."""
    return Step(dataclasses.replace(workload, batch_size=1, split=None))


@contextlib.contextmanager
def _embedded(model: nn.Module, ids: Tensor) -> Iterator[list[Tensor]]:
    """Yield the embeddings of tokens, filled by the model's calls: leaves, which a backward pass gives gradients."""
    found: list[Tensor] = []

    def follow(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
        given = args[0] if args else None
        if not isinstance(given, Tensor) or given.shape != ids.shape or not torch.equal(given.to(ids.device), ids):
            return None
        found.append(out.detach().requires_grad_())
        return found[-1]

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(follow).remove)
        yield found
