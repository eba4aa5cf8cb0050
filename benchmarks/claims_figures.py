"""The figures of the claims page: for each claim its tables and numbers, and what its words rest on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from memfit.foundations import format_bytes, format_seconds

Case = dict[str, Any]
Cases = Sequence[Case]
Words = dict[str, str]

GIB = 2**30
MIXED = {"a100-80gb": "bf16-mixed", "v100-16gb": "16-mixed", "rtx-3090": "bf16-mixed"}
NETS = {
    "UNet 32": "UNet, 32 channels",
    "UNet 16": "UNet, 16 channels",
    "DynUNet 16": "DynUNet, 16 channels",
    "DynUNet 32": "DynUNet, 32 channels",
}
MODES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16"}


class UnsupportedVerdict(Exception):
    """A verdict of the page does not follow from the figures."""


def require(ground: bool, words: str) -> None:
    """Check what the page's words rest on.

    Raises:
        UnsupportedVerdict: It is not so.
    """
    if not ground:
        raise UnsupportedVerdict(
            f"the figures no longer say that {words}: write the verdict in claims_template.md anew"
        )


def every(cases: Cases, **wanted: Any) -> list[Case]:
    """Return the cases with these values."""
    return [case for case in cases if all(case.get(key) == value for key, value in wanted.items())]


def pick(cases: Cases, **wanted: Any) -> Case:
    """Return the one case with these values.

    Raises:
        LookupError: There is none, or there are several.
    """
    found = every(cases, **wanted)
    if len(found) != 1:
        raise LookupError(f"{len(found)} cases with {wanted}, not 1")
    return found[0]


def saved(before: Case, after: Case, key: str = "peak_bytes") -> float:
    """Return the share that is saved."""
    return 1 - float(after[key]) / float(before[key])


def ratio(before: Case, after: Case, key: str = "step_seconds") -> float:
    """Return how many times as long a step takes."""
    return float(after[key]) / float(before[key])


def growth(cases: Cases, over: str, key: str = "activation_bytes") -> float:
    """Return the exponent with which a figure grows between the last two cases."""
    before, last = cases[-2:]
    return math.log(last[key] / before[key]) / math.log(last[over] / before[over])


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, its figures to the right."""
    marks = "| --- |" + " ---: |" * (len(headings) - 1)
    return "\n".join([f"| {' | '.join(headings)} |", marks, *(f"| {' | '.join(row)} |" for row in rows)])


def percent(share: float) -> str:
    return f"{round(100 * share)} %".replace("-", "−")


def measured_table(what: str, cases: Cases, names: Sequence[str]) -> str:
    """Return predicted beside measured peaks on the CPU; what is saved and the times relative to the first."""
    first, rows = cases[0], []
    for case, name in zip(cases, names, strict=True):
        sizes = [format_bytes(case[key]) for key in ("predicted_peak_bytes", "measured_peak_bytes")]
        relative = saved(first, case, "measured_peak_bytes"), ratio(first, case, "measured_seconds")
        compared = ("", "") if case is first else (percent(relative[0]), f"×{relative[1]:.2f}")
        rows.append((name, *sizes, *compared))
    return table((f"this CPU: {what}", "peak, predicted", "peak, measured", "saved", "time"), rows)


def mixed_precision(cases: Cases) -> Words:
    ours = every(cases, claim="mixed precision")
    here = every(ours, device="cpu")

    def pair(device: str, size: int) -> tuple[Case, Case]:
        both = every(ours, device=device, batch_size=size)
        return pick(both, precision="32-true"), pick(both, precision=MIXED[device])

    sizes = sorted({case["batch_size"] for case in ours if "batch_size" in case})
    shares = {(device, size): saved(*pair(device, size)) for device in MIXED for size in sizes}
    rows = []
    for size in sizes:
        peaks = [format_bytes(case["peak_bytes"]) for case in pair("a100-80gb", size)]
        times = [f"×{ratio(*pair(device, size)):.2f}" for device in MIXED]
        rows.append((str(size), *peaks, percent(shares["a100-80gb", size]), *times))
    share = {size: shares["a100-80gb", size] for size in sizes}
    small = saved(here[0], here[1], "measured_peak_bytes")
    require(all(abs(s - share[size]) < 0.01 for (_, size), s in shares.items()), "all GPUs save the same share")
    require(abs(share[32] - 0.4) < 0.05 and share[1] < 0.2 and share[128] > 0.45, "the share grows from far below 40 %")
    require(small < 0.3, "small images save little")
    return {
        "amp_table": table(("batch", "fp32", "mixed", "saved", "time, A100", "time, V100", "time, RTX 3090"), rows),
        "amp_measured": measured_table("64 × 64 pixels, batch 32", here, ("fp32", "bf16")),
        "amp_1": percent(share[1]),
        "amp_32": percent(share[32]),
        "amp_128": percent(share[128]),
        "amp_state": format_bytes(pair("a100-80gb", 32)[0]["state_bytes"]),
        "amp_here": percent(small),
    }


