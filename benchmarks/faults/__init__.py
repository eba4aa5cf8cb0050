"""Trainings that are disturbed, and must end as if they had not been: `python -m benchmarks.faults`."""
