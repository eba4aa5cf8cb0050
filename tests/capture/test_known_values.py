"""Values that are followed under fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

from memfit.capture import KnownValues


@pytest.fixture
def known() -> Iterator[KnownValues]:
    """Values followed under a fake tensor mode that is on."""
    values = KnownValues.of(FakeTensorMode(allow_non_fake_inputs=True))
    with values.fake, values:
        yield values


def is_known(known: KnownValues, tensor: torch.Tensor) -> bool:
    return known.value_of(tensor) is not None


def test_one_object_for_each_mode(known: KnownValues) -> None:
    assert KnownValues.of(known.fake) is known
    assert KnownValues.of(FakeTensorMode()) is not known


def test_integers_are_computed_beside(known: KnownValues) -> None:
    ids = torch.arange(12).view(3, 4)
    assert isinstance(ids, FakeTensor)
    assert ids.sum().item() == 66 and ids[1:, ::2].tolist() == [[4, 6], [8, 10]]
    assert ((ids % 2 == 0) & (ids > 3)).sum().item() == 4
    assert bool((ids < 12).all()) and not bool((ids > 12).any())
    assert torch.cat([ids, ids]).max().item() == 11 and ids.to(torch.int32).flip(0)[0, 0].item() == 8
    assert torch.tensor([3, 1]).argsort().tolist() == [1, 0] and torch.full((2,), 7).sum().item() == 14


def test_a_real_tensor_of_the_users_is_known(known: KnownValues) -> None:
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        real = torch.tensor([1, 2, 3])
    assert (real * 2).sum().item() == 12


def test_what_depends_on_activations_is_not(known: KnownValues) -> None:
    x = torch.randn(100)
    mask = x > 0
    assert not is_known(known, mask) and not is_known(known, mask & torch.ones(100, dtype=torch.bool))
    assert (x.sum().item(), mask.sum().item(), mask.any().item(), mask.all().item()) == (0.0, 0, False, True)
    assert not is_known(known, torch.randint(0, 5, (100,))) and not is_known(known, torch.arange(100).float())


def test_memory_that_is_not_set_has_no_values(known: KnownValues) -> None:
    ids = torch.arange(3)
    for made in (torch.empty_like(ids), ids.new_empty(3), torch.empty(3, dtype=torch.long)):
        assert not is_known(known, made)
    assert torch.zeros_like(ids).sum().item() == 0 and ids.new_ones(2).sum().item() == 2


def test_writes_are_followed_through_views(known: KnownValues) -> None:
    ids = torch.arange(4)
    ids[1:] += 5
    assert ids.tolist() == [0, 6, 7, 8]
    ids[ids > 6] = -1
    assert ids.tolist() == [0, 6, -1, -1]
    torch._foreach_add_([ids], 1)
    assert ids.tolist() == [1, 7, 0, 0]


def test_a_write_of_something_unknown_is_forgotten_in_every_view(known: KnownValues) -> None:
    ids, other = torch.arange(4), torch.arange(4)
    view = ids.view(2, 2)[1]
    view.copy_(torch.randn(100)[:2])
    assert not is_known(known, ids) and not is_known(known, view) and is_known(known, other)
    assert ids.sum().item() == 0


def test_a_step_counter_counts_once(known: KnownValues) -> None:
    step = torch.tensor(0.0)
    torch._foreach_add_([step], 1)
    step += 1
    assert step.item() == 2.0


@pytest.mark.parametrize("select", ["index", "masked_select", "nonzero"])
def test_a_known_mask_gives_the_shape(known: KnownValues, select: str) -> None:
    x, mask = torch.randn(3, 4, requires_grad=True), torch.tensor([True, False, True])
    if select == "index":
        found = x[mask]
    elif select == "masked_select":
        found = torch.masked_select(x, mask[:, None]).view(-1, 4)
    else:
        found = x[mask.nonzero().squeeze(1)]
    assert found.shape == (2, 4)
    found.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_what_a_known_mask_selects_of_known_integers_is_known(known: KnownValues) -> None:
    ids = torch.tensor([4, -100, 7])
    assert ids[ids >= 0].tolist() == torch.masked_select(ids, ids >= 0).tolist() == [4, 7]
    assert not known.replay.guesses


def test_a_mask_beside_indices(known: KnownValues) -> None:
    x, mask = torch.randn(3, 4), torch.tensor([True, False, True])
    assert x[mask, torch.tensor([0, 1])].shape == (2,)
    assert x[:, torch.arange(4) > 0].shape == (3, 3)


def test_shapes_from_known_integers(known: KnownValues) -> None:
    ids = torch.tensor([1, 1, 2])
    assert torch.unique(ids).shape == (2,) and torch.bincount(ids).tolist() == [0, 2, 1]
    assert torch.repeat_interleave(torch.randn(3, 2), ids, dim=0).shape == (4, 2)


@pytest.mark.parametrize("is_flat", [False, True])
def test_the_lengths_of_targets_give_the_shape_of_a_ctc_loss(known: KnownValues, is_flat: bool) -> None:
    logs, counts = torch.randn(20, 3, 5).log_softmax(-1), torch.tensor([4, 2, 5])
    targets = torch.ones((11,) if is_flat else (3, 8), dtype=torch.long)
    lengths = torch.tensor([20, 18, 20])
    for samples, longest in ((slice(0, 3), 5), (slice(0, 2), 4), (slice(1, 2), 2)):
        given = targets if is_flat else targets[samples]
        _, alpha = torch.ops.aten._ctc_loss.Tensor(logs[:, samples], given, lengths[samples], counts[samples])
        assert alpha.shape == (len(counts[samples]), 20, 2 * longest + 1)
    assert not known.replay.guesses
    unknown = torch.randint(5, (100,))[:3]
    _, alpha = torch.ops.aten._ctc_loss.Tensor(logs, torch.ones(3, 8, dtype=torch.long), lengths, unknown)
    assert alpha.shape == (3, 20, 17)


def test_an_unknown_mask_is_taken_to_select_everything(known: KnownValues) -> None:
    x = torch.randn(100)
    assert x[x > 0].shape == torch.masked_select(x, x > 0).shape == (100,)
    assert (x > 0).nonzero().shape == (100, 1) and torch.unique(x > 0).shape == (100,)
    assert len(known.replay.guesses) == 2
    with pytest.raises(DynamicOutputShapeException):
        torch.repeat_interleave(x, (x > 0).long())


def test_large_tensors_are_not_followed(known: KnownValues) -> None:
    ids = torch.arange(2**20)
    assert is_known(known, ids) and not is_known(known, torch.arange(2**20 + 1))
    assert not is_known(known, ids.expand(2, 2**20)) and ids[:4].sum().item() == 6


def test_numbers_are_taken_to_be_finite(known: KnownValues) -> None:
    x = torch.randn(100)
    assert torch.isfinite(x).all() and not torch.isnan(x).any() and not torch.isinf(x).any()
    assert not (x != x).any() and (x == x).all() and not (x.abs() == float("inf")).any()
    assert not is_known(known, x == 0.0) and not is_known(known, x != torch.randn(100))


def test_values_are_taken_over(known: KnownValues) -> None:
    def like(real: torch.Tensor) -> torch.Tensor:
        return FakeTensor(known.fake, torch.empty_like(real, device="meta"), torch.device("cuda", 0))

    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        ids, scalar, many = torch.arange(3), torch.tensor(2.5), torch.ones(100)
        fakes = [like(real) for real in (ids, scalar, many)]
    for fake, real in zip(fakes, (ids, scalar, many), strict=True):
        known.know(fake, real)
    assert fakes[0].tolist() == [0, 1, 2] and fakes[1].item() == 2.5 and not is_known(known, fakes[2])
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        ids += 1
    assert fakes[0].tolist() == [0, 1, 2]


def test_a_loss_can_be_formatted(known: KnownValues) -> None:
    loss = torch.randn(100).mean()
    with known.fake_paths_disabled():
        assert f"{loss:.2f}" == "0.00" and f"{torch.tensor(7):03d}" == "007"
    with pytest.raises(TypeError):
        f"{loss:.2f}"


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "numbers": lambda x: x.mul_(2.0),
    "another tensor's": lambda x: x.add_(x * 2, alpha=3.0),
    "those of two": lambda x: x.addcdiv_(x + 1, x + 2, value=0.1),
    "a row's": lambda x: x.add_(x[0]),
    "those of another precision": lambda x: x.add_(x.double()),
    "copied ones": lambda x: x.copy_(x + 1),
    "integers": lambda x: x.long().mul_(2),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_stays_what_it_is(known: KnownValues, name: str) -> None:
    """Operators that write numbers alone run without their kernels."""
    x = torch.empty(4, 8)
    made = WRITES[name](x)
    assert isinstance(made, FakeTensor) and made.shape == (4, 8) and (made is x or name == "integers")


def test_what_a_kernel_refuses_is_refused(known: KnownValues) -> None:
    with pytest.raises(RuntimeError):
        torch.empty(4, 8).add_(torch.empty(5, 8))