def checkpointing(cases: Cases) -> Words:
    ours = every(cases, claim="checkpointing")
    here = every(ours, device="cpu")
    rows, pairs = [], {}
    for attention in ("eager", "sdpa"):
        for size in (8, 32):
            both = every(ours, attention=attention, batch_size=size)
            pair = pairs[attention, size] = pick(both, setting="plain"), pick(both, setting="every layer")
            cells = []
            for key in ("activation_bytes", "peak_bytes"):
                cells += [" → ".join(format_bytes(case[key]) for case in pair), percent(saved(*pair, key))]
            rows.append((f"{attention}, batch {size}", *cells, f"×{ratio(*pair):.2f}"))
    plain, lean = pairs["eager", 8]
    fused = pairs["sdpa", 8][0]
    times = [ratio(*pair) for pair in pairs.values()]
    slower = ratio(here[0], here[1], "measured_seconds")
    require(1.2 <= min(times) and max(times) <= 1.33 and 1.2 <= slower <= 1.45, "checkpointing costs about 30 %")
    require(0.6 <= saved(plain, lean) <= 0.75, "the peak falls by 60 to 75 %")
    require(lean["activation_bytes"] < 3 * GIB, "activations fall far below 4 GB")
    require(fused["step_seconds"] <= plain["step_seconds"], "fused attention loses no time")
    return {
        "bert_table": table(("attention", "activations", "saved", "peak", "saved", "time"), rows),
        "bert_measured": measured_table(
            "BERT of 4 layers, 256 wide, 4 × 256 tokens, eager", here, ("plain", "every layer checkpointed")
        ),
        "bert_decimal": f"{plain['activation_bytes'] / 1e9:.1f}",
        "bert_times": f"+{percent(min(times) - 1)} to +{percent(max(times) - 1)}",
        "bert_here": percent(slower - 1),
        "bert_activations": f"{format_bytes(plain['activation_bytes'])} → {format_bytes(lean['activation_bytes'])}",
        "bert_peak": percent(saved(plain, lean)),
        "bert_fused": percent(saved(plain, fused, "activation_bytes")),
    }


def depth_series(cases: Cases, kind: str) -> dict[str, list[Case]]:
    """Return the lines of claim 3: by method, the cases by depth."""
    ours = every(cases, claim="depth", device="a100-80gb", setting=kind)
    return {
        "plain": every(ours, group=0),
        "each checkpointed": every(ours, group=1),
        "√N groups": [case for case in ours if case["group"] == math.isqrt(case["depth"])],
    }


def proven_depth(cases: Cases, kind: str, method: str) -> int:
    """Return the depth up to which the solver proved that no choice of modules has a lower peak than a method."""
    found = every(cases, claim="depth", setting=kind, group="solver")
    ours = {case["depth"]: case["peak_bytes"] for case in depth_series(cases, kind)[method]}
    proven = all(case["status"] == "optimal" and case["peak_bytes"] == ours[case["depth"]] for case in found)
    require(proven, f"{method} are proven the leanest for {kind}")
    return max(int(case["depth"]) for case in found)


