"""Inference backends. Each one is a package that implements the protocols in `edgespec/model/base.py`."""
