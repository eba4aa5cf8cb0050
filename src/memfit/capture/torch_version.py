"""The warning of a PyTorch that memfit was not tested with."""

from __future__ import annotations

import functools

from memfit._torch import versions
from memfit.errors import UntestedTorchWarning
from memfit.frames import warn_users


@functools.cache
def warn_if_untested() -> None:
    """Warn at the user's line, once in a process, unless memfit was tested with this PyTorch."""
    if reason := versions.why_untested():
        warn_users(reason, UntestedTorchWarning)
