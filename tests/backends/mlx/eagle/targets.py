"""Tiny MLX targets for EAGLE heads, and the heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.backends import mlx
from edgespec.backends.mlx.eagle import EagleHead
from edgespec.model.base import Head, LoadOptions
from tests.backends.mlx.tiny_checkpoints import ROWS, write_checkpoint
from tests.model.heads.published import Layout, write_head

CONTEXT = 512


SIZE = 64


KINDS = ("llama", "gemma3", "qwen3_next", "llama_sliding", "lfm2")


# These exist in all tiny models.
STATES = [0, 1, 2]


class Files:
    """Targets and heads, each written when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def target(self, kind: str, **options: Any) -> Path:
        path = self._folder / f"{kind}{len(options) or ''}"
        return path if path.exists() else write_checkpoint(path, kind, **options)

    def head(self, layout: Layout = "SafeAILab", **options: Any) -> Path:
        path = self._folder / f"{layout}{'-'.join(map(str, options))}"
        if path.exists():
            return path
        draft_vocab = None if layout == "EAGLE-1" else 200
        defaults: dict[str, Any] = {"size": SIZE, "vocab": ROWS, "draft_vocab": draft_vocab}
        if layout != "EAGLE-1":
            defaults["eagle_aux_hidden_state_layer_ids"] = STATES
        return write_head(path, layout, **{**defaults, **options})

    def load(self, kind: str = "llama", **options: Any) -> Any:
        return mlx.load(str(self.target(kind, **options)), kind, LoadOptions(context_tokens=CONTEXT))


def head_of(target: Any, path: Path) -> EagleHead:
    head = target.self_draft(Head("eagle", path))
    assert isinstance(head, EagleHead)
    return head
