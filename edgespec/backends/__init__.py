"""What runs a model. Each backend is one folder behind the Protocol in `base.py`."""
