"""Levers that save memory, one file a lever."""
