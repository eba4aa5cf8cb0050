"""Inductor: its settings, its choices, and its interface for partitions. Importing this takes seconds."""

from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.virtualized import V

__all__ = [
    "CustomPartitionerFn",
    "InductorChoices",
    "V",
    "compile_fx",
    "functorch_config",
    "get_hash_for_files",
    "inductor_config",
]
