"""Layers whose parameters or sizes GGUF files have in a form of their own."""
