"""Recomputation for Keras models on TensorFlow, by `tf.recompute_grad` without its traps.

smaller = memfit.keras.checkpoint_every(model, 4)   # the same layers and weights
before, after = (memfit.keras.measured_peak(lambda: step(m)) for m in (model, smaller))
"""

from memfit.keras.recompute import checkpoint_every, measured_peak

__all__ = ["checkpoint_every", "measured_peak"]
