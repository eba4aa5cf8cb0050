"""Sharding on paper: what one rank of many holds."""
