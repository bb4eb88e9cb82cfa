"""The GPU backends of qmatmul, in Triton."""
