"""Random heads for the tiny GGUF target, in the layouts of heads published on Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.backends.tiny_models import WORDS
from tests.model.heads.published import Layout, write_head

VOCAB = 259 + len(WORDS)


def write_published(folder: Path, layout: Layout = "SafeAILab", **changes: Any) -> Path:
    """Write a random head that reads the inputs of the first three layers."""
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return write_head(folder, layout, **{"vocab": VOCAB, "draft_vocab": 100, **layers, **changes})
