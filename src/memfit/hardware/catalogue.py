"""The catalogue of devices by name, memfit's own and the user's, with advice on them; and the user's prices."""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import platformdirs

from memfit.errors import UsageError
from memfit.ir import CardPrice, Device, Precision, Vendor

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TAKEN = re.compile(r"cpu|(cuda|xpu|mps)\d*")
_KIND = re.compile(r"[a-z]+")
ELSEWHERE = ("cpu", "cuda")
"""Kinds of device that steps are predicted for without having one; entries of other kinds have rates for those here."""
_VENDOR_WORDS = re.compile(r"^(nvidia|amd|geforce|tesla|instinct)+")
_SUGGESTIONS = 4
_EXAMPLE = 'a100-80gb = {per_hour = 1.23, currency = "USD", date = 2026-01-31}'  # of a price


def user_file() -> Path:
    """Return the file of the user's own devices: MEMFIT_DEVICES, or devices.toml in the user's configuration."""
    named = os.environ.get("MEMFIT_DEVICES")
    return Path(named) if named else Path(platformdirs.user_config_dir("memfit")) / "devices.toml"


def known_devices() -> dict[str, Device]:
    """Return all devices by name, the user's before memfit's own. Raise UsageError where the user's are invalid."""
    own = read(user_file())
    return own | {name: device for name, device in _shipped().items() if name not in own}


@functools.cache
def _shipped() -> dict[str, Device]:
    path = Path(__file__).with_name("catalogue.toml")
    return parse(path.read_text(encoding="utf-8"), path.name)


def read(path: Path) -> dict[str, Device]:
    """Return the devices in a file; none if it is missing. Raise UsageError where it has an invalid entry."""
    return parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of a file of devices; empty if it is missing."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"can't read the devices in {path}: {e}") from e


def parse(text: str, source: str) -> dict[str, Device]:
    """Return the devices in TOML, by name: one table for each, with the attributes of `Device`."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise UsageError(f"{source} is not valid TOML: {e}") from e
    return {name: _device(name, table, source) for name, table in tables.items()}


def _device(name: str, table: Any, source: str) -> Device:
    try:
        if not isinstance(table, Mapping) or "name" in table:
            raise ValueError("a device must be a table of attributes, with its name as the table's")
        device = msgspec.convert({**table, "name": name}, Device)
        _check(device)
    except (msgspec.ValidationError, ValueError) as e:
        problem = str(e).replace("`$.", "`").replace("Object", "the entry")
        raise UsageError(f"{source}, entry [{name}]: {problem}") from e
    if "cublas_workspace_bytes" in table or device.kind == "cpu":
        return device
    nbytes = cublas_workspace_bytes(device.vendor, device.capability)
    return msgspec.structs.replace(device, cublas_workspace_bytes=nbytes)


def _check(device: Device) -> None:
    """Raise ValueError where the figures of a device contradict each other."""
    if not _NAME.fullmatch(device.name) or _TAKEN.fullmatch(device.name):
        raise ValueError("a name is words of small letters and digits with '-' between them, and not 'cpu' or 'cuda'")
    if not _KIND.fullmatch(device.kind):
        raise ValueError(
            f"kind is {device.kind!r}: PyTorch's names for kinds of device are small letters, such as 'cuda'"
        )
    if (device.kind == "cpu") != (device.vendor == "cpu"):
        raise ValueError(f"kind {device.kind!r} and vendor {device.vendor!r} contradict each other")
    if device.kind == "cuda" and device.vendor not in ("nvidia", "amd"):
        raise ValueError(f"vendor is {device.vendor!r}: devices of kind 'cuda' are of 'nvidia' or 'amd'")
    if device.usable_bytes > device.memory_bytes:
        raise ValueError(f"usable_bytes is {device.usable_bytes}, more than memory_bytes, {device.memory_bytes}")
    for attribute in ("matrix_flops", "vector_flops"):
        for dtype, rate in getattr(device, attribute).items():
            if dtype not in DTYPES:
                raise ValueError(f"{attribute} has no dtype {dtype!r}: {', '.join(DTYPES)}")
            if not 0 < rate < math.inf:
                raise ValueError(f"{attribute}.{dtype} is {rate}")
    rates = ("bandwidth", "link", "peer", "node")
    for attribute in (*(f"{rate}_bytes_per_second" for rate in rates), "launch_seconds"):
        if not math.isfinite(getattr(device, attribute)):
            raise ValueError(f"{attribute} is {getattr(device, attribute)}")
    for attribute in device.sources:
        if attribute not in Device.__struct_fields__:
            raise ValueError(f"sources has no attribute {attribute!r}")
    if missing := missing_figures(device):
        raise ValueError(f"{', '.join(missing)} missing, which predictions for a GPU need")


def missing_figures(device: Device) -> list[str]:
    """Return the attributes that an entry of the catalogue needs and a device lacks."""
    if device.kind == "cpu":
        return []
    missing = [a for a in ("bandwidth_bytes_per_second", "launch_seconds") if not getattr(device, a)]
    missing += ["vector_flops.float32"] if "float32" not in device.vector_flops else []
    return missing + (["capability"] if device.vendor == "nvidia" and device.capability is None else [])


def cublas_workspace_bytes(vendor: Vendor, capability: tuple[int, int] | None) -> int:
    """Return PyTorch's default workspace of each cuBLAS or hipBLAS handle; 128 MiB on MI300 and later."""
    if vendor == "amd" or (capability is not None and capability[0] >= 9):
        return 32 * 2**20
    return 8_519_680


