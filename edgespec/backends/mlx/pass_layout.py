"""Positions and visibility of the tokens of a pass, for attention masks and rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

__all__ = ["PassLayout", "SinkWindow", "install_tree_ropes"]


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """A window of the first and the most recent cached tokens (StreamingLLM, arXiv 2309.17453).

    Attributes:
        sinks: Number of first tokens.
        recent: Number of most recent tokens.
    """

    sinks: int
    recent: int


@dataclass
class PassLayout:
    """The layout of the next pass: a chain, or some nodes of a token tree.

    All caches and rotary embeddings of a model share one instance. `PassRunner` updates it before each pass.

    Attributes:
        round_start: Rows in the cache before the round. They lie at their own positions, and every token of
            the pass sees them.
        positions: Position of each token of the pass; None for a chain, where they follow from the cache.
        known: Position of each row of the round so far, those of this pass included.
        visible: For each token of the pass, which rows of the round it sees.
        offsets: `positions` as an array; None for a chain.
        sink_window: Restricts full-attention layers to a part of the rows before the round; None for no
            restriction.
        scratch: Whether the pass leaves the caches unchanged.
    """

    round_start: int = 0
    positions: list[int] | None = None
    known: list[int] = field(default_factory=list)
    visible: list[list[bool]] = field(default_factory=list)
    offsets: mx.array | None = None
    sink_window: SinkWindow | None = None
    scratch: bool = False

    def set_chain(self, round_start: int) -> None:
        """Lay out a chain: the tokens follow the cache, and each sees all tokens before it."""
        self.round_start, self.positions, self.offsets = round_start, None, None

    def set_tree(self, round_start: int, parents: Sequence[int], depths: Sequence[int], first: int) -> None:
        """Lay out nodes `first` and up of a tree.

        Args:
            round_start: Position of the tree's root.
            parents: Parent of each node; -1 for the root.
            depths: Depth of each node; 0 for the root.
            first: First node of the pass. Earlier passes of the round have run the nodes before it.
        """
        self.round_start = round_start
        self.known = [round_start + depth for depth in depths]
        self.positions = self.known[first:]
        self.offsets = mx.array(self.positions)
        ancestors: list[list[bool]] = []
        for node, parent in enumerate(parents):
            row = list(ancestors[parent]) if parent >= 0 else [False] * len(parents)
            row[node] = True
            ancestors.append(row)
        self.visible = ancestors[first:]

    def tree_mask(self, before: mx.array, window: int | None) -> mx.array:
        """Return the attention mask of a tree pass.

        Args:
            before: Positions of the keys before the round, int [1, n]. The keys of the round follow them.
            window: Sliding window of the layer in tokens; None for full attention.

        Returns:
            A bool array [tokens of the pass, keys], True where a token sees a key.
        """
        assert self.offsets is not None
        queries = self.offsets[:, None]
        if window is None:
            prefix = mx.ones((self.offsets.size, before.size), mx.bool_)
            return mx.concatenate([prefix, mx.array(self.visible)], axis=1)
        prefix = queries < before + window
        block = mx.array(self.visible) & (queries < mx.array(self.known)[None] + window)
        return mx.concatenate([prefix, block], axis=1)


class _TreeRope:
    """A rotary embedding that gives each token of a tree its own position.

    `mx.fast.rope` takes one offset for each sequence of a batch, so tokens are folded into the batch.
    It is not an `nn.Module`, because mlx must not load, save or count it as a layer.
    """

    def __init__(self, rope: Any, layout: PassLayout) -> None:
        self._rope = rope
        self._layout = layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rope, name)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        offsets = self._layout.offsets
        if offsets is None:
            return self._rope(x, *args, **kwargs)
        batch, heads, length, size = x.shape
        folded = x.transpose(0, 2, 1, 3).reshape(batch * length, heads, 1, size)
        if args:
            args = (offsets, *args[1:])
        else:
            kwargs["offset"] = offsets
        turned = self._rope(folded, *args, **kwargs)
        return turned.reshape(batch, length, heads, size).transpose(0, 2, 1, 3)


def install_tree_ropes(model: Any, layout: PassLayout) -> None:
    """Wrap every rotary embedding of a model, so that it uses the positions of `layout`."""
    for _, module in model.named_modules():
        for name, part in list({**vars(module), **module}.items()):
            kind = type(part).__name__.lower()
            if isinstance(part, Module) and ("rope" in kind or "rotary" in kind):
                if name in module:
                    del module[name]
                object.__setattr__(module, name, _TreeRope(part, layout))
