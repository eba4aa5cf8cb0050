"""Where costs come from that a clock tells, or a link: measured here, kept in a file, from the catalogue, or fixed.

Links between ranks are measured among processes of this machine, or from the catalogue. A `CostSource` fixes them, and
what operators take, so that no clock is in the costs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from memfit import ir
from memfit.cost.operator_call import figures
from memfit.errors import CaptureError, OutputError, PlanError
from memfit.hardware import cache_folder
from memfit.ir import (
    COPIES,
    Collective,
    Copy,
    CostTable,
    Device,
    OpCost,
    Sharding,
    Share,
    Trace,
    among_ranks,
)

_GPU_LATENCY_SECONDS = 5e-6  # estimate: of one hop of a ring, which NCCL's tests show at 3 to 10 µs within a node
_NODE_LATENCY_SECONDS = 1e-5  # estimate: of one hop between nodes
_LARGE_BYTES, _SMALL_BYTES = 8 * 2**20, 2**10
_REPEATS = 7
_MOST_SECONDS = 120
_MOST_PROBED = 4  # ranks of one machine that are probed; more share its processors alike
T = TypeVar("T")


def kept(path: Path, kind: type[T]) -> T | None:
    """Return the record in a file of the cache; None where it is missing, damaged, or of another version."""
    with contextlib.suppress(PlanError):
        return ir.codec.read(path, kind) if path.exists() else None
    return None


def keep(path: Path, record: msgspec.Struct) -> None:
    """Write a record to the cache, if that can be written: without one, the next run measures again."""
    with contextlib.suppress(OutputError):
        ir.codec.write_atomic(path, ir.codec.encode(record))


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link between ranks.

    Attributes:
        bytes_per_second: Of one rank in one direction, while all send (> 0).
        latency_seconds: Of one message to the next rank (≥ 0).
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, sent: Collective) -> float:
        """Return the time of a collective by ring algorithms: N − 1 messages, twice as many for a sum."""
        rounds = (sent.ranks - 1) * (2 if sent.sent_bytes > sent.nbytes else 1)
        return rounds * self.latency_seconds + sent.sent_bytes / self.bytes_per_second


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The links of some ranks.

    Attributes:
        within: Of the ranks of one node.
        copy_bytes_per_second: At which a rank copies parameters out of what it gathered, and gradients into one buffer.
        between: Of the ranks of different nodes; None for one node.
        ranks_per_node: Ranks of one node (> 0), consecutive ones; 0 for all.
        pads: Whether gradients are padded in copies before they are put into one buffer, as a CPU's kernel does.
    """

    within: Link
    copy_bytes_per_second: float
    between: Link | None = None
    ranks_per_node: int = 0
    pads: bool = False

    def of(self, ranks: int, *, spread: bool = False) -> Link:
        """Return the link that limits some ranks: consecutive ones, or ones `spread` over all nodes."""
        if self.between is None or not (spread or ranks > (self.ranks_per_node or ranks)):
            return self.within
        return self.between


class CostSource(msgspec.Struct, frozen=True, kw_only=True):
    """Costs in the place of measured ones. What calls allocate inside is measured as ever: no clock is in that.

    Attributes:
        name: Its costs are cached under this name.
        seconds: The time of a call, by its signature.
        dispatch_seconds, checkpoint_seconds, selective_op_seconds: As in a `CostTable`.
        links: The links among processes of this machine.
    """

    name: str
    seconds: Callable[[str], float]
    dispatch_seconds: float
    checkpoint_seconds: float
    selective_op_seconds: float
    links: Links


_fixed: CostSource | None = None


def fixed_source() -> CostSource | None:
    """Return the source of costs within `costs_from`; None where costs are measured."""
    return _fixed


@contextlib.contextmanager
def costs_from(source: CostSource) -> Iterator[None]:
    """Take the costs of this machine's CPU from a source within the context, and time no operator."""
    global _fixed
    before, _fixed = _fixed, source
    try:
        yield
    finally:
        _fixed = before