def look_up(name: str) -> Device:
    """Return a device of the catalogue by its name, in any case, or by its product's ("RTX 3090", "3090")."""
    devices = known_devices()
    wanted = _squash(name)
    for is_product in (False, True):  # a name goes before another entry's product
        for device in devices.values():
            names = device.products if is_product else (device.name, device.name.removeprefix("rtx-"))
            if wanted in map(_squash, names):
                return device
    # Names begin at their hyphens too: "a100" is of "a100-40gb".
    family = [n for n in devices if wanted in {n[: at.start()].replace("-", "") for at in re.finditer("-", n)}]
    if len(family) == 1:
        return devices[family[0]]
    if family:
        raise UsageError(f"device={name!r} may be any of {', '.join(family)}: give one of these names")
    by_squashed = {_squash(entry): entry for entry in devices}
    closest = difflib.get_close_matches(wanted, by_squashed, n=_SUGGESTIONS, cutoff=0.5)
    near = f"; the closest there are {', '.join(by_squashed[each] for each in closest)}" if closest else ""
    raise UsageError(
        f"device={name!r} is not in the catalogue{near}. `memfit devices` lists the catalogue. To add a device, write a"
        f" table of its figures to {user_file()} (see docs/reference/devices.md), or run `memfit tools probe-devices`"
        " on a machine that has it"
    )


def _squash(name: str) -> str:
    """Return a name without vendor, case and punctuation."""
    return _VENDOR_WORDS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


def match(product: str, memory_bytes: int, known: Iterable[Device], kind: str = "cuda") -> Device | None:
    """Return the first known entry for an accelerator of this machine, by its name in PyTorch, or None.

    Its total memory in PyTorch distinguishes cards of the same name.
    """
    for device in known:
        fits = 0.9 * device.memory_bytes < memory_bytes < 1.05 * device.memory_bytes
        if device.kind == kind and fits and _squash(product) in map(_squash, device.products):
            return device
    return None


def read_prices(path: str | Path) -> dict[str, CardPrice]:
    """Return the prices in a TOML file, every entry with its date, by the card's name in the catalogue.

    Raises:
        UsageError: The file can't be read, or an entry has no card of the catalogue, no price above 0, no currency or
            no date.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UsageError(f"can't read the prices in {path}: {e}") from e
    entries = tables.get("prices")
    if not isinstance(entries, dict) or set(tables) != {"prices"}:
        raise UsageError(f"{path} needs one table, [prices], with an entry a card: {_EXAMPLE}")
    found: dict[str, CardPrice] = {}
    for name, entry in entries.items():
        card, of = look_up(name).name, f"{path}, price of {name}"
        try:
            price = found[card] = msgspec.convert(entry, CardPrice)
        except msgspec.ValidationError as e:
            raise UsageError(f"{of}: {e}. An entry has per_hour, currency and date: {_EXAMPLE}") from e
        if not (math.isfinite(price.per_hour) and price.per_hour > 0) or not price.currency.strip():
            raise UsageError(
                f"{of}: per_hour is {price.per_hour} and currency {price.currency!r}: give a price above 0 in a"
                f" currency: {_EXAMPLE}"
            )
    return found


_ARCHITECTURES = {(7, 0): "Volta", (7, 2): "Volta", (7, 5): "Turing"}


_SINCE = {"bfloat16": (8, 0), "tf32": (8, 0), "2:4 sparsity": (8, 0), "float8": (8, 9)}
"""The compute capability that brought a unit to NVIDIA's: Ampere's, or Ada's."""


