"""Training under a plan: the loop, its step, batches, loss scaling and optimizers."""
