"""Jittor, prepared before a test imports it; without it these tests are skipped."""

from __future__ import annotations

import importlib.util

from tests.elsewhere import skipped_without

HAS_JITTOR = importlib.util.find_spec("jittor") is not None
if HAS_JITTOR:
    import memfit.jittor  # noqa: F401

pytest_pycollect_makemodule = skipped_without(
    HAS_JITTOR, "needs Jittor, which has an environment of its own: make test-jittor"
)
