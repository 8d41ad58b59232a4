"""Backends that run models. Each one is a folder that implements the Protocol in `base.py`."""
