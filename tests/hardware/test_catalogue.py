"""The catalogue: every entry is right in itself, names are found, and errors in a user's file are named."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.hardware import (
    advice,
    cublas_workspace_bytes,
    find_device,
    known_devices,
    match,
    precisions,
    read,
    read_prices,
    supports,
    user_file,
)
from memfit.ir import Device

SHIPPED = tuple(read(Path(__file__).parents[2] / "src/memfit/hardware/catalogue.toml").values())
WANTED = """t4 v100-16gb v100-32gb rtx-2080-ti rtx-3060 rtx-3090 rtx-4080 rtx-4090 rtx-5090 rtx-a4000
a10 l4 l40s a100-40gb a100-80gb h100 h200 b200 mi250x mi300x""".split()
MINE = """
[mine]
kind = "cuda"
vendor = "nvidia"
description = "a card"
memory_bytes = 8_000_000_000
usable_bytes = 7_500_000_000
cores = 20
capability = [8, 9]
bandwidth_bytes_per_second = 272e9
launch_seconds = 5e-6
vector_flops = { float32 = 15.1e12 }
"""

each_device = pytest.mark.parametrize("device", SHIPPED, ids=lambda device: device.name)


@each_device
def test_every_figure_has_a_source_and_is_such_as_there_are(device: Device) -> None:
    described = {"name", "kind", "vendor", "description", "products", "allocator", "sources"}
    figures = {a for a in Device.__struct_fields__ if a not in described and getattr(device, a) not in (None, {}, 0.0)}
    assert figures <= device.sources.keys() and all(len(source) > 10 for source in device.sources.values())
    assert device.products
    assert 0.89 < device.usable_bytes / device.memory_bytes < 1
    assert 100 * 2**20 < device.context_bytes < 2**30
    assert 2 * 2**20 < device.cache_bytes < device.memory_bytes / 100
    assert device.link_bytes_per_second in (15.754e9, 31.508e9, 63.015e9)
    assert 1e-6 < device.launch_seconds < 2e-5
    expected = 128 * 2**20 if device.name == "mi300x" else cublas_workspace_bytes(device.vendor, device.capability)
    assert device.cublas_workspace_bytes == expected


@each_device
def test_rates_fit_together(device: Device) -> None:
    """Half precision is 2 to 30 times float32, and the roofline's knee is where such devices have theirs."""
    matrix, vector = device.matrix_flops, device.vector_flops
    assert 1.99 <= matrix["float16"] / vector["float32"] <= 31
    assert matrix.get("bfloat16", matrix["float16"]) == matrix["float16"]
    if "tf32" in matrix:
        assert matrix["tf32"] == pytest.approx(matrix["float16"] / 2, rel=0.03)
    if "float8" in matrix:
        assert matrix["float8"] == pytest.approx(2 * matrix["float16"], rel=0.03)
    assert 60 < matrix["float16"] / device.bandwidth_bytes_per_second < 450
    assert vector["float64"] <= vector["float32"] <= vector.get("float16", vector["float32"])
    assert device.float32_accumulation_share == (0.5 if "GeForce" in device.description else None)
    # A multiprocessor does 64 or 128 multiply-adds a clock (CDNA 3: 256), at 1 to 2.7 GHz.
    old = device.vendor == "nvidia" and device.capability in ((7, 0), (7, 5), (8, 0))
    lanes = 64 if old or device.name == "mi250x" else 128
    assert 0.9e9 < vector["float32"] / (2 * device.cores * lanes) < 2.7e9


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [("nvidia", (8, 9), 8_519_680), ("nvidia", (9, 0), 2**25), ("nvidia", (12, 0), 2**25), ("amd", None, 2**25)],
)
def test_workspaces(vendor: str, capability: tuple[int, int] | None, expected: int) -> None:
    assert cublas_workspace_bytes(vendor, capability) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rtx-3090", "rtx-3090"),
        ("RTX 3090", "rtx-3090"),
        ("3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("rtx_2080_ti", "rtx-2080-ti"),
        ("A100 80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A10", "a10"),
        ("l4", "l4"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_names_are_found_however_they_are_written(name: str, expected: str) -> None:
    assert find_device(name).name == expected


def test_a_family_is_not_a_device() -> None:
    with pytest.raises(UsageError, match="'a100' may be any of a100-40gb, a100-80gb"):
        find_device("a100")
    with pytest.raises(UsageError, match="v100-16gb, v100-32gb"):
        find_device("V100")


def test_an_unknown_name_gets_the_closest_and_the_way_to_add_one(own_file: Path) -> None:
    with pytest.raises(UsageError, match=f"closest there are rtx-3090.*{own_file}.*probe-devices"):
        find_device("rtx-3900")


@given(st.text(max_size=20))
def test_any_text_is_found_or_refused(name: str) -> None:
    try:
        assert find_device(name) in known_devices().values()
    except UsageError as e:
        assert "device=" in str(e)


def test_the_users_devices_go_first(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_file.parent.mkdir()
    own_file.write_text(MINE + MINE.replace("[mine]", "[h100]"))
    assert find_device("mine").vector_flops == {"float32": 15.1e12}
    assert find_device("mine").cublas_workspace_bytes == 8_519_680
    assert find_device("h100").description == "a card"
    assert set(WANTED) < known_devices().keys()
    own_file.write_text(MINE + 'products = ["NVIDIA GeForce RTX 3090"]\n')
    assert find_device("rtx-3090").name == "rtx-3090"  # a name goes before the product of an own entry
    monkeypatch.delenv("MEMFIT_DEVICES")
    assert user_file().parts[-2:] == ("memfit", "devices.toml")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("cores = 20", "cores = 0", ("[mine]", "cores")),
        ("cores = 20", "", ("[mine]", "cores")),
        ("cores = 20", 'cores = "20"', ("[mine]", "cores", "int")),
        ("cores = 20", "cores = 20\ncolour = 1", ("[mine]", "colour")),
        ("cores = 20", 'cores = 20\nname = "other"', ("[mine]", "name as the table's")),
        ("272e9", "-272e9", ("[mine]", "bandwidth_bytes_per_second")),
        ("272e9", "nan", ("[mine]", "bandwidth_bytes_per_second")),
        ("272e9", "inf", ("[mine]", "bandwidth_bytes_per_second")),
        ("launch_seconds = 5e-6", "", ("[mine]", "launch_seconds missing")),
        ("float32 = 15.1e12", "float16 = 15.1e12", ("[mine]", "vector_flops.float32 missing")),
        ("float32 = 15.1e12", "fp32 = 15.1e12", ("[mine]", "vector_flops", "fp32", "float32")),
        ("float32 = 15.1e12", "float32 = 0", ("[mine]", "vector_flops.float32")),
        ("capability = [8, 9]", "capability = [8]", ("[mine]", "capability")),
        ("capability = [8, 9]", "", ("[mine]", "capability missing")),
        ("7_500_000_000", "9_500_000_000", ("[mine]", "usable_bytes", "9500000000", "8000000000")),
        ('vendor = "nvidia"', 'vendor = "intel"', ("[mine]", "vendor", "intel")),
        ('vendor = "nvidia"', 'vendor = "cpu"', ("[mine]", "contradict")),
        ("[mine]", "[Mine]", ("[Mine]", "small letters")),
        ("[mine]", "[cuda0]", ("[cuda0]", "not 'cpu' or 'cuda'")),
        ("[mine]", "mine = 3\n[other]", ("[mine]", "a table")),
        ("[mine]", "[mine", ("not valid TOML",)),
        ("cores = 20", "cores = 20\nsources = { core = 'me' }", ("[mine]", "'core'")),
    ],
)
def test_errors_name_file_entry_and_attribute(own_file: Path, before: str, after: str, words: tuple[str, ...]) -> None:
    own_file.parent.mkdir()
    own_file.write_text(MINE.replace(before, after, 1))
    with pytest.raises(UsageError) as caught:
        find_device("h100")
    for word in (str(own_file), *words):
        assert word in str(caught.value)


def test_a_file_that_is_no_text_is_named(own_file: Path) -> None:
    own_file.parent.mkdir()
    own_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="devices.toml"):
        read(own_file)
    with pytest.raises(UsageError, match="configuration"):
        read(own_file.parent)


