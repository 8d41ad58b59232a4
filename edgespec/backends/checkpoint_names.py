"""What the files of a checkpoint in MLX's form are called."""

from __future__ import annotations

__all__ = ["TOKENIZERS", "WEIGHTS", "WEIGHTS_INDEX"]

# What mlx-lm reads; the same weights may lie beside them in another form.
WEIGHTS = "model*.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# One of them is enough.
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
)
