"""Planning of compiled graphs: memfit as a backend of `torch.compile`."""