def links_of(device: Device, sharding: Sharding) -> Links:
    """Return the links of a step's ranks on a kind of device; among processes of a CPU they are measured once."""
    if device.kind == "cpu":
        return _measured(min(sharding.world_size, _MOST_PROBED))
    rate = device.peer_bytes_per_second or device.link_bytes_per_second
    between = None
    if sharding.world_size > device.cards_per_node:
        node_rate = device.node_bytes_per_second or device.link_bytes_per_second
        between = Link(bytes_per_second=max(node_rate, 1.0), latency_seconds=_NODE_LATENCY_SECONDS)
    return Links(
        within=Link(bytes_per_second=max(rate, 1.0), latency_seconds=_GPU_LATENCY_SECONDS),
        copy_bytes_per_second=max(figures()[COPIES]["traffic"] * device.bandwidth_bytes_per_second, 1.0),
        between=between,
        ranks_per_node=device.cards_per_node,
    )


def with_collectives(costs: CostTable, traces: Iterable[Trace], links: Links) -> CostTable:
    """Return costs with those of collectives, and of copies and shares that were put in on paper."""
    ops = dict(costs.ops)
    for trace in traces:
        replicas = trace.sharding.replicas if trace.sharding else 1
        for text in trace.signatures:
            match among_ranks(text):
                case Collective() as sent:
                    spread = not sent.is_waited and replicas > 1 and sent.ranks == replicas
                    ops[text] = OpCost(links.of(sent.ranks, spread=spread).seconds(sent), 0, False)
                case Copy(nbytes, padded_bytes):
                    padded_bytes = padded_bytes if links.pads else 0
                    ops[text] = OpCost(2 * nbytes / links.copy_bytes_per_second, padded_bytes, False)
                case Share(whole, ranks) if text not in ops:
                    cost = ops.get(whole) or costs.of(whole)
                    ops[text] = OpCost(cost.seconds / ranks, cost.workspace_bytes // ranks, cost.measured)
    return msgspec.structs.replace(costs, ops=ops)


def _measured(ranks: int) -> Links:
    """Return the links of some processes of this machine over gloo, measured where the cache lacks them."""
    if (source := fixed_source()) is not None:
        return source.links
    path = cache_folder() / f"links-{ranks}ranks-torch{torch.__version__}.json"
    with contextlib.suppress(Exception):  # damaged, or of another version: it is measured again
        return msgspec.json.decode(path.read_bytes(), type=Links)
    with contextlib.closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    line = [sys.executable, "-c", "from memfit.cost import links; links._as_rank()"]
    # Ranks that torchrun started would look for its store.
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment = own | {
        "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(line, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE) for rank in range(ranks)
    ]
    try:
        written = [process.communicate(timeout=_MOST_SECONDS)[0] for process in processes]
    except subprocess.TimeoutExpired:
        raise CaptureError(f"the {ranks} processes that measure their link took more than {_MOST_SECONDS} s") from None
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise CaptureError(f"the {ranks} processes that measure their link failed: see their output above")
    found = msgspec.json.decode(written[0], type=Links)
    with contextlib.suppress(OutputError):  # without a cache, the next run measures again
        ir.codec.write_atomic(path, written[0])
    return found


def _as_rank() -> None:
    """Measure the link as one of several processes; the first writes it to standard output."""
    import torch.distributed as dist
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()

    def gather_seconds(nbytes: int) -> float:
        part = torch.zeros(nbytes // ranks // 4)
        whole = torch.zeros(part.numel() * ranks)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        return _median_seconds(lambda: gather(whole, part))

    small, large = gather_seconds(_SMALL_BYTES), gather_seconds(_LARGE_BYTES)
    gradients = [torch.zeros(256, 256) for _ in range(8)]
    buffer = torch.zeros(ranks, sum(g.numel() for g in gradients) // ranks)
    copied = _median_seconds(lambda: torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=ranks, out=buffer))
    found = Links(
        within=Link(
            bytes_per_second=_LARGE_BYTES * (ranks - 1) / ranks / max(large - small, 1e-9),
            latency_seconds=small / (ranks - 1),
        ),
        copy_bytes_per_second=2 * buffer.numel() * 4 / copied,
        pads=True,
    )
    dist.barrier()
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        sys.stdout.write(msgspec.json.encode(found).decode())
        sys.stdout.flush()
    os._exit(0)  # or threads of gloo that outlive the group abort a process that ends by itself


def _median_seconds(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