def depth(cases: Cases) -> Words:
    series = {kind: depth_series(cases, kind) for kind in ("layers", "blocks")}
    exponents = {kind: {how: growth(found, "depth") for how, found in lines.items()} for kind, lines in series.items()}
    rows = [
        (how, *(f"{exponents[kind][how]:.2f}" for kind in series), *_at_deepest(series, how))
        for how in ("plain", "each checkpointed", "√N groups")
    ]
    deepest = series["blocks"]["plain"][-1]["depth"]
    headings = ("", "exponent, layers", "exponent, blocks", f"layers, N = {deepest}", f"blocks, N = {deepest}")
    at_100 = {
        (kind, how): pick(found, depth=100)["activation_bytes"]
        for kind, lines in series.items()
        for how, found in lines.items()
    }
    each, groups = (series["blocks"][how] for how in ("each checkpointed", "√N groups"))
    input_bytes = (each[-1]["activation_bytes"] - each[-2]["activation_bytes"]) / (
        each[-1]["depth"] - each[-2]["depth"]
    )
    kept = at_100["blocks", "plain"] / 100 / input_bytes
    require(all(0.4 < found["√N groups"] < 0.6 for found in exponents.values()), "√N groups grow with √N")
    require(all(found["plain"] > 0.95 for found in exponents.values()), "the plain step grows with N")
    require(at_100["layers", "plain"] == at_100["layers", "each checkpointed"], "each linear layer saves nothing")
    leaner = all(a["activation_bytes"] <= 1.01 * b["activation_bytes"] for a, b in zip(each, groups, strict=True))
    require(leaner and abs(kept - math.sqrt(deepest)) < 1, "each block is leaner than groups up to the square of kept")
    here = every(cases, claim="depth", device="cpu")
    how = ("plain", "each checkpointed", "8 groups of 8")
    return {
        "depth_table": table(headings, rows),
        "depth_measured_layers": measured_table("64 linear layers, 1024 × 256", every(here, setting="layers"), how),
        "depth_measured_blocks": measured_table(
            "64 blocks, 8 × 128 tokens, 128 wide", every(here, setting="blocks"), how
        ),
        "depth_deepest": str(deepest),
        "depth_proven_layers": str(proven_depth(cases, "layers", "√N groups")),
        "depth_proven_blocks": str(proven_depth(cases, "blocks", "each checkpointed")),
        "depth_kept": f"{kept:.0f}",
        "depth_each": format_bytes(at_100["blocks", "each checkpointed"]),
        "depth_groups": format_bytes(at_100["blocks", "√N groups"]),
    }


def _at_deepest(series: dict[str, dict[str, list[Case]]], how: str) -> Iterator[str]:
    for lines in series.values():
        yield format_bytes(lines[how][-1]["activation_bytes"])


def spacing(cases: Cases) -> Words:
    ours = every(cases, claim="spacing", device="a100-80gb")
    here = every(cases, claim="spacing", device="cpu")
    best = {k: min(every(ours, setting=k), key=lambda c: int(c["activation_bytes"])) for k in ("layers", "blocks")}
    rows = []
    for size in sorted({case["group"] for case in ours}):
        row = [f"K = {size}" if size else "plain"]
        for kind in ("layers", "blocks"):
            found = pick(ours, setting=kind, group=size)
            text = format_bytes(found["activation_bytes"])
            slower = ratio(pick(ours, setting=kind, group=0), found)
            row += [f"**{text}**" if found is best[kind] else text, f"×{slower:.2f}"]
        rows.append(row)
    worse = pick(ours, setting="blocks", group=10)["activation_bytes"] / best["blocks"]["activation_bytes"]
    require(best["layers"]["group"] == 10, "K = 10 is best for linear layers")
    require(1 < best["blocks"]["group"] < 5 and worse > 1.5, "Transformer blocks want a smaller K")
    leanest = min(here, key=lambda c: int(c["measured_peak_bytes"]))
    require(leanest["group"] == 10, "K = 10 is the leanest that was measured")
    names = [f"K = {case['group']}" if case["group"] else "plain" for case in here]
    return {
        "spacing_table": table(("", "100 linear layers", "time", "100 Transformer blocks", "time"), rows),
        "spacing_measured": measured_table("100 linear layers, 1024 × 256", here, names),
        "spacing_best_blocks": str(best["blocks"]["group"]),
        "spacing_worse": f"{worse:.1f}",
    }


def sequence_length(cases: Cases) -> Words:
    ours = every(cases, claim="attention", device="a100-80gb")
    here = every(cases, claim="attention", device="cpu")
    series = {kernel: every(ours, setting=kernel) for kernel in ("math", "efficient", "flash")}
    exponents = {kernel: growth(found, "length") for kernel, found in series.items()}
    measured = {k: growth(every(here, setting=k), "length", "measured_peak_bytes") for k in ("math", "flash")}
    rows = [
        (
            kernel,
            f"{exponents[kernel]:.2f}",
            f"{max(case['length'] for case in found if case['fits'] == 'yes'):,} tokens",
            *(format_seconds(pick(found, length=length)["step_seconds"]) for length in (2048, 8192)),
        )
        for kernel, found in series.items()
    ]
    require(exponents["math"] > 1.85 and max(exponents["flash"], exponents["efficient"]) < 1.05, "O(N²) becomes O(N)")
    require(measured["math"] > 1.7 and measured["flash"] < 1.2, "the CPU's peaks grow so too")
    same = saved(series["efficient"][-1], series["flash"][-1])
    require(abs(same) < 0.01, "the memory-efficient kernel keeps as little")
    last = every(here, length=max(case["length"] for case in here))
    headings = ("kernel", "exponent", "longest tried that fits", "step at 2,048", "step at 8,192")
    return {
        "attention_table": table(headings, rows),
        "attention_measured": measured_table(
            f"2 blocks, 256 wide, fp32, {last[0]['length']:,} tokens", last, [case["setting"] for case in last]
        ),
        "attention_math": f"{exponents['math']:.2f}",
        "attention_flash": f"{exponents['flash']:.2f}",
        "attention_here_math": f"{measured['math']:.2f}",
        "attention_here_flash": f"{measured['flash']:.2f}",
        "attention_2048": percent(saved(pick(series["math"], length=2048), pick(series["flash"], length=2048))),
    }


