"""Quantization-aware training inside the interpreter."""
