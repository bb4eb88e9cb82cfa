"""Writing a model in another program's layout, and recording its source."""
