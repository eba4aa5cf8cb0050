"""Inductor: its settings, its choices, and its interface for partitions. Importing this takes seconds."""

from torch._functorch import config as _functorch_config
from torch._inductor import config as _inductor_config
from torch._inductor.choices import InductorChoices as InductorChoices
from torch._inductor.compile_fx import compile_fx as compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.custom_graph_pass import get_hash_for_files as get_hash_for_files
from torch._inductor.virtualized import V as V

functorch_config, inductor_config = _functorch_config, _inductor_config
