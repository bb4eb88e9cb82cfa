"""Reads and writes safetensors files."""
