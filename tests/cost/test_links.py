"""Links between ranks: what is measured between processes of this machine, and what the catalogue says of cards."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.cost import Link, Links, links_of, with_collectives
from memfit.hardware import find_device
from memfit.ir import GATHER, REDUCE, Collective, Sharding
from tests.models import COSTS, captured, transformer


@pytest.mark.ci
def test_processes_measure_their_link_once_and_under_torchrun_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank that torchrun started has variables that make PyTorch look for torchrun's store."""
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "1")
    cpu = find_device("cpu")
    found = links_of(cpu, Sharding(world_size=2, mode="ddp"))
    assert found.within.bytes_per_second > 1e6 and found.within.latency_seconds > 0
    assert found.copy_bytes_per_second > 1e7
    monkeypatch.setattr(subprocess, "Popen", lambda *_: pytest.fail("it is measured again"))
    assert links_of(cpu, Sharding(world_size=2, mode="zero3")) == found


def test_cards_of_other_nodes_are_reached_over_another_link() -> None:
    one = links_of(find_device("h100"), Sharding(world_size=8, mode="zero3"))
    assert one.between is None and one.of(8).bytes_per_second == 450e9
    two = links_of(find_device("h100"), Sharding(world_size=16, mode="zero3", replicas=2))
    assert two.of(8).bytes_per_second == 450e9
    assert two.of(16).bytes_per_second == two.of(2, spread=True).bytes_per_second == 50e9
    plain = links_of(find_device("rtx-3090"), Sharding(world_size=2, mode="ddp"))
    assert plain.within.bytes_per_second == find_device("rtx-3090").link_bytes_per_second


def test_a_ring_sends_each_byte_once_and_twice_for_a_sum() -> None:
    link = Link(bytes_per_second=1e9, latency_seconds=1e-3)
    assert link.seconds(Collective(GATHER, 8_000_000, 4)) == pytest.approx(0.006 + 3e-3)
    assert link.seconds(Collective(REDUCE, 8_000_000, 4)) == pytest.approx(0.012 + 6e-3)


def test_what_is_sent_has_its_cost_whatever_the_table_had() -> None:
    trace = captured(transformer())
    text = Collective(GATHER, 4_000_000, 2).text

    sent = replace(trace, signatures=[*trace.signatures, text], works=[*trace.works, trace.works[0]])
    found = with_collectives(COSTS, [sent], Links(within=Link(bytes_per_second=1e6), copy_bytes_per_second=1e9))
    assert found.of(text).seconds == pytest.approx(2.0) and found.of(text).workspace_bytes == 0