def supports(device: Device, unit: Literal["bfloat16", "tf32", "2:4 sparsity", "float8"]) -> bool:
    """Tell whether a device multiplies in a unit: by compute capability on NVIDIA, by its listed rate on AMD.

    CDNA 3 brought 2:4 sparsity together with float8. A CPU multiplies bfloat16, at whatever rate.
    """
    if device.vendor == "nvidia":
        return device.capability is not None and device.capability >= _SINCE[unit]
    rate = "float8" if unit == "2:4 sparsity" else unit
    return (device.vendor == "amd" and rate in device.matrix_flops) or (device.kind, unit) == ("cpu", "bfloat16")


def precisions(device: Device) -> tuple[Precision, ...]:
    """Return the useful precisions of a device: 16-mixed only without bfloat16."""
    return ("32-true", "bf16-mixed") if supports(device, "bfloat16") else ("32-true", "16-mixed")


def advice(device: Device) -> list[str]:
    """Return advice on a device, in sentences."""
    if device.kind == "cpu":
        fast, plain = device.matrix_flops.get("bfloat16"), device.matrix_flops.get("float32")
        if not fast or not plain:
            return ["The speed of bfloat16 here is unknown: `memfit tools probe-devices` measures it."]
        ratio = fast / plain
        if ratio > 1:
            return [
                f"bf16-mixed saves memory and time: bfloat16 products ran {ratio:.1f} times as fast as float32 ones."
            ]
        return [f"bf16-mixed saves memory but no time: bfloat16 products ran at {ratio:.2g} of float32's rate."]
    if device.kind != "cuda":  # of whose units nothing is known here
        return []
    if supports(device, "bfloat16"):
        found = [f"Use bf16-mixed{_speed(device, 'bfloat16')}; it needs no loss scaling, as 16-mixed does."]
    else:
        architecture = _ARCHITECTURES.get(device.capability or (0, 0), "It")
        found = [
            f"Use 16-mixed, which scales the loss{_speed(device, 'float16')}. {architecture} has no bfloat16 units:"
            " torch.cuda.is_bf16_supported() says yes because PyTorch emulates them, slowly."
        ]
    if supports(device, "tf32"):
        needs = ", if HIPBLASLT_ALLOW_TF32=1 is set" if device.vendor == "amd" else ""
        found.append(
            f"torch.set_float32_matmul_precision('high') runs float32 products as TF32{_speed(device, 'tf32')},"
            f" with 10 bits of mantissa{needs}."
        )
    elif "float32" in device.matrix_flops:
        found.append(f"It has no TF32; float32 products run on matrix units as they are{_speed(device, 'float32')}.")
    else:
        found.append("It has no TF32: float32 products run without matrix units.")
    if supports(device, "2:4 sparsity"):
        found.append(
            "2:4 sparsity (torch.sparse.to_sparse_semi_structured) can double the rate of products; it prunes the"
            " model."
        )
    if supports(device, "float8"):
        rate = _speed(device, "float8")
        found.append(f"It has float8 products (levers.float8){rate}; they change the numbers the most.")
    return found


def _speed(device: Device, dtype: str) -> str:
    fast, plain = device.matrix_flops.get(dtype), device.vector_flops.get("float32")
    if not fast or not plain:
        return ""
    times = f"{fast / plain:.2g} times plain float32" if fast > 1.05 * plain else "no more than plain float32"
    return f" ({fast / 1e12:.4g} TFLOP/s, {times})"
