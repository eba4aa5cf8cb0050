"""Recomputation for Keras models on TensorFlow, planned for a budget of bytes from measured layers.

mine = memfit.keras.Workload(model, batch, loss_fn)
plan = memfit.keras.plan(mine, budget="200MiB")     # layers measured, solved, applied, measured again
smaller = memfit.keras.apply(plan, model)           # the same layers and weights
smaller = memfit.keras.checkpoint_every(model, 4)   # by hand: every four layers
peak = memfit.keras.measured_peak(lambda: step(smaller))
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
