"""How long scripts take until they train under `memfit run`: the first start, and the second."""
