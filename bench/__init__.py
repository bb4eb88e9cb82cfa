"""Our figures beside those of other packages, measured in one run: `python -m bench`."""
