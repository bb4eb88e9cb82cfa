"""Kinds of attention, and positions in it."""
