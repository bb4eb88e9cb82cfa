"""Layouts of quantized weights that other programs read."""
