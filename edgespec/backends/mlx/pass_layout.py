"""What a pass looks like to the layers: where its tokens stand and what each of them may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

__all__ = ["PassLayout", "SinkWindow", "install_tree_ropes"]


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """So many first and so many last tokens (StreamingLLM, arXiv 2309.17453)."""

    sinks: int
    recent: int


@dataclass
class PassLayout:
    """Shared by all caches and rotary embeddings of a model; set before each pass.

    round_start: rows of the cache before the round; they lie at their own positions and all can be seen.
    positions: absolute positions of the pass's tokens, or None for a chain, where they follow from the
    cache. known: positions of all rows of the round so far, this pass's included. visible: for each token
    of the pass, which rows of the round it sees.
    sink_window: of the rows before the round, layers that look back all the way see the first `sinks` and the
    last `recent` only; None is all. scratch: what the pass computes is not kept in the caches.
    """

    round_start: int = 0
    positions: list[int] | None = None
    known: list[int] = field(default_factory=list)
    visible: list[list[bool]] = field(default_factory=list)
    offsets: mx.array | None = None
    sink_window: SinkWindow | None = None
    scratch: bool = False

    def chain(self, round_start: int) -> None:
        """The pass goes on where the cache ends, each token seeing all before it."""
        self.round_start, self.positions, self.offsets = round_start, None, None

    def tree(self, round_start: int, parents: Sequence[int], depths: Sequence[int], first: int) -> None:
        """The pass holds nodes `first` and up of a tree whose root stands at `round_start`."""
        self.round_start = round_start
        self.known = [round_start + depth for depth in depths]
        self.positions = self.known[first:]
        self.offsets = mx.array(self.positions)
        seen: list[list[bool]] = []
        for node, parent in enumerate(parents):
            row = list(seen[parent]) if parent >= 0 else [False] * len(parents)
            row[node] = True
            seen.append(row)
        self.visible = seen[first:]

    def tree_mask(self, before: mx.array, window: int | None) -> mx.array:
        """bool [tokens of the pass, keys]: True where a token may look.

        before: int [1, n], the positions of the keys before the round; those of the round follow.
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
    Deliberately no nn.Module: it holds nothing to load, save or count.
    """

    def __init__(self, rope: Any, shape: PassLayout) -> None:
        self._rope = rope
        self._shape = shape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rope, name)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        offsets = self._shape.offsets
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


def install_tree_ropes(model: Any, shape: PassLayout) -> None:
    """Put a tree's positions under every rotary embedding of a model."""
    for _, module in model.named_modules():
        for name, part in list({**vars(module), **module}.items()):
            kind = type(part).__name__.lower()
            if isinstance(part, Module) and ("rope" in kind or "rotary" in kind):
                if name in module:
                    del module[name]
                object.__setattr__(module, name, _TreeRope(part, shape))
