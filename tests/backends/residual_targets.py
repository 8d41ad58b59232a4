"""Tiny targets of both backends, and Medusa and Hydra heads for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from edgespec.backends import llamacpp, mlx
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.mlx.tiny_checkpoints import ROWS, write_checkpoint
from tests.backends.tiny_models import WORDS, write_jamba, write_llama
from tests.model.heads.residual_files import (
    Arrays,
    Attention,
    Layout,
    plain_logits,
    random_arrays,
    write_heads,
)

CONTEXT = 512


class Target(ABC):
    """A backend's target, another one with recurrent layers, and heads for both."""

    size: int
    vocab: int
    layers = 3
    attention: Attention
    # Maximum logit errors with weights of these types. For other types, they hardly exceed those of float32.
    tolerances: ClassVar[dict[str, float]] = {}
    # Embeddings and LM head of the first target.
    table: NDArray[Any]
    lm_head: NDArray[Any]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "target"

    @abstractmethod
    def load(self, name: str = "target", **options: Any) -> LanguageModel: ...

    def arrays(self, layout: Layout) -> Arrays:
        return random_arrays(layout, self.size, self.vocab, self.attention)

    def head(self, layout: Layout) -> Path:
        folder = self.folder / "-".join(str(layout).split(", "))
        return folder if folder.exists() else write_heads(folder, layout, self.arrays(layout))

    def plain_logits(self, layout: Layout, states: NDArray[Any], path: list[int]) -> NDArray[np.float64]:
        """Return the logits of a layout's heads after a path that follows tokens with these hidden states."""
        arrays, embed = self.arrays(layout), self.table.__getitem__
        return plain_logits(layout, arrays, self.attention, states, embed, path, self.lm_head)


class GgufTarget(Target):
    size = 32
    vocab = 259 + len(WORDS)
    attention = Attention(heads=2, kv_heads=2)
    tolerances: ClassVar[dict[str, float]] = {"float16": 0.01, "bfloat16": 0.1}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = write_llama(folder / "target.gguf", layers=self.layers)
        write_jamba(folder / "recurrent.gguf")
        tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(self.path).tensors}
        self.table, self.lm_head = (np.array(tensors[f"{name}.weight"]) for name in ("token_embd", "output"))

    def load(self, name: str = "target", **options: Any) -> LanguageModel:
        options = {"context_tokens": CONTEXT} | options
        return llamacpp.load(str(self.folder / f"{name}.gguf"), name, LoadOptions(**options))


class MlxTarget(Target):
    size = 64
    vocab = ROWS
    attention = Attention(heads=4, kv_heads=2)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        write_checkpoint(self.path, "llama", config={"num_hidden_layers": self.layers})
        write_checkpoint(folder / "recurrent", "lfm2")
        tensors = load_file(self.path / "model.safetensors")
        self.table, self.lm_head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]

    def load(self, name: str = "target", **options: Any) -> LanguageModel:
        options = {"context_tokens": CONTEXT} | options
        return mlx.load(str(self.folder / name), name, LoadOptions(**options))
