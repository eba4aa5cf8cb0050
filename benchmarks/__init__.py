"""Figures that the docs quote, each by one command: `python -m benchmarks.NAME [--quick] [--json FILE]`."""
