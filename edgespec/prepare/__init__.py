"""Files derived from a model once, such as a split model for early exit or a copy with fewer bits."""
