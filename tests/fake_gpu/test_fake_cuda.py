"""Steps captured on fake CUDA tensors, in one process for all of these tests (`scenarios.py`)."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.fake_gpu import shim
from tests.covering import some
from tests.fake_gpu import scenarios as scenarios
from tests.fake_gpu.process import answers
from tests.models import BUILDERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shim.has_gpu(), reason="a GPU is here, on which nothing is faked"),
]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Found:
    assert shim.why_not() is None
    mine = [item for item in request.session.items if item.path == request.path]
    asked = {item.get_closest_marker("ci") is not None for item in mine}
    left = {name for name in scenarios.SCENARIOS if (name in scenarios.IN_CI) not in asked}
    return answers("tests.fake_gpu.scenarios", *sorted(left))


def ops(summary: Found, phase: str = "") -> set[str]:
    """The operators of a phase, or of all."""
    phases = [phase] if phase else list(summary["ops"])
    return {name.split(".")[0] for p in phases for name in summary["ops"][p]}


def one(found: Found, name: str) -> Any:
    """What a scenario found; fails if it raised."""
    value = found[name]
    assert not (isinstance(value, dict) and "error" in value), value["where"]
    return value


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("name", some(BUILDERS, scenarios.QUICK))
def test_builders_run_with_all_their_tensors_on_the_gpu(found: Found, name: str, precision: str) -> None:
    summary = one(found, f"{name} {precision}")
    nbytes, parameters = summary["nbytes"], summary["parameters"]
    assert nbytes["parameters"] == nbytes["gradients"] == parameters
    assert summary["device"] == "a100-80gb"
    halves = "_to_copy" in ops(summary, "forward")
    assert halves == (precision == "16-mixed")


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_state_on_the_cpu_is_not_counted(found: Found, precision: str) -> None:
    # AdamW's step counters are on the CPU; SGD's momentum is one copy of the parameters; plain SGD has no state
    for name, copies in (("transformer", 2), ("convnet", 1), ("twice", 0)):
        summary = one(found, f"{name} {precision}")
        assert summary["nbytes"].get("optimizer state", 0) == copies * summary["parameters"]


@pytest.mark.parametrize("name", some(BUILDERS, scenarios.QUICK))
def test_the_optimizers_step_is_not_skipped_under_loss_scaling(found: Found, name: str) -> None:
    with_scaler, without = (ops(one(found, f"{name} {p}"), "optimizer") for p in ("16-mixed", "32-true"))
    assert without <= with_scaler
    assert any(op.startswith("_foreach_") and op.endswith("_") for op in with_scaler)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.ci if name in scenarios.IN_CI else ())
        for name in scenarios.SCENARIOS
        if name.startswith("checkpointing ")
    ],
)
def test_simulated_checkpointing_is_the_applied_one(found: Found, case: str) -> None:
    result = one(found, case)
    assert result["regions"] and result["recomputed"] and result["notices"]
    assert not result["differs"]


def test_simulated_offload_is_the_applied_one(found: Found) -> None:
    arguments, kept = one(found, "offload")
    assert arguments["prefetch"] == ["blocks.1", "norm"] and kept["prefetch"] == ["blocks.1", "head"]
    for result, moved in ((arguments, 1), (kept, 4)):
        assert result["applied"] <= result["simulated"] <= result["applied"] * 1.02
        copies = {name.split(".")[1]: count for name, count in result["ops"].items()}
        assert copies["copy_out"] == copies["copy_in"] and copies["wait"] == 2 * copies["copy_out"]
        assert 2 <= copies["copy_out"] <= 2 * moved and result["waits"] >= 0


@pytest.mark.ci  # as its scenario
def test_plans_keep_optimizer_states_in_the_host_s_memory_where_they_must(found: Found) -> None:
    answer = one(found, "optimizer states planned")
    peaks, seconds, state_bytes = answer["peaks"], answer["seconds"], answer["state_bytes"]
    assert peaks["as-is"] - peaks["offloaded"] > 0.7 * state_bytes
    assert peaks["as-is"] - peaks["adamw-8bit"] > 0.7 * state_bytes
    moved_seconds = 2 * state_bytes / answer["link"]
    more_seconds = seconds["offloaded"] - seconds["as-is"]  # kernels for one parameter at a time are more, too
    assert 0.9 * moved_seconds < more_seconds < 1.5 * moved_seconds
    assert answer["classes"].get("optimizer states in host memory") == "exact"
    assert answer["upper"] <= answer["budget"]


@pytest.mark.ci  # as its scenario
def test_plans_use_the_host_s_memory_where_they_may(found: Found) -> None:
    result = one(found, "offload planned")
    without, using = result["None"], result["1GiB"]
    assert without["fits"] and using["fits"]
    assert not without["offloaded"] and "activation offload" not in without["classes"]
    assert using["offloaded"] and using["classes"]["activation offload"] == "exact"
    assert using["seconds"] < without["seconds"]


@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("AdamW", "_foreach_addcdiv_"),
        ("AdamW fused", "_fused_adamw_"),
        ("AdamW one by one", "addcdiv_"),
        ("AdamW capturable", "_foreach_addcdiv_"),
        ("AdamW tensor rate", "addcdiv_"),
        ("SGD momentum", "_foreach_add_"),
        ("SGD fused", "_fused_sgd_"),
        ("Adafactor", "lerp_"),
        ("RMSprop", "_foreach_addcdiv_"),
        ("ASGD", "_foreach_addcmul_"),
    ],
)
def test_optimizers_take_the_kernels_that_they_take_on_a_gpu(found: Found, name: str, update: str) -> None:
    summary = one(found, f"{name} 32-true")
    assert update in ops(summary, "optimizer")
    assert {"_foreach_norm", "_foreach_mul_"} <= ops(summary, "optimizer")  # clipping
    assert summary["nbytes"]["parameters"] == summary["parameters"]


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "Adafactor"])
def test_optimizers_under_loss_scaling(found: Found, name: str) -> None:
    plain, scaled = (ops(one(found, f"{name} {p}"), "optimizer") for p in ("32-true", "16-mixed"))
    assert plain <= scaled and "_foreach_mul_" in scaled


def test_an_optimizer_that_has_state_keeps_it(found: Found) -> None:
    summary = one(found, "optimizer with state")
    assert "_fused_adamw_" in ops(summary) and summary["nbytes"]["optimizer state"] >= 2 * summary["parameters"]


@pytest.mark.parametrize("name", scenarios.USER_CODE)
def test_code_that_asks_for_a_gpu_runs(found: Found, name: str) -> None:
    summary = one(found, name)
    assert "_foreach_addcdiv_" in ops(summary, "optimizer")


def test_users_own_autocast_and_checkpoints_are_followed(found: Found) -> None:
    assert "_to_copy" in ops(one(found, "casts_by_itself"), "forward")
    assert ops(one(found, "checkpoints_by_itself"), "recompute") >= {"addmm", "relu"}


def test_what_can_not_be_captured_names_the_users_line(found: Found) -> None:
    result = found["has_no_fake_kernel"]
    assert result["error"] == "CaptureError"
    message = result["message"]
    assert "scenarios.py:" in message and "_transform_bias_rescale_qkv" in message and len(message) < 800
    assert "PyTorch can't run this operator without data" in message


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", scenarios.RNNS)
def test_recurrent_layers_take_cudnn(found: Found, name: str, precision: str) -> None:
    summary = one(found, f"{name} {precision}")
    assert "_cudnn_rnn" in ops(summary, "forward") and "_cudnn_rnn_backward" in ops(summary, "backward")
    forward, backward = (
        summary["flops"]["aten._cudnn_rnn.default"],
        summary["flops"]["aten._cudnn_rnn_backward.default"],
    )
    assert backward == 2 * forward > 0
    if name == "LSTM":  # 4 samples of 5 steps; gates of 8 features, from 16 inputs and 8 states
        assert forward == 2 * 20 * 4 * 8 * (16 + 8)


def test_kernels_that_the_cpu_wheel_lacks_are_not_decomposed(found: Found) -> None:
    summary = one(found, "kernels of a GPU")
    assert {"_fused_rms_norm", "silu", "mish"} <= ops(summary, "forward")
    assert {"_fused_rms_norm_backward", "silu_backward", "mish_backward"} <= ops(summary, "backward")


def test_compiled_code_is_captured_without_and_said_so(found: Found) -> None:
    for notes in one(found, "compiled"):
        assert any("torch.compile is not predicted" in note for note in notes)
    assert not one(found, "AdamW 32-true")["notes"]


@pytest.mark.parametrize(
    ("case", "operator"),
    [
        ("a100-80gb", "flash"),
        ("h100", "cudnn"),
        ("mi300x", "flash"),
        ("t4", "efficient"),
        ("float32", "efficient"),
    ],
)
def test_attention_takes_the_devices_kernel(found: Found, case: str, operator: str) -> None:
    summary = one(found, f"attention {case}")
    assert f"_scaled_dot_product_{operator}_attention" in ops(summary, "forward")
    assert f"_scaled_dot_product_{operator}_attention_backward" in ops(summary, "backward")
    assert len(summary["notes"]) == 1 and "attention on" in summary["notes"][0]


def test_masks_leave_flash_and_the_notes_say_why(found: Found) -> None:
    results = one(found, "attention masks")
    for case in ("a100-80gb 32-true", "a100-80gb bf16-mixed"):
        assert "_scaled_dot_product_efficient_attention" in ops(results[case], "forward")
        assert "memory-efficient kernel: not flash since it accepts no mask" in results[case]["notes"][0]
    fused = {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"}
    assert fused & ops(results["h100 bf16-mixed"], "forward")


def test_grouped_queries(found: Found) -> None:
    results = one(found, "grouped queries")
    assert "_scaled_dot_product_flash_attention" in ops(results["a100-80gb"])
    assert "_scaled_dot_product_cudnn_attention" in ops(results["h100"])
    assert "bmm" in ops(results["t4"]) and "the math kernel" in results["t4"]["notes"][0]


def test_padding_decides_transformers_kernel(found: Found) -> None:
    results = one(found, "transformers")
    if results is None:
        pytest.skip("transformers is not installed")
    assert "_scaled_dot_product_flash_attention" in ops(results["full"])
    assert "_scaled_dot_product_efficient_attention" in ops(results["padded"])
    assert "not flash since it accepts no mask" in results["padded"]["notes"][0]


def test_two_microbatches_stand_for_all(found: Found) -> None:
    assert one(found, "microbatches") == {
        "scale": 4,
        "run": 2,
        "inputs": one(found, "transformer 32-true")["nbytes"]["inputs"],
    }


def test_a_batch_takes_what_it_shows(found: Found) -> None:
    assert one(found, "a view of a large storage")["inputs"] == 4 * 16 * 4 + 4 * 8


def test_estimates_hold_together(found: Found) -> None:
    for allocated, reserved, upper in one(found, "estimates").values():
        assert 0 < allocated <= reserved <= upper


def test_a_fake_copy_can_be_copied(found: Found) -> None:
    assert one(found, "fake copies of fake copies") is True
