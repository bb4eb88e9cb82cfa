"""Triton code that several kernels share."""
