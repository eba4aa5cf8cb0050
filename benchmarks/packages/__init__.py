"""Training steps of other people's packages, from PyPI as they come."""