def mri(cases: Cases) -> Words:
    ours = every(cases, claim="mri", device="rtx-3090")
    here = every(cases, claim="mri", device="cpu")
    settings = ("plain", "lean norms", "checkpointed")
    rows = []
    for net, label in NETS.items():
        for precision, short in PRECISIONS.items():
            steps = [pick(ours, net=net, precision=precision, setting=setting) for setting in settings]
            cells = [format_bytes(step["activation_bytes"]) for step in steps]
            times = [f"×{ratio(steps[0], step):.2f}" for step in steps[1:]]
            rows.append((f"{label}, {short}", *cells, *times, " / ".join(step["fits"] for step in steps)))
    unet, full, half = (every(ours, net=net) for net in ("UNet 32", "DynUNet 32", "DynUNet 16"))
    plain, lean, whole = (pick(unet, precision="32-true", setting=setting) for setting in settings)
    further = saved(whole, pick(unet, precision="bf16-mixed", setting="checkpointed"), "activation_bytes")
    largest = pick(full, precision="32-true", setting="plain")
    less = saved(largest, pick(full, precision="32-true", setting="checkpointed"), "activation_bytes")
    require(abs(plain["activation_bytes"] / GIB - 12) < 1 and plain["fits"] == "yes", "UNet 32 keeps 12 GB, and fits")
    require(whole["activation_bytes"] < 6 * GIB and further > 0.3, "checkpointing and bf16 save as said")
    require(all(case["fits"] == "no" for case in full), "nnU-Net's with 32 channels never fits")
    require({c["precision"] for c in half if c["fits"] != "no"} == {"bf16-mixed"}, "16 channels take bf16")
    require(less < 0.5, "checkpointing stages saves less than half at full resolution")
    headings = ("activations", *settings, "time, lean", "time, checkpointed", "fits, in turn")
    names = [f"{PRECISIONS[case['precision']]}, {case['setting']}" for case in here]
    return {
        "mri_table": table(headings, rows),
        "mri_measured": measured_table("UNet, 16 channels, 128 × 128 × 64", here, names),
        "mri_steps": f"{format_bytes(plain['activation_bytes'])} → {format_bytes(whole['activation_bytes'])}",
        "mri_further": percent(further),
        "mri_lean": percent(saved(plain, lean, "activation_bytes")),
        "mri_full": format_bytes(largest["activation_bytes"]),
    }


