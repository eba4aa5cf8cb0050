"""Links between ranks, and costs of collectives: measured among processes of this machine, or from the catalogue."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import msgspec
import torch

from memfit._torch.distributed import leave
from memfit.cost.cost_source import Link, Links, fixed_source
from memfit.cost.modelled_costs import figures
from memfit.errors import CaptureError, OutputError
from memfit.hardware.host import cache_folder
from memfit.ir import codec
from memfit.ir.collectives import collective, copy_on_paper, share_on_paper, waited
from memfit.ir.device import Device
from memfit.ir.operator_classes import COPIES
from memfit.ir.operator_costs import CostTable, OpCost
from memfit.ir.sharding import Sharding
from memfit.ir.trace import Trace

_GPU_LATENCY_SECONDS = 5e-6  # estimate: of one hop of a ring, which NCCL's tests show at 3 to 10 µs within a node
_NODE_LATENCY_SECONDS = 1e-5  # estimate: of one hop between nodes
_LARGE_BYTES, _SMALL_BYTES = 8 * 2**20, 2**10
_REPEATS = 7
_MOST_SECONDS = 120
_MOST_PROBED = 4  # ranks of one machine that are probed; more share its processors alike


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
            if (sent := collective(text)) is not None:
                spread = replicas > 1 and sent.ranks == replicas
                ops[text] = OpCost(links.of(sent.ranks, spread=spread).seconds(sent), 0, False)
            elif (copied := copy_on_paper(text)) is not None:
                padded_bytes = copied.padded_bytes if links.pads else 0
                ops[text] = OpCost(2 * copied.nbytes / links.copy_bytes_per_second, padded_bytes, False)
            elif (waiting := waited(text)) is not None:
                ops[text] = OpCost(links.of(waiting.ranks).seconds(waiting), 0, False)
            elif text not in ops and (share := share_on_paper(text)) is not None:
                whole = ops.get(share.whole) or costs.of(share.whole)
                ops[text] = OpCost(whole.seconds / share.ranks, whole.workspace_bytes // share.ranks, whole.measured)
    return msgspec.structs.replace(costs, ops=ops)


def _measured(ranks: int) -> Links:
    """Return the links of some processes of this machine over gloo, measured where the cache lacks them."""
    if (source := fixed_source()) is not None:
        return source.links
    path = cache_folder() / f"links-{ranks}ranks-torch{torch.__version__}.json"
    with contextlib.suppress(Exception):  # damaged, or of another version: it is measured again
        return msgspec.json.decode(path.read_bytes(), type=Links)
    found = _probe(ranks)
    with contextlib.suppress(OutputError):  # without a cache, the next run measures again
        codec.write_atomic(path, msgspec.json.encode(found))
    return found


def _probe(ranks: int) -> Links:
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
    return msgspec.json.decode(written[0], type=Links)


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
    leave()


def _median_seconds(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
