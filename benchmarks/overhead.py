"""What the step costs beyond the techniques that it uses: `memfit.Step` against the same loop written by hand.

Both run the same model in bf16-mixed, with every block checkpointed, four microbatches accumulated, and clipping; both
return the loss and the gradient norm. They take turns in one process, and the ratio is the median over rounds of one's
time by the other's, so that a busy machine slows both alike. memfit's checkpointing is the faster one on small modules,
which hides what the rest of the step costs: the last case has none. `--cpu-time` counts processor time, not wall
time.

`--keeping` times a GPT that is bound by launches instead: plain, with its blocks checkpointed, and with outputs kept of
some of their operators, by memfit and by PyTorch's selective checkpointing.
"""

from __future__ import annotations

import functools
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.common import Case, main
from memfit import Workload
from memfit.capture import real_copy
from memfit.foundations import format_seconds
from memfit.hardware import find_device, synchronize
from memfit.ir import Keep, Levers, Region
from memfit.levers import applied
from memfit.recipes import byte_lm
from memfit.workload import batch_size_of

MICROBATCHES = 4
OneStep = Callable[[Any], tuple[float, float]]


class Block(nn.Module):
    """A residual block of a small multi-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Tiny(nn.Module):
    """Four residual blocks and a head: hardly any arithmetic."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(x))
        return out


def tiny() -> Workload:
    """A model whose step takes milliseconds, so that overhead shows."""
    torch.manual_seed(0)
    model = Tiny()
    batch = {"x": torch.randn(64, 64), "y": torch.randint(0, 10, (64,))}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])

    return Workload(model, batch, loss, torch.optim.AdamW(model.parameters()), name="tiny", max_grad_norm=1.0)


def small_byte_lm() -> Workload:
    """A byte-level GPT of 0.9 million parameters."""
    return byte_lm(n_layer=4, d_model=128, n_head=4, context=128, batch_size=8, max_bytes=300_000)


WORKLOADS: dict[str, tuple[Callable[[], Workload], int, bool]] = {
    "byte_lm": (small_byte_lm, 1, True),
    "tiny": (tiny, 10, True),
    "tiny_without_checkpointing": (tiny, 10, False),
}
"""What is run, how many steps of it are timed at once, and whether its blocks are checkpointed."""


PRODUCTS = tuple(f"aten.addmm.default#{index}" for index in range(4))
ATTENTION = ("aten._scaled_dot_product_flash_attention_for_cpu.default#0",)
KEEPS = {"nothing": (), "a product": PRODUCTS[:1], "all products": PRODUCTS, "attention": ATTENTION}
"""What checkpointed blocks of the launch-bound GPT keep."""


def launch_bound() -> Workload:
    """A GPT whose operators take less time than their dispatch."""
    return byte_lm(n_layer=8, d_model=32, n_head=2, context=32, batch_size=8, dropout=0.0, max_bytes=300_000)


@contextmanager
def by_hand(workload: Workload, checkpointing: bool, keep: Keep = ()) -> Iterator[OneStep]:
    """Write the step out, as a careful user would; on leaving, undo what it did to the model.

    PyTorch keeps the outputs of all operators of a kind.
    """
    model, optimizer = workload.model, workload.optimizer
    blocks = list(model.blocks) if checkpointing else []  # type: ignore[arg-type]
    parameters = list(model.parameters())
    options: dict[str, Any] = {"use_reentrant": False}
    if keep:
        kept = [operator.attrgetter(key.partition("#")[0])(torch.ops) for key in keep]
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, **options)
    size = batch_size_of(workload.batch) // MICROBATCHES

    def step(batch: dict[str, torch.Tensor]) -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        total: Any = 0.0
        for start in range(0, MICROBATCHES * size, size):
            microbatch = {name: tensor[start : start + size] for name, tensor in batch.items()}
            with torch.autocast(parameters[0].device.type, dtype=torch.bfloat16):
                value = workload.loss_fn(model, microbatch)
            loss = value / MICROBATCHES if isinstance(value, torch.Tensor) else value[0] / (value[1] * MICROBATCHES)
            loss.backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(parameters, workload.max_grad_norm or 1.0)
        optimizer.step()
        return float(total), float(norm)

    try:
        yield step
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def by_memfit(workload: Workload, checkpointing: bool, keep: Keep = ()) -> Iterator[OneStep]:
    """Apply the same levers with memfit."""
    blocks = len(workload.model.blocks) if checkpointing else 0  # type: ignore[arg-type]
    regions = tuple(Region((f"blocks.{i}",), keep) for i in range(blocks))
    size = batch_size_of(workload.batch) // MICROBATCHES
    with applied(Levers(precision="bf16-mixed", microbatch_size=size, regions=regions), workload) as planned:

        def step(batch: Any) -> tuple[float, float]:
            result = planned(batch)
            return result.loss, result.grad_norm

        yield step


