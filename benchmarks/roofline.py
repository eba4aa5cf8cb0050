"""Whether the roofline's form holds: fitted to this CPU's operators, and tried on models that it was not fitted to.

`cost/operator_call.py` says that an operator takes the larger of its arithmetic and its traffic, each at a rate of its
class, less for narrow products, and a fixed time beyond. Here these are fitted for each class and dtype to measured
operators of all models but one, and the time of that one is predicted from what its operators do. Measured times are
those of `cost/cpu_costs.py`: operators alone. This tells how far the form can be trusted, not the figures of any GPU.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from scipy.optimize import differential_evolution

from benchmarks.common import Case, main
from examples import brain, byte_lm, digits_resnet, gpt2
from memfit import Workload
from memfit.cost import AttainedRates, OperatorCall
from memfit.hardware import find_device
from memfit.ir import Device, Levers, Precision
from memfit.planner import capture_levers, costs_of
from memfit.workload import batch_size_of


def bert() -> Workload:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=2000
    )
    model = transformers.BertForMaskedLM(config).train()
    ids = torch.randint(0, 2000, (8, 128))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(input_ids=batch["x"], labels=batch["x"]).loss
        return out

    return Workload(model, {"x": ids}, loss, torch.optim.AdamW(model.parameters()), name="bert", max_grad_norm=1.0)


def classifier(model: torch.nn.Module, size: int, name: str) -> Workload:
    batch = {"x": torch.randn(8, 3, size, size), "y": torch.randint(0, 100, (8,))}

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).logits, batch["y"])

    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return Workload(model.train(), batch, loss, optimizer, name=name)


def resnet50() -> Workload:
    torch.manual_seed(0)
    return classifier(
        transformers.ResNetForImageClassification(transformers.ResNetConfig.from_dict({"num_labels": 100})),
        96,
        "resnet50",
    )


def vit() -> Workload:
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3}
    config = transformers.ViTConfig.from_dict({**sizes, "image_size": 96, "num_labels": 100})
    return classifier(transformers.ViTForImageClassification(config), 96, "vit")


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "byte_lm": byte_lm.workload,
    "brain_segmentation": brain.workload,
    "gpt2": gpt2.workload,
    "digits_resnet": digits_resnet.workload,
    "bert": bert,
    "resnet50": resnet50,
    "vit": vit,
}
PRECISIONS: tuple[Precision, ...] = ("32-true", "bf16-mixed")


class Measured:
    """A distinct operator call: what it does, and how long it took.

    Args:
        kind: Its class and dtype, which are fitted together.
        flops: Hardware operations.
        nbytes: Traffic.
        seconds: Measured, alone.
        width: The narrowest_dimension dimension, for products.
        calls: How often the step makes it.
    """

    def __init__(
        self, kind: tuple[str, str], flops: int, nbytes: int, width: float, seconds: float, calls: int
    ) -> None:
        self.kind, self.flops, self.nbytes, self.width = kind, flops, nbytes, width
        self.seconds, self.calls = seconds, calls


@dataclass(frozen=True)
class Call:
    """A distinct operator call of a step that runs a kernel.

    Attributes:
        seconds: Measured, alone.
        times: How often the step makes it.
    """

    operator: OperatorCall
    seconds: float
    times: int

    @property
    def kind(self) -> tuple[str, str]:
        """Its class and dtype."""
        return self.operator.kind, self.operator.work.dtype


def calls_of(make: Callable[[], Workload], precision: Precision, device: Device) -> Iterator[Call]:
    """Yield the operators of a workload's step that run a kernel, with their times on a device of this machine."""
    workload = make()
    levers = Levers(precision=precision, microbatch_size=batch_size_of(workload.batch))
    trace = capture_levers(workload, levers, device)
    table = costs_of([trace], device)
    times = Counter(op.signature for op in trace.ops)
    for op in {op.signature: op for op in trace.ops}.values():
        text, work = trace.signatures[op.signature], trace.works[op.signature]
        cost, operator = table.of(text), OperatorCall(op.name, text, work, device)
        if cost.measured and cost.seconds > 0 and operator.runs_kernel:
            yield Call(operator, cost.seconds, times[op.signature])


def measured(make: Callable[[], Workload], precision: Precision) -> list[Measured]:
    """Return the operators of a workload's step that run a kernel, with their times on this CPU."""
    found = []
    for call in calls_of(make, precision, find_device("cpu")):
        operator = call.operator
        nbytes, width = operator.traffic_bytes, operator.narrowest_dimension
        found.append(Measured(call.kind, operator.flops, nbytes, width, call.seconds, call.times))
    return found


