"""How threads of PyTorch wait for one another, where memfit owns the process.

GNU OpenMP's threads wait for the next parallel operator by computing, for some milliseconds, and sleep then
(libgomp, "GOMP_SPINCOUNT"). On a machine at rest that is right: a step of many small operators takes longer where they
sleep at once. On a busy one, each wait takes the time of a processor that other programs use.
"""

from __future__ import annotations

import os
import sys

from memfit.hardware.host import is_busy

VARIABLE = "OMP_WAIT_POLICY"
_OTHERS = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def settle() -> None:
    """Have threads that wait sleep at once on a busy machine; call it before PyTorch is imported, which reads it.

    What the user has set in the environment stays.
    """
    is_set = any(name in os.environ for name in (VARIABLE, *_OTHERS))
    if not is_set and "torch" not in sys.modules and is_busy():
        os.environ[VARIABLE] = "PASSIVE"
