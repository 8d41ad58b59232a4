"""Token positions and attention masks for passes over chains and token trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from edgespec.model.base import LowBit

__all__ = ["PassLayout", "install_tree_ropes"]


@dataclass
class PassLayout:
    """The position of each token in the next pass, and the tokens that it attends to.

    The tokens form a chain or part of a token tree. All caches and rotary embeddings of a model share one
    layout, which `PassRunner` updates before each pass.

    Attributes:
        round_start: Number of cached tokens before the chain or tree.
        offsets: Position of each token in the pass, or None for a chain, whose positions are consecutive.
        known: Position of each tree node in this and earlier passes over the same tree.
        visible: For each token in the pass, whether it attends to each tree node.
        window: Self-draft method whose `sink_tokens` and `window_tokens` restrict which tokens full-attention
            layers attend to. If None, they attend to all cached tokens.
        scratch: Whether the pass leaves its keys and values out of the caches.
    """

    round_start: int = 0
    offsets: mx.array | None = None
    known: list[int] = field(default_factory=list)
    visible: list[list[bool]] = field(default_factory=list)
    window: LowBit | None = None
    scratch: bool = False

    def set_chain(self, round_start: int) -> None:
        """Prepare a pass over a chain of tokens after the first `round_start` cached tokens."""
        self.round_start, self.offsets = round_start, None

    def set_tree(self, round_start: int, parents: Sequence[int], depths: Sequence[int], first: int) -> None:
        """Prepare a pass over the nodes of a tree, starting at index `first`.

        Args:
            round_start: Position of the root token.
            parents: Index of each node's parent. -1 for the root.
            depths: Depth of each node. 0 for the root.
            first: Index of the first node in the pass. Earlier passes have already processed the nodes before
                it.
        """
        self.round_start = round_start
        self.known = [round_start + depth for depth in depths]
        self.offsets = mx.array(self.known[first:])
        visible: list[list[bool]] = []
        for node, parent in enumerate(parents):
            visible.append(list(visible[parent]) if parent >= 0 else [False] * len(parents))
            visible[node][node] = True
        self.visible = visible[first:]

    def tree_mask(self, before: mx.array, window: int | None) -> mx.array:
        """Return the mask for a tree pass, bool [tokens, keys]: True where a token attends to a key.

        Args:
            before: Positions of the keys before the tree, int [1, n]. The tree's keys follow them.
            window: Size of the layer's sliding window in tokens, or None for full attention.
        """
        assert self.offsets is not None
        prefix, block = mx.ones((self.offsets.size, before.size), mx.bool_), mx.array(self.visible)
        if window is not None:
            queries = self.offsets[:, None]
            prefix = queries < before + window
            block = block & (queries < mx.array(self.known)[None] + window)
        return mx.concatenate([prefix, block], axis=1)


class _TreeRope:
    """Rotary embedding wrapper that supports a separate position for each token in a tree.

    `mx.fast.rope` accepts one offset per sequence in a batch, so each token is treated as a sequence. This
    class is not an `nn.Module`, because it has no weights of its own.
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
    """Wrap a model's rotary embeddings so that they use the token positions in `layout`."""
    for _, module in model.named_modules():
        for name, part in list({**vars(module), **module}.items()):
            kind = type(part).__name__.lower()
            if isinstance(part, Module) and ("rope" in kind or "rotary" in kind):
                if name in module:
                    del module[name]
                object.__setattr__(module, name, _TreeRope(part, layout))
