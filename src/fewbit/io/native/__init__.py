"""Reads and writes fewbit's own directories."""
