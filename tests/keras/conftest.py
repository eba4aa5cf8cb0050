"""TensorFlow, where there is one; without it these tests are skipped."""

from __future__ import annotations

import importlib.util
import os

from tests.elsewhere import skipped_without

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"  # or TensorFlow counts no memory of processors without AVX512-VNNI
os.environ["TF_NUM_INTEROP_THREADS"] = "1"  # or operators run in another order each time, and peaks differ

pytest_pycollect_makemodule = skipped_without(
    importlib.util.find_spec("tensorflow") is not None,
    "needs TensorFlow, which has an environment of its own: make test-keras",
)
