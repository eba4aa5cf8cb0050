"""A byte-level language model of Python's standard library."""

from memfit.recipes import byte_lm
from memfit.workload import Workload


def workload() -> Workload:
    return byte_lm()
