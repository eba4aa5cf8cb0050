"""A byte-level language model with contexts that do not fit a budget plainly."""
