"""Jittor: the room behind `memfit.jittor`. Its `doctor` needs neither Jittor nor PyTorch."""
