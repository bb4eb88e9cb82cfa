"""Kernels: for each product its problem, reference and backends."""
