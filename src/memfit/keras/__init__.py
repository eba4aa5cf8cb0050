"""Recomputation for Keras models on TensorFlow, planned for a budget of bytes from measured layers.

mine = memfit.keras.Workload(model, batch, loss_fn)
plan = memfit.keras.plan(mine, budget="200MiB")     # layers measured, solved, applied, measured again
smaller = memfit.keras.apply(plan, model)           # the same layers and weights
smaller = memfit.keras.checkpoint_every(model, 4)   # by hand: every four layers
peak = memfit.keras.measured_peak(lambda: step(smaller))
"""

from memfit.keras.planning import apply, plan
from memfit.keras.profile import measured_peak
from memfit.keras.recompute import checkpoint_every
from memfit.keras.workload import Workload

__all__ = ["Workload", "apply", "checkpoint_every", "measured_peak", "plan"]
