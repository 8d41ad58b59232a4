"""File names and metadata keys of models that were split for LayerSkip."""

__all__ = [
    "DESCRIPTION_KEY",
    "FILES",
    "LOWER",
    "LOWER_FIRST",
    "PARAMETERS_KEY",
    "PARTS",
    "SHARED",
    "SHARED_BYTES_KEY",
    "UPPER",
    "UPPER_FIRST",
]

# SHARED contains the tensors that both splits use (embedding, final norm and output head). LOWER and UPPER
# contain the layers of the lower and the upper split.
SHARED, LOWER, UPPER = "shared.gguf", "lower.gguf", "upper.gguf"
# The first file of each split contains only metadata.
LOWER_FIRST, UPPER_FIRST = "lower-first.gguf", "upper-first.gguf"
# The files of each split in the order in which llama.cpp loads them.
PARTS = ((LOWER_FIRST, SHARED, LOWER), (UPPER_FIRST, SHARED, UPPER))
FILES = (LOWER_FIRST, UPPER_FIRST, SHARED, LOWER, UPPER)

# Metadata keys that `edgespec prepare layerskip` adds: the size of `shared.gguf`, and the parameter count and
# the description of the whole model.
SHARED_BYTES_KEY = "edgespec.layerskip.shared_bytes"
PARAMETERS_KEY = "edgespec.layerskip.parameters"
DESCRIPTION_KEY = "edgespec.layerskip.description"
