"""Whether trainings end as they would without a lever, and what the memory that levers free is good for."""
