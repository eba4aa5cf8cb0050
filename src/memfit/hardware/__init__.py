"""Devices: the host's memory, the catalogue of GPUs, measurements, and out-of-memory errors."""
