"""File names and metadata keys of models split for LayerSkip."""

# The weight files of a split model: tensors used by both parts, the lower layers, and the upper layers.
SHARED, LOWER, UPPER = "shared.gguf", "lower.gguf", "upper.gguf"
# Files with the metadata of a split model's lower and upper parts. They contain no weights.
LOWER_FIRST, UPPER_FIRST = "lower-first.gguf", "upper-first.gguf"
# All files of a split model's lower part, then of its upper part, in the order that llama.cpp expects.
PARTS = ((LOWER_FIRST, SHARED, LOWER), (UPPER_FIRST, SHARED, UPPER))
FILES = (LOWER_FIRST, UPPER_FIRST, SHARED, LOWER, UPPER)

# Metadata keys added by `edgespec prepare layerskip`: the size of `shared.gguf`, and the whole model's
# parameter count and description.
SHARED_BYTES_KEY = "edgespec.layerskip.shared_bytes"
PARAMETERS_KEY = "edgespec.layerskip.parameters"
DESCRIPTION_KEY = "edgespec.layerskip.description"
