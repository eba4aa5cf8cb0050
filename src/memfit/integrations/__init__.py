"""memfit under trainers of other libraries: they keep the loop, memfit sets precision, microbatch and checkpointing.

Import the one that you use: `memfit.integrations.transformers`, `.lightning` or `.accelerate`.
"""
