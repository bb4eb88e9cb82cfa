"""Configurations of GGUF files."""
