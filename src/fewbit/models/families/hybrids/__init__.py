"""Decoders whose layers are of several kinds."""
