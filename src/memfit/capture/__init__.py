"""From a training step to its trace: operators, storages and their lifetimes, recorded without data."""
