"""Inductor: its settings, its choices, and its interface for partitions. Importing this takes seconds."""

from torch._functorch import config as functorch_config  # noqa: F401 (memfit's door has it, as the next)
from torch._inductor import config as inductor_config  # noqa: F401
from torch._inductor.choices import InductorChoices as InductorChoices
from torch._inductor.compile_fx import compile_fx as compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.custom_graph_pass import get_hash_for_files as get_hash_for_files
from torch._inductor.virtualized import V as V
