"""Better codes for a checkpoint: methods with calibration data, bit allocation, rotation."""