def fit(rows: Iterable[Measured]) -> dict[tuple[str, str], AttainedRates]:
    """Return what each class and dtype reaches: the rates and the fixed time with the least error in logarithms."""
    by_kind: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for row in rows:
        by_kind[row.kind].append(row)
    return {kind: fit_one(rows) for kind, rows in by_kind.items()}


def fit_one(rows: list[Measured]) -> AttainedRates:
    """Minimise the mean |log(predicted / measured)|, longer calls weighing more (by the root of their seconds)."""
    names = ("flops", "nbytes", "width", "seconds")
    flops, nbytes, width, seconds = (np.array([float(getattr(row, name)) for row in rows]) for name in names)
    weights = np.sqrt(seconds)

    def loss(log_parameters: Any) -> float:
        rate, bandwidth, fixed, half = np.exp(log_parameters)
        predicted = np.maximum(flops / rate * (1 + half / width), nbytes / bandwidth) + fixed
        return float(np.average(np.abs(np.log(predicted / seconds)), weights=weights))

    fastest, widest = max(float(np.max(flops / seconds)), 1.0), max(float(np.max(nbytes / seconds)), 1.0)
    least, middle = float(np.min(seconds)), float(np.median(seconds))
    bounds = [(fastest / 30, fastest * 3), (widest / 100, widest * 3), (least / 10, 2 * middle), (0.1, 200.0)]
    found = differential_evolution(loss, np.log(bounds), seed=0, maxiter=80, polish=False)
    return AttainedRates(*(float(v) for v in np.exp(found.x)))


def predict(row: Measured, reaches: dict[tuple[str, str], AttainedRates]) -> float | None:
    """Return the predicted seconds of a call, by its class in another dtype where its own was never seen."""
    kind, _ = row.kind
    reach = reaches.get(row.kind) or next((r for (name, _), r in reaches.items() if name == kind), None)
    return None if reach is None else reach.seconds(row.flops, row.nbytes, row.width)


def left_out(name: str, precision: str, rows: list[Measured], others: list[Measured]) -> Case:
    """Return how well a model's operators are predicted from those of other models."""
    reaches = fit(others)
    pairs = [(row, predicted) for row in rows if (predicted := predict(row, reaches)) is not None]
    truth = sum(row.seconds * row.calls for row in rows)
    known = sum(row.seconds * row.calls for row, _ in pairs)
    total = sum(predicted * row.calls for row, predicted in pairs)
    errors = [abs(math.log(predicted / row.seconds)) for row, predicted in pairs]
    return {
        "workload": name,
        "precision": precision,
        "operators": len(rows),
        "measured_seconds": truth,
        "seen_share": known / truth,
        "predicted_seconds": total * truth / known,
        "error": total / known - 1,
        "median_operator_factor": math.exp(statistics.median(errors)),
    }


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each model that was left out, and what each class reaches when all are in."""
    names = list(WORKLOADS)[:4] if quick else list(WORKLOADS)
    rows = {(name, p): measured(WORKLOADS[name], p) for name in names for p in PRECISIONS}
    cases = []
    for (name, precision), own in rows.items():
        others = [row for (other, _), found in rows.items() if other != name for row in found]
        case = left_out(name, precision, own, others)
        print(f"{name:20} {precision:10} {case['error']:+.1%}  operators within x{case['median_operator_factor']:.2f}")
        cases.append(case)
    together = [row for found in rows.values() for row in found]
    errors = sorted(abs(case["error"]) for case in cases)
    summary = {
        "cases": len(cases),
        "median_abs_error": statistics.median(errors),
        "largest_error": errors[-1],
        "median_operator_factor": statistics.median(case["median_operator_factor"] for case in cases),
        "reached": reached(together),
    }
    return cases, summary


def reached(rows: list[Measured]) -> dict[str, dict[str, float]]:
    """Return what the classes reach, fitted to all models, with the middle error of their calls."""
    table = {}
    for kind, reach in sorted(fit(rows).items()):
        own = [row for row in rows if row.kind == kind]
        errors = [abs(math.log(reach.seconds(row.flops, row.nbytes, row.width) / row.seconds)) for row in own]
        table[" ".join(kind)] = {
            "calls": len(own),
            "half_width": round(reach.half_width, 1) if any(row.flops for row in own) else 0.0,
            "gflops": round(reach.flops_per_second / 1e9, 1) if any(row.flops for row in own) else 0.0,
            "gigabytes_per_second": round(reach.bytes_per_second / 1e9, 1),
            "fixed_microseconds": round(reach.fixed_seconds * 1e6, 1),
            "median_factor": round(math.exp(statistics.median(errors)), 2),
        }
    return table


if __name__ == "__main__":
    main("roofline", run, __doc__)
