"""Integrations with other trainers: they keep the loop, memfit sets precision, microbatch size and checkpointing.

Import the one that you use: `memfit.integrations.transformers`, `.lightning` or `.accelerate`.
"""
