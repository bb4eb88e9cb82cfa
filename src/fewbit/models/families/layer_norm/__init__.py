"""Decoders with LayerNorms."""
