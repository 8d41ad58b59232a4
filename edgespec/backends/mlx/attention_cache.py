"""Token positions, attention masks and KV caches with exact rollback, for passes over chains and token trees.

mlx-lm's `trim_prompt_cache` silently does nothing for some architectures. These caches implement the
interface that mlx-lm's models expect (`update_and_fetch`, `make_mask`, `offset`) and roll back by decreasing
the offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module

from edgespec.model.base import LowBit

__all__ = ["AttentionCache", "PassLayout", "QuantizedAttentionCache", "cache_rows", "install_tree_ropes"]

# Cached keys or values: one array [batch, heads, rows, head size], or three arrays if the cache is quantised
# (packed values, scales and biases).
Rows: TypeAlias = tuple[mx.array, ...]

# Number of rows by which a full KV cache grows, as in mlx-lm.
_GROWTH_ROWS = 256
# Sliding windows start at a multiple of this many tokens, because their alignment affects rounding errors.
_BLOCK_ROWS = 64


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


def cache_rows(window: int | None, context_tokens: int) -> int:
    """Return the number of rows (one per token) that a layer's KV cache allocates for a full context."""
    rows = context_tokens
    if window is not None:
        rows = min(rows, window + AttentionCache.slack + 2 * _GROWTH_ROWS)
    return -(-rows // _GROWTH_ROWS) * _GROWTH_ROWS


class AttentionCache:
    """KV cache of one attention layer.

    Row i holds the key and value of the token at position `start + i`. While a token tree is being verified,
    the last rows hold the tree's nodes in the order in which the model processed them.

    Attributes:
        layout: Layout of the next pass.
        slack: Extra rows that a cache with a sliding window keeps for rollback.
        window: Size of the sliding window in tokens, including the current token, or None for full attention.
        start: Position of the token in the first row. Greater than 0 once a sliding-window cache has dropped
            old rows.
        offset: Position of the next token.
    """

    slack = 256

    def __init__(self, layout: PassLayout, window: int | None = None) -> None:
        self.layout = layout
        self.window = window
        self.start = 0
        self.offset = 0
        self._keys: Rows = ()
        self._values: Rows = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys and values to the cache, and return all keys and values that the pass attends to.

        In a scratch pass (see `PassLayout.scratch`), the new rows are returned but not stored.
        """
        added = keys.shape[2]
        new_keys, new_values = self._encode(keys), self._encode(values)
        spans = self._spans(self.offset + added)
        if self.layout.scratch:
            all_keys, all_values = self._joined(self._keys, new_keys), self._joined(self._values, new_values)
        else:
            self._make_room(added, new_keys, new_values)
            low = self.offset - self.start
            for cached, new in zip(self._keys + self._values, new_keys + new_values, strict=True):
                cached[..., low : low + added, :] = new
            all_keys, all_values = self._keys, self._values
        self.offset += added
        return self._fetched(all_keys, spans), self._fetched(all_values, spans)

    def skip(self, added: int) -> None:
        """Advance over `added` tokens whose keys and values are cached on another machine.

        Stores empty rows, so that `start` and `offset` stay in step with that cache.
        """
        rows = (mx.zeros((1, 1, added, 0)),)
        self._make_room(added, rows, rows)
        self.offset += added

    def _joined(self, cached: Rows, new: Rows) -> Rows:
        if not cached:
            return new
        used = self.offset - self.start
        pairs = zip(cached, new, strict=True)
        return tuple(mx.concatenate([old[..., :used, :], more], axis=2) for old, more in pairs)

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the attention mask for the next `count` tokens.

        Returns:
            A bool array [count, keys], the string `"causal"`, or None if no mask is needed.
        """
        window = window_size or self.window
        if self.layout.offsets is not None:
            return self.layout.tree_mask(_positions(self._spans(self.layout.round_start)), window)
        spans = self._spans(self.offset + count)
        total = sum(end - begin for begin, end in spans)
        if window is None or total <= window:
            if count == 1 and not return_array:
                return None
            if not return_array:
                return "causal"
        queries, keys = mx.arange(self.offset, self.offset + count)[:, None], _positions(spans)
        mask = queries >= keys
        return mask if window is None else mask & (queries < keys + window)

    @property
    def state(self) -> Rows:
        """All arrays in the cache: the keys, then the values."""
        return self._keys + self._values

    @property
    def bytes_per_token(self) -> int:
        """Size in bytes of one token's keys and values. The cache must not be empty."""
        return sum(array.nbytes for array in self.state) // self._keys[0].shape[2]

    def can_rewind(self, length: int) -> bool:
        """Return whether the cache still holds every row that a token at position `length` attends to."""
        return self.start == 0 or (self.window is not None and length - self.window + 1 >= self.start)

    def rewind(self, length: int) -> None:
        """Drop the cached keys and values from token position `length` onwards."""
        self.offset = min(self.offset, length)

    def repeat(self, end: int) -> None:
        """Append copies of all rows, with their original positions, until there are `end` rows.

        The cache must have full attention.
        """
        indices = mx.arange(max(end, self.offset)) % self.offset
        keys, values = (
            tuple(mx.take(array, indices, axis=2) for array in rows) for rows in (self._keys, self._values)
        )
        # Assign all fields in one statement, so that an interrupt cannot leave them inconsistent.
        self._keys, self._values, self.offset = keys, values, max(end, self.offset)

    def keep_path(self, round_start: int, path: list[int]) -> None:
        """Keep the keys and values of the tree nodes in `path`, and drop the tree's other nodes.

        The root of the tree is at position `round_start`.
        """
        low = round_start - self.start
        kept_rows = mx.array([low + node for node in path])
        for cached in self.state:
            cached[..., low : low + len(path), :] = mx.take(cached, kept_rows, axis=2)
        self.offset = round_start + len(path)

    def dump(self, first: int, end: int) -> tuple[list[int], list[mx.array]]:
        """Return the rows at positions [first, end) in the form that `load` accepts."""
        low, high = max(0, first - self.start), end - self.start
        return [self.start, end], [array[..., low:high, :] for array in self.state]

    def load(self, numbers: list[int], arrays: list[mx.array], first: int = 0) -> None:
        """Restore rows saved by `dump`, after any rows cached before position `first`."""
        keys, values = tuple(arrays[: len(arrays) // 2]), tuple(arrays[len(arrays) // 2 :])
        if first:
            keys, values = self._joined(self._keys, keys), self._joined(self._values, values)
        # Assign all fields in one statement, so that an interrupt cannot leave the cache half restored.
        (self.start, self.offset), self._keys, self._values = numbers, keys, values

    def _spans(self, end: int) -> list[tuple[int, int]]:
        """Return the ranges (first, stop) of positions before `end` that the next pass attends to."""
        layout, before = self.layout, self.layout.round_start
        if self.window is None:
            if layout.window and layout.window.window_tokens:
                sinks, recent = layout.window.sink_tokens, layout.window.window_tokens
                if before > sinks + recent:
                    return [(0, sinks), (before - recent, end)]
            return [(0, end)]
        first = self.offset if layout.offsets is None else before
        oldest = (first - self.window + 1) // _BLOCK_ROWS * _BLOCK_ROWS
        return [(max(self.start, oldest), end)]

    def _make_room(self, added: int, keys: Rows, values: Rows) -> None:
        used = self.offset - self.start
        if self._keys and used + added <= self._keys[0].shape[2]:
            return
        drop = 0
        if self.window is not None:
            oldest = self.layout.round_start - self.window + 1 - self.slack
            drop = max(0, oldest // _BLOCK_ROWS * _BLOCK_ROWS - self.start)
        rows = -(-(used - drop + added) // _GROWTH_ROWS) * _GROWTH_ROWS
        if drop:
            rows += _GROWTH_ROWS

        def moved(cached: Rows, like: Rows) -> Rows:
            kept = used - drop if cached else 0
            result = []
            for i, new in enumerate(like):
                empty = mx.zeros((*new.shape[:2], rows - kept, new.shape[3]), new.dtype)
                old = cached[i][..., drop:used, :] if kept else None
                result.append(empty if old is None else mx.concatenate([old, empty], axis=2))
            return tuple(result)

        moved_keys, moved_values = moved(self._keys, keys), moved(self._values, values)
        # Assign all fields in one statement, so that an interrupt cannot leave them inconsistent.
        self._keys, self._values, self.start = moved_keys, moved_values, self.start + drop

    def _encode(self, rows: mx.array) -> Rows:
        return (rows,)

    def _fetched(self, cached: Rows, spans: list[tuple[int, int]]) -> Any:
        return self._rows(cached[0], spans)

    def _rows(self, cached: mx.array, spans: list[tuple[int, int]]) -> mx.array:
        parts = [cached[..., begin - self.start : end - self.start, :] for begin, end in spans]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


class QuantizedAttentionCache(AttentionCache):
    """KV cache of one attention layer that stores quantised keys and values.

    mlx-lm uses its quantised attention kernel for any cache with `bits` and `group_size` attributes.
    """

    def __init__(self, layout: PassLayout, window: int | None, bits: int) -> None:
        super().__init__(layout, window)
        self.bits = bits
        self.group_size = 64

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if keys.shape[-1] % 64 or values.shape[-1] % 64:
            self.group_size = 32
        return super().update_and_fetch(keys, values)

    def _encode(self, rows: mx.array) -> Rows:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))

    def _fetched(self, cached: Rows, spans: list[tuple[int, int]]) -> Any:
        return tuple(self._rows(array, spans) for array in cached)


def _positions(spans: list[tuple[int, int]]) -> mx.array:
    parts = [mx.arange(begin, end) for begin, end in spans]
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts))[None]


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
