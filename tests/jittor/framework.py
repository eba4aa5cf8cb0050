"""Jittor, where there is one; tests that import it from here are skipped elsewhere."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("jittor") is None:
    pytest.skip("needs Jittor, which is not in this environment: run make test-jittor", allow_module_level=True)

import memfit.jittor  # noqa: F401  imports Jittor, prepared
import jittor as jt  # noqa: E402, I001

__all__ = ["jt"]
