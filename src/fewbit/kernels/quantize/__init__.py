"""Quantizing and dequantizing, fast."""
