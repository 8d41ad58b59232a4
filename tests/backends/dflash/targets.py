"""A tiny target for DFlash and DSpark heads, and heads of every kind for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.dflash import DFlashHead
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.model.base import Head, LanguageModel, LoadOptions
from tests.backends.tiny_heads import write_dflash
from tests.backends.tiny_models import WORDS, write_llama

CONTEXT = 512
VOCAB = 259 + len(WORDS)
LAYERS = (0, 1, 3)
BLOCK, MASK, CANDIDATES = 6, 7, 4

write_head: Callable[..., Path] = partial(write_dflash, layers=LAYERS, block=BLOCK, mask=MASK)
# Heads of all kinds.
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "causal": {"attention__causal": True},
    "window": {"window": 8},
    "m-rope": {"sections": (8, 0, 0, 0)},
    "fewer tokens": {"drafted": 100},
    "dspark": {"rank": 8},
    "dspark from its masks": {"rank": 8, "sample_from_anchor": False},
    "dspark of fewer tokens": {"rank": 8, "drafted": 100},
    "dflash 2": {"candidates": CANDIDATES},
}


class Files:
    """A target with three layers and heads of all kinds."""

    def __init__(self, folder: Path) -> None:
        self.target = write_llama(folder / "target.gguf", layers=3)
        self.heads = {kind: write_head(folder / f"{kind}.gguf", **options) for kind, options in KINDS.items()}

    def load(self, context: int = CONTEXT) -> LlamaCppModel:
        model = llamacpp.load(str(self.target), "target", LoadOptions(context_tokens=context))
        assert isinstance(model, LlamaCppModel)
        return model

    def reply(self, temperature: float, **options: Any) -> edgespec.Reply:
        with always_draft(), edgespec.load(str(self.target), "none", context=256, **options) as runtime:
            return runtime.generate("the file", max_tokens=24, temperature=temperature, seed=3)

    @cache  # noqa: B019 - the object lives as long as the tests of its file
    def plain_tokens(self, temperature: float) -> tuple[int, ...]:
        return self.reply(temperature, method="none").tokens


def head_of(target: LanguageModel, path: Path) -> DFlashHead:
    head = target.self_draft(Head("dflash", path))
    assert isinstance(head, DFlashHead)
    return head


def changed(path: Path, name: str, value: float | np.generic) -> Path:
    """Write this value to all elements of a tensor."""
    reader = gguf.GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == name).data[:] = value
    reader.data.flush()
    return path
