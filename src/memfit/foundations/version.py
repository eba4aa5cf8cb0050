"""The version of memfit."""

__version__ = "0.1.0"
