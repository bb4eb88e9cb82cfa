"""The TPU backends of qmatmul, in Pallas."""
