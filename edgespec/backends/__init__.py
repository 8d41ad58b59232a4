"""Backends that run models. Each is a package that implements the protocol in `base.py`."""
