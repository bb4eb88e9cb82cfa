"""Encodings of codes and scales that containers share."""
