"""The versions of PyTorch that memfit is tested with are told in one way everywhere, and others are warned of."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.torch_version import TorchVersion

import memfit
from memfit import _torch
from memfit.capture import packed, warn_if_untested
from memfit.errors import UntestedTorchWarning
from tests.models import twice

ROOT = Path(__file__).parents[2]
FIRST, LAST = (".".join(map(str, version)) for version in _torch.versions.TESTED)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A PyTorch that is newer than those that were tested."""
    major, minor = _torch.versions.TESTED[1]
    monkeypatch.setattr(torch, "__version__", TorchVersion(f"{major}.{minor + 1}.0"))
    warn_if_untested.cache_clear()
    yield
    warn_if_untested.cache_clear()


def test_this_one_was_tested() -> None:
    assert _torch.versions.why_untested() == ""


@pytest.mark.usefixtures("newer")
def test_another_one_is_warned_of_once_at_the_users_line() -> None:
    with pytest.warns(UntestedTorchWarning, match=f"tested with PyTorch {FIRST} to {LAST}, and this is") as told:
        memfit.estimate(twice())
        memfit.estimate(twice())
    assert [one.filename for one in told] == [__file__]
    assert torch.__version__ in str(told[0].message)


@pytest.mark.usefixtures("newer")
def test_a_capture_in_another_process_is_warned_of_here() -> None:
    with pytest.warns(UntestedTorchWarning):
        packed(memfit.estimate, twice(), {})


@pytest.mark.usefixtures("newer")
def test_the_warning_can_be_filtered() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UntestedTorchWarning)
        memfit.estimate(twice())


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0", "3.0.0"])
def test_why_untested_says_what_was_tested(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert _torch.versions.TESTED_RANGE in _torch.versions.why_untested()


def test_what_is_required_and_what_pages_say_is_the_tested_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={FIRST}" in project["dependencies"]
    for page in ("README.md", "docs/quickstart.md", "docs/internals/torch-versions.md"):
        assert f"PyTorch {_torch.versions.TESTED_RANGE}" in (ROOT / page).read_text(), page


@pytest.mark.parametrize("is_above", [True, False])
def test_clamp_splits_ties_where_a_bound_is_a_tensor(is_above: bool) -> None:
    """`CLAMP_SPLITS_TIES` says which of two formulas runs: at a tie, the input gets half of the gradient or all."""
    x = torch.zeros(1, requires_grad=True)
    bounds = (torch.full((1,), -1.0), torch.zeros(1)) if is_above else (torch.zeros(1), torch.ones(1))
    x.clamp(*bounds).sum().backward()
    assert x.grad is not None and x.grad.item() == (0.5 if _torch.versions.CLAMP_SPLITS_TIES else 1.0)


def test_sharded_leaves_accumulate_where_fsdp_only_reads_the_sum() -> None:
    """`SHARDED_LEAVES_ACCUMULATE` says whether the sum of gradients that were not reduced is a view of `grad`."""
    read_only = isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)
    assert read_only == _torch.versions.SHARDED_LEAVES_ACCUMULATE


def test_torch_version_is_of_two_numbers() -> None:
    assert _torch.torch_version() == tuple(map(int, torch.__version__.split(".")[:2]))