def billion(cases: Cases) -> Words:
    ours = every(cases, claim="billion", device="a100-80gb")
    names = {
        ("math", False): "math attention",
        ("flash", False): "flash attention",
        ("flash", True): "flash, checkpointed",
        **{(mode, False): f"flash, {label} over 8" for mode, label in MODES.items()},
        **{(mode, True): f"flash, checkpointed, {label} over 8" for mode, label in MODES.items()},
    }
    rows = []
    for (setting, checkpointed), label in names.items():
        found = pick(ours, setting=setting, checkpointed=checkpointed)
        sizes = [format_bytes(found[key]) for key in ("state_bytes", "activation_bytes", "reserved_bytes")]
        rows.append((label, *sizes, format_seconds(found["step_seconds"]), found["fits"]))
    math_path, flash = (pick(ours, setting=setting, checkpointed=False) for setting in ("math", "flash"))
    lean = pick(ours, setting="flash", checkpointed=True)
    state = {mode: pick(ours, setting=mode, checkpointed=False)["state_bytes"] for mode in MODES}
    divided = {mode: flash["state_bytes"] / nbytes for mode, nbytes in state.items()}
    require(flash["fits"] == math_path["fits"] == "no" and lean["fits"] == "yes", "one GPU needs checkpointing")
    require(1 < divided["zero1"] < divided["zero2"] < divided["zero3"] < 8, "ZeRO divides by less than the ranks")
    require(flash["state_bytes"] < 0.3 * flash["peak_bytes"], "activations decide")
    eager, compiled = (pick(cases, claim="billion", device="cpu", setting=s) for s in ("eager", "compiled"))
    return {
        "billion_table": table(("each GPU", "state", "activations", "reserved", "step", "fits"), rows),
        "billion_flash": percent(saved(math_path, flash)),
        "billion_flash_reserved": format_bytes(flash["reserved_bytes"]),
        "billion_checkpointed": format_bytes(lean["reserved_bytes"]),
        "billion_state_share": percent(flash["state_bytes"] / flash["peak_bytes"]),
        "billion_ddp": format_bytes(state["ddp"] - flash["state_bytes"]),
        **{f"billion_{mode}": f"{by:.1f}" for mode, by in divided.items() if mode != "ddp"},
        "compile_eager": format_bytes(eager["measured_peak_bytes"]),
        "compile_compiled": format_bytes(compiled["measured_peak_bytes"]),
        "compile_time": f"{ratio(eager, compiled, 'measured_seconds'):.2f}",
    }


def square(cases: Cases) -> Words:
    plain = depth_series(cases, "blocks")["plain"]
    shown = [case for case in plain if case["depth"] in (4, 16, 64, 256)]
    rows = [(f"{case['depth']}", format_bytes(case["activation_bytes"])) for case in shown]
    exponent = growth((shown[0], shown[-1]), "depth")
    require(0.95 < exponent < 1.05, "activations grow with the number of layers")
    times = shown[1]["activation_bytes"] / shown[0]["activation_bytes"]
    return {
        "square_table": table(("blocks", "activations"), rows),
        "square_exponent": f"{exponent:.2f}",
        "square_times": f"{times:.1f}",
    }


def four(cases: Cases) -> Words:
    here = every(cases, claim="four")
    rows, found = [], {}
    for kind in ("layers", "blocks"):
        by_group = {
            g: pick(cases, claim="depth", device="a100-80gb", setting=kind, depth=4, group=g) for g in (0, 1, 2)
        }
        for group, name in ((1, "each"), (2, "two groups of two")):
            less, slower = saved(by_group[0], by_group[group], "activation_bytes"), ratio(by_group[0], by_group[group])
            found[kind, group] = less, slower
            rows.append((f"4 {kind}, {name}", percent(less), f"+{percent(slower - 1)}"))
    require(all(1.15 < slower < 1.45 for _, slower in found.values()), "a further forward pass takes about a third")
    require(found["layers", 1][0] < 0.01 and found["blocks", 1][0] > 0.6, "what is saved depends on the layer")
    how = ("plain", "each checkpointed", "two groups of two")
    return {
        "four_table": table(("", "activations saved", "time"), rows),
        "four_measured_layers": measured_table("4 linear layers, 1024 × 256", every(here, setting="layers"), how),
        "four_measured_blocks": measured_table(
            "4 blocks, 8 × 128 tokens, 128 wide", every(here, setting="blocks"), how
        ),
        "four_layers": percent(found["layers", 2][0]),
        "four_blocks": percent(found["blocks", 1][0]),
        "four_time_layers": f"+{percent(found['layers', 2][1] - 1)}",
        "four_time_blocks": f"+{percent(found['blocks', 1][1] - 1)}",
    }


def passes(cases: Cases) -> Words:
    ours = every(cases, claim="passes", device="a100-80gb")
    here = every(cases, claim="passes", device="cpu")
    rows, less = [], {}
    for kind in ("layers", "blocks"):
        found = every(ours, setting=kind)
        for before, after in zip(found, found[1:], strict=False):
            less[kind, after["passes"]] = saved(before, after, "activation_bytes")
        for case in found:
            share = percent(less[kind, case["passes"]]) if case["passes"] else ""
            size, slower = format_bytes(case["activation_bytes"]), f"×{ratio(found[0], case):.2f}"
            rows.append((f"64 {kind}", str(case["passes"]), size, share, slower))
    for kind in ("layers", "blocks"):
        require(less[kind, 1] > 0.7 > less[kind, 2] > less[kind, 3], "each further pass saves less")
    headings = ("chain", "further passes", "activations", "saved by the last pass", "time")
    names = [f"further passes: {case['passes']}" for case in every(here, setting="layers")]
    return {
        "passes_table": table(headings, rows),
        "passes_measured": measured_table("64 linear layers, 1024 × 256", every(here, setting="layers"), names),
        **{f"passes_{kind}_{again}": percent(share) for (kind, again), share in less.items()},
    }


