"""Writing a model in the layout of another program."""
