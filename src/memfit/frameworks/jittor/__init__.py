"""Jittor: the room behind `memfit.jittor`. Its `doctor` needs neither Jittor nor PyTorch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
