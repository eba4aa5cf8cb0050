"""The command line."""

from memfit.cli.app import main

__all__ = ["main"]
