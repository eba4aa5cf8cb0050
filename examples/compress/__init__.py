"""A digits ResNet at half the multiply-adds: separable, pruned, and pruned and distilled."""
