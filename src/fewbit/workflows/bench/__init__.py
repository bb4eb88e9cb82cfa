"""Benchmarks of products on this machine."""
