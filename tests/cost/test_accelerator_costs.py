"""Times on paper: limits, monotony, and what eager mode cannot go below."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.cost import STEP_ERROR, OperatorCall, code_seconds, figures, kernels_of, roofline
from memfit.errors import UsageError
from memfit.hardware import known_devices
from memfit.ir import OPERATORS, Device, Trace, Work, kernel_text, simulate, throughput
from tests.gpus import AMPERE
from tests.ir.test_throughputs import call, tensor
from tests.models import plain_trace

MM, ADD, VIEW = "aten.mm.default", "aten.add.Tensor", "aten.view.default"
NOTHING = '{"op":"x","args":[]}'


def product(n: int, dtype: str = "bfloat16") -> Work:
    item = 2 if dtype == "bfloat16" else 4
    return Work(2 * n**3, 2 * n * n * item, n * n * item, dtype, True)


def add(nbytes: int) -> Work:
    return Work(0, 2 * nbytes, nbytes, "float32", True)


def seconds(name: str, work: Work, device: Any = AMPERE, **options: Any) -> float:
    return OperatorCall(name, NOTHING, work, device, **options).kernel_seconds


def given_seconds(name: str, args: list[Any], work: Work) -> float:
    return OperatorCall(name, json.dumps({"op": name, "args": args}), work, AMPERE).kernel_seconds


def test_a_huge_product_reaches_the_stated_share_of_its_peak() -> None:
    for dtype, peak, kind in (("bfloat16", 300e12, "matrix"), ("float32", 20e12, "vector")):
        reached = 2 * 16384**3 / seconds(MM, product(16384, dtype)) / peak
        stated = figures()["matrix products"][kind]
        assert 0.98 * stated < reached <= stated


def test_the_figure_measured_elsewhere_is_met() -> None:
    """An 8192-cubed bf16 product on an H200 ran at 770 to 800 TFLOP/s, a copy at 4.3 TB/s."""
    h200 = replace(
        AMPERE, cores=132, bandwidth_bytes_per_second=4.8e12, matrix_flops={"bfloat16": 989e12}, capability=(9, 0)
    )
    assert 770e12 <= 2 * 8192**3 / seconds(MM, product(8192), h200) <= 800e12
    copied = Work(0, 2**33, 2**33, "float32", True)
    assert 2**34 / seconds("aten.clone.default", copied, h200) == pytest.approx(4.3e12, rel=0.06)


def test_small_products_reach_less_and_take_no_less_than_a_kernel() -> None:
    shares = [2 * n**3 / seconds(MM, product(n)) / 300e12 for n in (64, 512, 1024, 2048, 8192)]
    assert shares == sorted(shares) and shares[0] < 0.01 and shares[-1] > 0.7
    assert seconds(MM, product(1)) >= figures()["device"]["kernel_seconds"]


def test_tf32_is_for_convolutions_and_for_who_asks() -> None:
    strict, allowed = seconds(MM, product(8192, "float32")), seconds(MM, product(8192, "float32"), matmul="high")
    assert strict / allowed == pytest.approx(150e12 * 0.80 / (20e12 * 0.85), rel=0.02)


def test_a_large_sum_is_bound_by_traffic_and_what_fits_the_cache_moves_faster() -> None:
    stated = figures()["elementwise"]["traffic"] * AMPERE.bandwidth_bytes_per_second
    assert 3 * 2**30 / seconds(ADD, add(2**30)) == pytest.approx(stated, rel=0.01)
    assert seconds(ADD, add(2**23)) < 2**23 * 3 / (0.88 * AMPERE.bandwidth_bytes_per_second)  # what fits the cache


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "cudnn_attention"])
@pytest.mark.parametrize("backward", [False, True])
def test_causal_attention_takes_about_half_the_time(name: str, backward: bool) -> None:
    whole = f"aten._scaled_dot_product_{name}{'_backward' if backward else ''}.default"
    first = [tensor(4, 16, 8192, 64)] * (4 if backward else 3)
    work = Work(0, 4 * 2**26, 2**26, "bfloat16", True)
    times = [OperatorCall(whole, call(whole, first, causal), work, AMPERE).kernel_seconds for causal in (False, True)]
    assert times[1] / times[0] == pytest.approx(0.5, abs=0.02)


def test_flash_reaches_less_of_hopper_and_backward_less_than_forward() -> None:
    hopper = replace(AMPERE, capability=(9, 0))
    forward = "aten._scaled_dot_product_flash_attention.default"
    text = call(forward, [tensor(4, 16, 8192, 64)] * 3, False)
    work = Work(0, 1, 1, "bfloat16", True)
    calls = [OperatorCall(forward, text, work, device) for device in (AMPERE, hopper)]
    assert [each.flops / each.kernel_seconds / 300e12 for each in calls] == pytest.approx([0.60, 0.35], rel=0.01)


def test_depthwise_convolutions_use_no_matrix_units() -> None:
    name = "aten.convolution.default"
    spatial = [{"l": [1, 1]}, {"l": [1, 1]}, {"l": [1, 1]}, False, {"l": [0, 0]}]
    work = Work(10**12, 2**20, 2**20, "bfloat16", True)
    times = []
    for channels, groups in ((64, 1), (1, 64)):
        args = [tensor(8, 64, 32, 32), tensor(64, channels, 3, 3), None, *spatial, groups]
        times.append(given_seconds(name, args, work))
    assert times[1] > 5 * times[0]


def test_products_in_float8_run_at_their_own_rate_whatever_their_scales() -> None:
    """Scales are no factors, and a card without such units has no rate for them but plain float32's."""
    n, name = 2**13, "aten._scaled_mm.default"
    scale = {"t": ["float32", [], []]}
    args = [tensor(n, n, dtype="float8_e5m2"), tensor(n, n, dtype="float8_e4m3fn"), scale, scale]
    work = Work(2 * n**3, 2 * n**2, 2 * n**2, "float8", True)
    device = replace(AMPERE, matrix_flops={**AMPERE.matrix_flops, "float8": 600e12})

    def call_on(device: Device) -> OperatorCall:
        return OperatorCall(name, json.dumps({"op": name, "args": args}), work, device)

    assert call_on(device).narrowest_dimension == n
    assert 2 * n**3 / call_on(device).kernel_seconds == pytest.approx(0.65 * 600e12, rel=0.03)
    assert 2 * n**3 / call_on(AMPERE).kernel_seconds == pytest.approx(0.85 * 20e12, rel=0.03)