GIB = 2**30


@pytest.mark.parametrize(
    ("product", "gib", "expected"),
    [
        ("NVIDIA GeForce RTX 3090", 23.7, "rtx-3090"),
        ("GeForce RTX 3090", 23.7, "rtx-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, None),
        ("NVIDIA GeForce RTX 3060", 11.75, "rtx-3060"),
        ("NVIDIA GeForce RTX 3060", 7.8, None),
        ("NVIDIA GeForce RTX 4080 SUPER", 15.6, None),
        ("NVIDIA RTX A4000", 15.6, "rtx-a4000"),
        ("Tesla T4", 14.75, "t4"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.5, None),
        ("AMD Instinct MI250X", 63.98, "mi250x"),
        ("", 80, None),
    ],
)
def test_gpus_are_matched_by_product_and_memory(product: str, gib: float, expected: str | None) -> None:
    found = match(product, int(gib * GIB), SHIPPED)
    assert (found.name if found else None) == expected


def test_looking_up_needs_no_torch() -> None:
    code = (
        "import sys, types; p = types.ModuleType('memfit'); p.__path__ = [{!r}]; sys.modules['memfit'] = p\n"
        "import memfit.hardware.host, memfit.hardware.catalogue\n"
        "assert memfit.hardware.host.find_device('h100').capability == (9, 0)\n"
        "assert 'torch' not in sys.modules"
    ).format(str(Path(__file__).parents[2] / "src" / "memfit"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


KNOWN = known_devices()
OLD = {"t4", "rtx-2080-ti", "v100-16gb", "v100-32gb"}
FLOAT8 = {
    "rtx-4080",
    "rtx-4090",
    "rtx-5090",
    "l4",
    "l40s",
    "h100",
    "h100-pcie",
    "h200",
    "b200",
    "mi300x",
}


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
def test_capability_and_listed_rates_agree(device: Device) -> None:
    assert supports(device, "bfloat16") == ("bfloat16" in device.matrix_flops) == (device.name not in OLD)
    assert supports(device, "tf32") == ("tf32" in device.matrix_flops) == (device.name not in OLD | {"mi250x"})
    assert supports(device, "2:4 sparsity") == (device.name not in OLD | {"mi250x"})
    assert supports(device, "float8") == ("float8" in device.matrix_flops) == (device.name in FLOAT8)


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
def test_precisions_are_those_the_advice_names(device: Device) -> None:
    half = "16-mixed" if device.name in OLD else "bf16-mixed"
    assert precisions(device) == ("32-true", half)
    assert advice(device)[0].startswith(f"Use {half}")
    assert all(sentence.endswith(".") for sentence in advice(device))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("t4", "Turing has no bfloat16 units: .* emulates"),
        ("t4", r"65 TFLOP/s, 8 times plain float32.*no TF32"),
        ("rtx-3090", "35.6 TFLOP/s, no more than plain float32"),
        ("a100-80gb", "156 TFLOP/s, 8 times plain float32"),
        ("mi250x", r"as they are \(47.85 TFLOP/s"),
        ("mi300x", "HIPBLASLT_ALLOW_TF32=1"),
        ("h100", "^((?!HIPBLASLT).)*$"),
    ],
)
def test_advice_is_of_the_device(name: str, said: str) -> None:
    assert re.search(said, " ".join(advice(KNOWN[name])))


def test_a_cpu_is_judged_by_what_was_measured() -> None:
    cpu = Device(
        name="cpu", kind="cpu", vendor="cpu", description="a CPU", memory_bytes=2**34, usable_bytes=2**33, cores=2
    )
    assert "probe-devices" in advice(cpu)[0]
    fast = replace(cpu, matrix_flops={"float32": 1e11, "bfloat16": 4e11})
    slow = replace(cpu, matrix_flops={"float32": 1e11, "bfloat16": 2e10})
    assert "saves memory and time" in advice(fast)[0] and "4.0 times" in advice(fast)[0]
    assert "no time" in advice(slow)[0] and "0.2" in advice(slow)[0]
    assert precisions(slow) == ("32-true", "bf16-mixed")
    assert not any(supports(fast, unit) for unit in ("tf32", "2:4 sparsity", "float8"))


GOOD = '[prices]\na100-80gb = {per_hour = 1.5, currency = "USD", date = 2026-11-01}\n'


def test_prices_are_read_by_the_cards_name(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(GOOD + '"RTX 3090" = {per_hour = 1, currency = "EUR", date = 2026-01-02}\n')
    found = read_prices(path)
    assert list(found) == ["a100-80gb", "rtx-3090"]
    assert found["a100-80gb"].per_hour == 1.5 and found["a100-80gb"].date == datetime.date(2026, 11, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[prices]\nh100 = {per_hour = 2, currency = "USD"}', "missing required field `date`"),
        ('[prices]\nh100 = {per_hour = 2, currency = "USD", date = "today"}', "date"),
        ('[prices]\nh100 = {per_hour = 0, currency = "USD", date = 2026-01-01}', "above 0"),
        ('[prices]\nh100 = {per_hour = nan, currency = "USD", date = 2026-01-01}', "above 0"),
        ('[prices]\nh100 = {per_hour = 2, currency = " ", date = 2026-01-01}', "currency"),
        ('[prices]\nh100 = {per_hour = 2, currency = "USD", date = 2026-01-01, spot = true}', "spot"),
        ("[prices]\nh100 = 2", "price of h100"),
        ('[prices]\nh1000 = {per_hour = 2, currency = "USD", date = 2026-01-01}', "not in the catalogue"),
        ("h100 = 2", r"one table, \[prices\]"),
        ("[prices", "can't read"),
    ],
)
def test_what_is_no_dated_price_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    with pytest.raises(UsageError, match=r"prices\.toml"):
        read_prices(path)
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_prices(path)