def compare(name: str, rounds: int, clock: Callable[[], float], device: str = "cpu") -> Case:
    """Time both steps in turns, on a device of this machine."""
    make, at_once, checkpointing = WORKLOADS[name]
    place = torch.device(find_device(device).name)
    workload = real_copy(make(), place)
    both = by_hand(real_copy(workload), checkpointing), by_memfit(real_copy(workload), checkpointing)
    with both[0] as hand, both[1] as memfit:
        steps = {"by hand": hand, "memfit": memfit}
        first = {which: [step(workload.batch) for _ in range(5)] for which, step in steps.items()}
        seconds = _in_turns(
            {k: functools.partial(s, workload.batch) for k, s in steps.items()}, rounds, at_once, clock, place
        )
    pairs = list(zip(seconds["memfit"], seconds["by hand"], strict=True))
    difference = max(
        abs(a - b) / abs(b) for x, y in zip(*first.values(), strict=True) for a, b in zip(x, y, strict=True)
    )
    return {
        "case": name,
        "rounds": rounds,
        "by_hand_seconds": statistics.median(seconds["by hand"]),
        "memfit_seconds": statistics.median(seconds["memfit"]),
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        "largest_difference": difference,
    }


def _in_turns(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    at_once: int,
    clock: Callable[[], float],
    place: torch.device,
) -> dict[str, list[float]]:
    """Return the seconds of steps that take turns, each run some times at once, by round."""
    seconds: dict[str, list[float]] = {which: [] for which in steps}
    for index in range(rounds):
        for which in sorted(steps, reverse=index % 2 == 1):
            synchronize(place)
            started = clock()
            for _ in range(at_once):
                steps[which]()
            synchronize(place)
            seconds[which].append((clock() - started) / at_once)
    return seconds


def compare_keeping(rounds: int, clock: Callable[[], float]) -> list[Case]:
    """Time the launch-bound GPT on the CPU with what its blocks may keep, over its plain step, all in turns."""
    workload = launch_bound()
    with ExitStack() as stack:
        steps = {("", "plain"): stack.enter_context(by_hand(real_copy(workload), False))}
        for kept, keep in KEEPS.items():
            for way, make in (("by hand", by_hand), ("memfit", by_memfit)):
                steps[kept, way] = stack.enter_context(make(real_copy(workload), True, keep))
        turns = {" ".join(key): functools.partial(step, workload.batch) for key, step in steps.items()}
        _in_turns(turns, 5, 1, clock, torch.device("cpu"))  # the first passes learn and warm up
        seconds = _in_turns(turns, rounds, 1, clock, torch.device("cpu"))
    return [
        {"case": kept, "rounds": rounds}
        | {
            f"{way.replace(' ', '_')}_ratio": statistics.median(
                one / plain for one, plain in zip(seconds[f"{kept} {way}"], seconds[" plain"], strict=True)
            )
            for way in ("by hand", "memfit")
        }
        for kept in KEEPS
    ]


def run(quick: bool, cpu_time: bool, device: str = "cpu", keeping: bool = False) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each workload, and the ratios."""
    clock = time.process_time if cpu_time else time.perf_counter
    if keeping:
        cases = compare_keeping(10 if quick else 60, clock)
        print(f"{'kept':14} {'by hand':>8} {'memfit':>8}, of the plain step")
        for case in cases:
            print(f"{case['case']:14} {case['by_hand_ratio']:8.3f} {case['memfit_ratio']:8.3f}")
        return cases, {case["case"]: case["memfit_ratio"] for case in cases} | {"clock": _clock_name(cpu_time)}
    rounds = {name: (30 if quick else 200) * (1 if name == "byte_lm" else 4) for name in WORKLOADS}
    cases = [compare(name, count, clock, device) for name, count in rounds.items()]
    print(f"{'':28} {'by hand':>12} {'memfit':>12} {'ratio':>8}")
    for case in cases:
        hand, ours = format_seconds(case["by_hand_seconds"]), format_seconds(case["memfit_seconds"])
        print(f"{case['case']:28} {hand:>12} {ours:>12} {case['ratio']:8.4f}")
    summary = {f"ratio_{case['case']}": case["ratio"] for case in cases}
    return cases, summary | {"clock": _clock_name(cpu_time)}


def _clock_name(cpu_time: bool) -> str:
    return "processor time" if cpu_time else "wall time"


if __name__ == "__main__":
    main(
        "overhead",
        run,
        __doc__,
        {
            "--cpu-time": {"action": "store_true", "help": "count processor time, not wall time"},
            "--keeping": {"action": "store_true", "help": "time what keeping outputs of operators costs, on the CPU"},
            "--device": {"default": "cpu", "help": "where the steps run: cpu, or cuda"},
        },
    )
