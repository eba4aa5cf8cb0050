"""Records that the stages exchange: device, trace, timeline and plan. None needs torch."""
