"""A command for each verb. Options are checked before PyTorch is imported; nothing is computed here.

`main` runs a command line. Help, completion and refusals of wrong options load neither PyTorch nor a workload.
"""

from memfit.cli.app import main

__all__ = ["main"]
