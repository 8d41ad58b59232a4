"""File names of checkpoints in the Hugging Face layout that mlx-lm loads."""

from __future__ import annotations

__all__ = ["TOKENIZERS", "WEIGHTS", "WEIGHTS_INDEX"]

# The weight files that mlx-lm loads. Folders may also hold the same weights in other formats.
WEIGHTS = "model*.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# Tokenizer files. A checkpoint needs at least one of them.
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
)
