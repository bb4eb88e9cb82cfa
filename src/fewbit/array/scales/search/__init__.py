"""Searches for the scale of least error."""
