"""Random small training steps, made of what autograd treats specially, and whether their predictions are right."""
