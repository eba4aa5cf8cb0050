"""An accelerator that lives on the CPU: torch's device "acc", for tests of code that is not for the CPU alone.

Its memory is host memory that is counted and limited as a GPU's is; its operators are the CPU's, on the same values.
`load()` adds it to this process for good; `python -m tests.accelerator_device MODULE [ARGUMENT ...]` runs a module
with it. Processes that load it have it as `torch.accelerator.current_accelerator()`.
"""

from tests.accelerator_device.device import is_loaded, library, load

__all__ = ["is_loaded", "library", "load"]
