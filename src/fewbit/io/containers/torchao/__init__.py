"""The container of torchao."""
