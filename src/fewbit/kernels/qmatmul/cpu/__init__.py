"""The CPU backends of qmatmul, in C++."""
