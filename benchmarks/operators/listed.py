"""Differences between fake operators and real ones that are known, with their reasons."""

from __future__ import annotations

_SIZES = ("shape", "stride", "nbytes", "DynamicOutputShapeException")
_LISTED: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(
        ("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default"),
        (("stride",), "dimensions of equal strides, as expanded ones, are sorted by an unstable sort"),
    ),
    **dict.fromkeys(
        (
            *("aten.nonzero.default", "aten._unique2.default", "aten.unique_consecutive.default"),
            *("aten.unique_dim.default", "aten.masked_select.default"),
            *("aten._ctc_loss.Tensor", "aten._ctc_loss.default"),
        ),
        (_SIZES, "the shape depends on values: they are logged where data are there, else the largest is taken"),
    ),
}
_PEAKS = {
    **dict.fromkeys(
        ("nn.functional.local_response_norm", "nn.functional.multilabel_soft_margin_loss"),
        "a number that is saved for the backward pass is a tensor of 8 bytes, which no dispatch mode sees",
    ),
    "nn.functional.ctc_loss": "lengths of targets are values: the largest are taken",
    "linalg.eig": "of empty matrices: a few bytes that no dispatch mode sees",
    "ormqr": "its formula joins a list of gradients under a dispatch mode, and writes into one tensor without",
}


def listed_peak(operator: str) -> str:
    """Return the reason for which an operator's predicted peak is known to differ; "" where none is."""
    return _PEAKS.get(operator, "")


def listed(operator: str, said: str) -> str:
    """Return the reason for a known difference; "" for an unknown one."""
    parts, reason = _LISTED.get(operator, ((), ""))
    return reason if any(part in said for part in parts) else ""