def test_narrow_products_reach_less() -> None:
    """The same work: square, and with 16 columns, where half of the rate is reached."""

    def rate(m: int, n: int, k: int) -> float:
        text = json.dumps({"op": MM, "args": [tensor(m, k), tensor(k, n)]})
        work = Work(2 * m * n * k, 2 * (m * k + k * n), 2 * m * n, "bfloat16", True)
        device = replace(AMPERE, bandwidth_bytes_per_second=1e15)  # so that traffic plays no part
        return 2 * m * n * k / OperatorCall(MM, text, work, device).kernel_seconds

    def narrowest(name: str, *args: Any) -> float:
        return OperatorCall(name, json.dumps({"op": name, "args": args}), product(1), AMPERE).narrowest_dimension

    assert rate(2**19, 16, 2**16) / rate(2**13, 2**13, 2**13) == pytest.approx(0.5, rel=0.05)
    assert narrowest(MM, tensor(7, 9), tensor(9, 8)) == 7
    assert narrowest(ADD, tensor(7, 9), tensor(7, 9)) == float("inf")
    args = [tensor(1, 8, 9, 9), tensor(1, 3, 9, 9), tensor(8, 3, 3, 3)]
    assert narrowest("aten.convolution_backward.default", *args) == 3


HALVED = replace(AMPERE, float32_accumulation_share=0.5)


@pytest.mark.parametrize(
    ("name", "args", "reached"),
    [
        (MM, [tensor(4096, 4096), tensor(4096, 4096)], 0.95),  # 0.8 of the full rate is more than there is
        ("aten.convolution.default", [tensor(64, 64, 32, 32), tensor(64, 64, 3, 3)], 0.95),
        (
            "aten.convolution.default",
            [tensor(8, 64, 32, 32, dtype="float32"), tensor(64, 64, 3, 3, dtype="float32")],
            0.6,
        ),
    ],
)
def test_kernels_reach_as_much_of_the_full_rate_where_a_card_halves_it(
    name: str, args: list[Any], reached: float
) -> None:
    dtype = args[0]["t"][0]
    work, text = Work(10**12, 2**20, 2**20, dtype, True), json.dumps({"op": name, "args": args})
    peak = AMPERE.matrix_flops["tf32" if dtype == "float32" else dtype]
    halved, whole = (OperatorCall(name, text, work, card).attained_rates.flops_per_second for card in (HALVED, AMPERE))
    assert halved == pytest.approx(reached * peak) and whole < reached * peak


@pytest.mark.parametrize("left", [0.3, 0.5, 0.9, 1.0])
def test_a_halved_rate_is_never_a_reason_to_reach_less_of_it(left: float) -> None:
    work, text = Work(10**12, 2**20, 2**20, "bfloat16", True), json.dumps({"op": MM, "args": [tensor(512, 512)] * 2})
    device = replace(AMPERE, float32_accumulation_share=left)
    plain, found = (OperatorCall(MM, text, work, card).attained_rates.flops_per_second for card in (AMPERE, device))
    assert plain <= found <= AMPERE.matrix_flops["bfloat16"]


