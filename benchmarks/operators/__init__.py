"""Every operator that PyTorch's own samples reach, held against its real kernel."""