TOP_1 = {
    "ResNet-50": 76.0,
    "ResNet-152": 77.8,
    "EfficientNet-B0": 77.1,
    "EfficientNet-B1": 79.1,
    "EfficientNet-B2": 80.1,
    "EfficientNet-B3": 81.6,
    "EfficientNet-B4": 82.9,
}
"""Top-1 accuracy on ImageNet in percent, as published (Tan and Le 2019, EfficientNet, table 2)."""


def image_nets(cases: Cases) -> Words:
    ours = {case["setting"]: case for case in every(cases, claim="image nets")}
    rows = [
        (net, format_bytes(case["peak_bytes"]), format_seconds(case["step_seconds"]), f"{TOP_1[net]:.1f} %")
        for net, case in ours.items()
    ]
    gains = {}
    for net, other in (("EfficientNet-B0", "ResNet-50"), ("EfficientNet-B2", "ResNet-152")):
        near = ours[net]["peak_bytes"] / ours[other]["peak_bytes"]
        require(0.85 < near < 1.1, f"{net} takes about as much as {other}")
        gains[net] = TOP_1[net] - TOP_1[other]
    require(max(gains.values()) < 3, "equal memory gives a few points")
    require(all(case["activation_bytes"] > 0.9 * case["peak_bytes"] for case in ours.values()), "activations decide")
    return {
        "nets_table": table(("net", "peak, batch 32", "step", "top-1, published"), rows),
        "nets_b0": f"{gains['EfficientNet-B0']:.1f}",
        "nets_b2": f"{gains['EfficientNet-B2']:.1f}",
        "nets_state": percent(1 - saved(ours["ResNet-50"], ours["EfficientNet-B0"], "state_bytes")),
    }


def together(cases: Cases) -> Words:
    ours = every(cases, claim="billion", device="a100-80gb", ranks=1)
    fp32, half, flash = (pick(ours, setting=name, checkpointed=False) for name in ("fp32", "math", "flash"))
    lean = pick(ours, setting="flash", checkpointed=True)
    nets = every(cases, claim="mri", device="rtx-3090", net="UNet 32", setting="plain")
    unet = pick(nets, precision="32-true"), pick(nets, precision="bf16-mixed")
    pairs = {
        "bf16 for fp32": (fp32, half),
        "flash for math attention": (half, flash),
        "every block checkpointed": (flash, lean),
        "UNet of 32 channels, RTX 3090: bf16 for fp32": unet,
    }
    rows = [(how, percent(saved(*pair)), f"×{1 / ratio(*pair):.2f}") for how, pair in pairs.items()]
    eager, compiled = (pick(cases, claim="billion", device="cpu", setting=s) for s in ("eager", "compiled"))
    by_compiling = saved(eager, compiled, "measured_peak_bytes")
    faster = 1 / ratio(eager, compiled, "measured_seconds")
    rows.append(("GPT-2 of 4 layers on this CPU, measured: compiled", percent(by_compiling), f"×{faster:.2f}"))
    speeds = [1 / ratio(*pair) for pair in pairs.values()]
    require(min(speeds) < 1 and speeds[0] > 2.2 and speeds[-1] < 1.5, "no one factor is right")
    return {
        "together_table": table(("", "peak saved", "steps in the same time"), rows),
        "together_all": f"{1 / ratio(fp32, lean):.1f}",
        "together_saved": percent(saved(fp32, lean)),
        "together_bf16": f"{1 / ratio(fp32, half):.1f}",
        "together_unet": f"{1 / ratio(*unet):.1f}",
        "together_flash": percent(saved(half, flash)),
        "together_compile": percent(by_compiling),
    }


def undifferentiable(cases: Cases) -> Words:
    ours = every(cases, claim="undifferentiable")
    require(len(ours) > 6 and all(case["bitwise"] for case in ours), "gradients are the same")
    rows = [(case["setting"], "bitwise equal" if case["bitwise"] else "differ") for case in ours]
    return {"undifferentiable_table": table(("in each member", "gradients"), rows)}


SECTIONS = (
    mixed_precision,
    checkpointing,
    depth,
    spacing,
    sequence_length,
    mri,
    billion,
    square,
    four,
    passes,
    image_nets,
    together,
    undifferentiable,
)
