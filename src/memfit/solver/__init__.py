"""Chooses the regions to recompute within a budget: mixed-integer programs and the frontier of plans."""
