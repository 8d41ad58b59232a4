"""Ways of guessing what the target will say. One file for each; `base.py` is the Protocol."""
