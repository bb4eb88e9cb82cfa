"""The roles of the tensors of a checkpoint."""
