"""Segmentation of the brain in one budget: plain, planned, and with a lighter structure."""
