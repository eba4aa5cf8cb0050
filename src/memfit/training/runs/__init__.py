"""A run on disk: its folder, lock, checkpoints, state and log."""
