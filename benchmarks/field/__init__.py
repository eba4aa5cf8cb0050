"""Training scripts as people write them, run by `memfit run`, and each of their steps measured from outside memfit."""
