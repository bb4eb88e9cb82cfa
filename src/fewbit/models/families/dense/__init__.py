"""Decoders with RMS norms and one feed-forward block."""
