"""The CPU backend of quantize and dequantize, in C++."""
