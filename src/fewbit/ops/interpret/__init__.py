"""The jaxpr interpreter: unchanged model code on quantized arrays."""
