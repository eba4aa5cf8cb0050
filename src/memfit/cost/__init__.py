"""Seconds and hidden bytes of operators: measured here, or modelled from a device's figures."""
