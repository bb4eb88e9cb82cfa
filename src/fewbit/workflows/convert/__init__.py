"""Writing a model in the layout of another program, and what is recorded of its source."""
