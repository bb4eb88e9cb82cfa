"""The GPU backend of quantize and dequantize, in Triton."""
