"""Positions and visibility of the tokens in a pass, for attention masks and rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

__all__ = ["PassLayout", "SinkWindow", "install_tree_ropes"]


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """An attention window over the first and the most recent cached tokens (StreamingLLM, arXiv 2309.17453).

    Attributes:
        sinks: Number of tokens at the beginning of the context.
        recent: Number of most recent tokens.
    """

    sinks: int
    recent: int


@dataclass
class PassLayout:
    """The layout of the next pass: a chain, or part of a token tree.

    All caches and rotary embeddings in a model share one instance. `PassRunner` updates it before each pass.

    Attributes:
        round_start: Number of cached rows before the chain or tree. Every token in the pass sees them.
        positions: Position of each token in the pass; None for a chain, whose positions are consecutive.
        known: Position of each tree node run so far, including those in this pass.
        visible: For each token in the pass, which tree nodes it sees.
        offsets: `positions` as an array; None for a chain.
        sink_window: Limits the rows before the chain or tree that full-attention layers see; None for no
            limit.
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
        """Lay out a chain: its tokens follow the cached ones, and each sees all tokens before it."""
        self.round_start, self.positions, self.offsets = round_start, None, None

    def set_tree(self, round_start: int, parents: Sequence[int], depths: Sequence[int], first: int) -> None:
        """Lay out the nodes of a tree from index `first`.

        Args:
            round_start: Position of the tree's root.
            parents: Parent of each node; -1 for the root.
            depths: Depth of each node; 0 for the root.
            first: First node in the pass. Earlier passes have run the nodes before it.
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
        """Return the attention mask for a tree pass.

        Args:
            before: Positions of the keys before the tree, int [1, n]. The tree's keys follow them.
            window: Sliding window of the layer in tokens; None for full attention.

        Returns:
            A bool array [tokens, keys] that is True where a token sees a key.
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
    """A rotary embedding that rotates each token in a tree by the token's own position.

    `mx.fast.rope` takes one offset per sequence in a batch, so tokens are folded into the batch dimension.
    It is not an `nn.Module`, so that mlx does not load, save or count it as a layer.
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
    """Wrap every rotary embedding in a model, so that it uses the positions in `layout`."""
    for _, module in model.named_modules():
        for name, part in list({**vars(module), **module}.items()):
            kind = type(part).__name__.lower()
            if isinstance(part, Module) and ("rope" in kind or "rotary" in kind):
                if name in module:
                    del module[name]
                object.__setattr__(module, name, _TreeRope(part, layout))
