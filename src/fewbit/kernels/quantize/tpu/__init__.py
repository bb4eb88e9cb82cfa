"""The TPU backend of quantize and dequantize, in Pallas."""
