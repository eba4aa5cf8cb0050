"""The engine that recomputes regions in the backward pass."""