def test_convolutions_that_are_not_channels_last_are_copied_first() -> None:
    name, work = "aten.convolution.default", Work(10**9, 2**26, 2**26, "bfloat16", True)
    x, last = tensor(64, 64, 64, 64), tensor(64, 64, 64, 64)
    last["t"][2] = [64 * 64 * 64, 1, 64 * 64, 64]
    times = [given_seconds(name, [t, tensor(64, 64, 3, 3)], work) for t in (last, x)]
    nbytes = 2 * (64 * 64 * 64 * 64 * 2 + 64 * 64 * 9 * 2 + 2**26)
    assert times[1] - times[0] == pytest.approx(nbytes / (0.85 * AMPERE.bandwidth_bytes_per_second))


works = st.builds(
    Work,
    st.integers(0, 10**14),
    st.integers(0, 10**10),
    st.integers(0, 10**10),
    st.sampled_from(["float32", "bfloat16"]),
    st.just(True),
)
names = st.sampled_from([MM, ADD, "aten.convolution.default", "aten.native_layer_norm.default", "aten.sum.default"])


@given(names, works, st.integers(0, 10**13), st.integers(0, 10**10))
def test_more_work_is_never_faster(name: str, work: Work, flops: int, nbytes: int) -> None:
    before = seconds(name, work)
    assert seconds(name, replace(work, read_bytes=work.read_bytes + nbytes)) >= before
    if name not in (MM, "aten.convolution.default"):
        assert seconds(name, replace(work, write_bytes=work.write_bytes + nbytes)) >= before
    if work.flops:  # a product of the same output that is deeper
        assert seconds(name, replace(work, flops=work.flops + flops)) >= before


@given(names, works, st.floats(1, 10), st.sampled_from(["flops", "bandwidth", "cache", "launch"]))
def test_a_better_device_is_never_slower(name: str, work: Work, factor: float, what: str) -> None:
    better = {
        "flops": {
            "matrix_flops": {k: v * factor for k, v in AMPERE.matrix_flops.items()},
            "vector_flops": {k: v * factor for k, v in AMPERE.vector_flops.items()},
        },
        "bandwidth": {"bandwidth_bytes_per_second": AMPERE.bandwidth_bytes_per_second * factor},
        "cache": {"cache_bytes": int(AMPERE.cache_bytes * factor)},
        "launch": {"launch_seconds": AMPERE.launch_seconds / factor},
    }
    device = replace(AMPERE, **better[what])  # type: ignore[arg-type]
    assert seconds(name, work, device) <= seconds(name, work) * (1 + 1e-12)


def test_tiny_operators_cost_the_launch_floor_and_views_less() -> None:
    trace = plain_trace("twice")
    table = roofline([trace], AMPERE)
    for op in trace.ops:
        cost = table.of(trace.signatures[op.signature])
        runs_kernel = OperatorCall(op.name, "", trace.works[op.signature], AMPERE).runs_kernel
        floor = AMPERE.launch_seconds * (1 if runs_kernel else figures()["device"]["view_share"])
        assert cost.seconds >= floor and not cost.measured
    tiny = [trace.signatures[o.signature] for o in trace.ops if o.name == ADD]
    assert tiny and all(table.seconds_of(s) == AMPERE.launch_seconds for s in tiny)


def test_every_call_has_a_cost_and_the_simulator_takes_the_table() -> None:
    trace = plain_trace("transformer")
    table = roofline([trace], AMPERE)
    assert table.ops.keys() == {trace.signatures[o.signature] for o in trace.ops}
    assert (table.device, table.step_error) == ("ampere", STEP_ERROR)
    assert table.resident_workspace_bytes == 2 * 8_519_680
    timeline = simulate(trace, table)
    assert timeline.step_seconds == pytest.approx(
        sum(table.seconds_of(trace.signatures[o.signature]) for o in trace.ops)
    )


def test_adding_up_costs_at_least_what_the_stream_takes() -> None:
    """For a small step, bound by the host, both agree; nothing that adds can be less by more than one launch.

    The host issues a kernel every `launch_seconds` and never waits. Long kernels hide the dispatch of later ones, which
    `CostTable` does not subtract, since plans need costs that add.
    """
    trace = plain_trace("transformer")
    table = roofline([trace], AMPERE)
    calls = [OperatorCall(o.name, trace.signatures[o.signature], trace.works[o.signature], AMPERE) for o in trace.ops]
    kernels = [each for each in calls if each.runs_kernel]
    issued = stream = 0.0
    for each in kernels:
        issued += AMPERE.launch_seconds
        stream = max(stream, issued) + each.kernel_seconds
    added = sum(table.seconds_of(each.signature) for each in kernels)
    assert stream - AMPERE.launch_seconds <= added == pytest.approx(stream, rel=0.05)


