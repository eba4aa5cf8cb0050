"""A command for each verb. Options are checked before PyTorch is imported; nothing is computed here.

`main` runs a command line, and `stages` shows progress as its commands do. Help, completion and refusals of wrong
options load neither PyTorch nor a workload.
"""

from memfit.cli.app import main
from memfit.cli.output import stages

__all__ = ["main", "stages"]
