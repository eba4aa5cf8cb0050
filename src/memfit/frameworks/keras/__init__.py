"""Keras on TensorFlow: the room behind `memfit.keras`."""