def test_wider_errors_where_cudnn_chooses() -> None:
    plain, convolved = (roofline([plain_trace(n)], AMPERE).peak_error for n in ("transformer", "convnet"))
    assert plain < convolved


@pytest.mark.parametrize(
    "missing", [{"bandwidth_bytes_per_second": 0.0}, {"vector_flops": {"float16": 1.0}}, {"cores": 0}]
)
def test_a_device_without_figures_is_refused_by_name(missing: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(missing))):
        roofline([plain_trace("twice")], replace(AMPERE, **missing))


GPUS = {name: device for name, device in known_devices().items() if device.kind == "cuda"}


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_catalogue_has_times(name: str) -> None:
    trace = plain_trace("transformer", "bf16-mixed")
    table = roofline([trace], GPUS[name])
    assert all(0 < cost.seconds < 1 for cost in table.ops.values())
    speed = throughput(trace, table, GPUS[name])
    assert speed.model_utilisation is not None and 0 < speed.model_utilisation < 1


def test_every_class_has_figures_with_a_source() -> None:
    table = figures()
    assert {name for name in OPERATORS if name != "views"} | {"other", "optimizer", "attention", "device"} == set(table)
    for name, own in table.items():
        if name == "device":
            assert all(f"{key}_source" in own for key in own if not key.endswith("_source"))
            continue
        parts = [own, *(v for v in own.values() if isinstance(v, dict))]
        assert all(part["source"] for part in parts)
        shares = [v for part in parts for v in part.values() if isinstance(v, float)]
        assert shares and all(0 < v < 1 for v in shares)


def test_it_needs_no_torch() -> None:
    source = Path(__file__).parents[2] / "src" / "memfit"
    program = (
        "import sys, types; p = types.ModuleType('memfit')\n"
        f"p.__path__ = [{str(source)!r}]; sys.modules['memfit'] = p\n"
        "import memfit.ir.costs\n"
        "from memfit.cost.operator_call import figures\n"
        "assert figures() and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_softmax_reads_long_rows_three_times_once_the_cache_does_not_hold_them() -> None:
    work = Work(0, 2**30, 2**30, "float32", True)
    args = [[tensor(2**28 // length, length, dtype="float32"), -1, False] for length in (1024, 4096, 2**17)]
    short, longer, longest = (given_seconds("aten._log_softmax.default", given, work) for given in args)
    assert short == longer and longest / longer == pytest.approx(2, rel=0.01)  # 4 passes instead of 2


def test_one_block_of_32_threads_reduces_the_loss_of_all_targets() -> None:
    """Liger-Kernel's cross entropy on an A100: 16,384 tokens of 4,096 classes take 0.7 ms more than their traffic."""
    name, work = "aten.nll_loss_forward.default", Work(0, 2**20, 8, "float32", True)
    seconds = []
    for reduction in (1, 0):
        args = [tensor(16384, 4096, dtype="float32"), tensor(16384, dtype="int64"), None, reduction, -100]
        seconds.append(given_seconds(name, args, work))
    assert seconds[0] - seconds[1] == pytest.approx(512 * 7e-7)


def test_products_of_rows_that_begin_anywhere_are_slower() -> None:
    """A vocabulary of 50,257 beside one of 50,304."""

    def seconds(n: int) -> float:
        args = [tensor(8192, 768), tensor(768, n)]
        return given_seconds(MM, args, Work(2 * 8192 * 768 * n, 2**24, 2**20, "bfloat16", True))

    assert 1.5 < seconds(50257) / seconds(50304) < 2.5


def with_kernels(count: int) -> Trace:
    trace = plain_trace("transformer")
    fused = [kernel_text((text,), number) for number, text in enumerate(trace.signatures[:count])]
    return replace(trace, signatures=[*trace.signatures, *fused])


def test_more_kernels_and_operators_take_longer_and_more_processes_less() -> None:
    few, many = with_kernels(2), with_kernels(12)
    assert [kernels_of(trace) for trace in (plain_trace("transformer"), few, many)] == [0, 2, 12]
    assert code_seconds(few, 1) < code_seconds(many, 1) < code_seconds(replace(many, ops=many.ops * 2), 1)
    assert code_seconds(many, 1) - code_seconds(many, 2) > code_seconds(few, 1) - code_seconds(few, 2) > 0
