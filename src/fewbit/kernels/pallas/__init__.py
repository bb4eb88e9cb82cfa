"""Pallas code that several kernels share."""
