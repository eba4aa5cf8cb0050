"""Runs a GPU's program without a GPU: fake CUDA tensors that take the operators of a GPU."""
