"""KV caches of our own under mlx-lm's models: rolled back by their offset, exactly.

mlx-lm's own caches cannot all be trimmed, and those that cannot say nothing when asked to. A model sees
these through the same few methods: `update_and_fetch`, `make_mask`, `offset`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import mlx.core as mx

from edgespec.backends.mlx.pass_layout import PassLayout

__all__ = ["AttentionCache", "QuantizedAttentionCache", "rows_for"]

# Rows of keys or values: [batch, heads, rows, size], or the three parts of their quantised form.
Rows: TypeAlias = tuple[mx.array, ...]

_STEP = 256
# Windows begin at whole blocks: sums over keys are then grouped alike whatever the width of the pass.
_BLOCK = 64


def rows_for(window: int | None, context_tokens: int) -> int:
    """How many rows a cache with that window holds when a context of that many tokens is full."""
    wanted = context_tokens
    if window is not None:
        wanted = min(wanted, window + AttentionCache.slack + 2 * _STEP)
    return -(-wanted // _STEP) * _STEP


class AttentionCache:
    """Keys and values of one layer; row i stands at position `start` + i until a tree's round begins.

    window: how far back a token looks, itself included; None is all the way. A windowed cache keeps
    `slack` rows more than its window, so that as much can be taken back exactly.
    offset: rows ever appended and not taken back, which is the position of the next one.
    """

    slack = 256

    def __init__(self, shape: PassLayout, window: int | None = None) -> None:
        self._shape = shape
        self.window = window
        self.start = 0
        self.offset = 0
        self._keys: Rows = ()
        self._values: Rows = ()

    # What models call.

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append rows; everything a token of this pass may look at."""
        added = keys.shape[2]
        new_keys, new_values = self._encode(keys), self._encode(values)
        spans = self._spans(self.offset + added)
        if self._shape.scratch:
            all_keys, all_values = self._beside(self._keys, new_keys), self._beside(self._values, new_values)
            self.offset += added
            return self._fetched(all_keys, spans), self._fetched(all_values, spans)
        self._make_room(added, new_keys, new_values)
        low = self.offset - self.start
        for held, new in zip(self._keys + self._values, new_keys + new_values, strict=True):
            held[..., low : low + added, :] = new
        self.offset += added
        return self._fetched(self._keys, spans), self._fetched(self._values, spans)

    def _beside(self, held: Rows, new: Rows) -> Rows:
        """The rows in use with new ones after them, which the cache does not keep."""
        used = self.offset - self.start
        if not held:
            return new
        return tuple(
            mx.concatenate([old[..., :used, :], more], axis=2) for old, more in zip(held, new, strict=True)
        )

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What each of the next `count` tokens may see of the rows that `update_and_fetch` will return."""
        window = window_size or self.window
        if self._shape.positions is not None:
            return self._shape.tree_mask(_positions(self._spans(self._shape.round_start)), window)
        spans = self._spans(self.offset + count)
        total = sum(end - begin for begin, end in spans)
        if window is None or total <= window:
            if count == 1 and not return_array:
                return None
            if not return_array:
                return "causal"
        queries = mx.arange(self.offset, self.offset + count)[:, None]
        keys = _positions(spans)
        mask = queries >= keys
        return mask if window is None else mask & (queries < keys + window)

    def is_trimmable(self) -> bool:
        return False  # not through mlx-lm: it is `rewind` that takes rows back

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return not self._keys

    @property
    def state(self) -> Rows:
        """All arrays, to be evaluated."""
        return self._keys + self._values

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    # What the backend calls.

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row; the cache must not be empty."""
        return self.nbytes // self._keys[0].shape[2]

    @property
    def side_bytes_per_token(self) -> int:
        """Bytes of one row of keys or of values, whichever is larger; the cache must not be empty."""
        sides = (sum(array.nbytes for array in side) for side in (self._keys, self._values))
        return max(sides) // self._keys[0].shape[2]

    def can_rewind(self, length: int) -> bool:
        """Whether every row that a token at position `length` looks at is still there."""
        return self.start == 0 or (self.window is not None and length - self.window + 1 >= self.start)

    def rewind(self, length: int) -> None:
        """Take back everything from position `length` on."""
        self.offset = min(self.offset, length)

    def keep(self, round_start: int, path: list[int]) -> None:
        """Of the round's rows keep those of `path`, moved to follow one another."""
        low = round_start - self.start
        wanted = mx.array([low + node for node in path])
        for held in self._keys + self._values:
            held[..., low : low + len(path), :] = mx.take(held, wanted, axis=2)
        self.offset = round_start + len(path)

    def dump(self, first: int, end: int) -> tuple[list[int], list[mx.array]]:
        """What a snapshot needs: numbers, and the rows in use of positions [first, end)."""
        low, high = max(0, first - self.start), end - self.start
        return [self.start, end], [array[..., low:high, :] for array in self.state]

    def load(self, numbers: list[int], arrays: list[mx.array], first: int = 0) -> None:
        """Take over what `dump` gave, after the rows before position `first`."""
        if first:
            used = first - self.start
            held = [array[..., :used, :] for array in self.state]
            arrays = [mx.concatenate([old, new], axis=2) for old, new in zip(held, arrays, strict=True)]
        half = len(arrays) // 2
        keys, values = tuple(arrays[:half]), tuple(arrays[half:])
        # All at once: an interrupt must not leave half of it.
        (self.start, self.offset), self._keys, self._values = numbers, keys, values

    def _spans(self, end: int) -> list[tuple[int, int]]:
        """Which positions up to `end` the next pass may look at, as (first, after the last)."""
        near, before = self._shape.sink_window, self._shape.round_start
        if near and self.window is None and before > near.sinks + near.recent:
            return [(0, near.sinks), (before - near.recent, end)]
        return [(self._first_key(), end)]

    def _first_key(self) -> int:
        """The position of the first key that the next pass may look at, at a whole block."""
        if self.window is None:
            return self.start
        shape = self._shape
        # Mask and keys of a tree both begin with rows from before the round.
        first = self.offset if shape.positions is None else min(*shape.positions, shape.round_start)
        return max(self.start, (first - self.window + 1) // _BLOCK * _BLOCK)

    def _make_room(self, added: int, keys: Rows, values: Rows) -> None:
        used = self.offset - self.start
        if self._keys and used + added <= self._keys[0].shape[2]:
            return
        drop = 0
        if self.window is not None:
            oldest = self._shape.round_start - self.window + 1 - self.slack
            drop = max(0, oldest // _BLOCK * _BLOCK - self.start)
        rows = -(-(used - drop + added) // _STEP) * _STEP
        if self.window is not None and drop:
            rows += _STEP  # so that it is not moved again at once
        moved_keys = self._moved(self._keys, keys, drop, used, rows)
        moved_values = self._moved(self._values, values, drop, used, rows)
        # All at once: an interrupt must not leave half of it.
        self._keys, self._values, self.start = moved_keys, moved_values, self.start + drop

    @staticmethod
    def _moved(held: Rows, like: Rows, drop: int, used: int, rows: int) -> Rows:
        """Rows [drop, used) of `held` in arrays of `rows` rows."""
        moved = []
        for i, new in enumerate(like):
            batch, heads, _, size = new.shape
            kept = used - drop if held else 0
            empty = mx.zeros((batch, heads, rows - kept, size), new.dtype)
            moved.append(mx.concatenate([held[i][..., drop:used, :], empty], axis=2) if kept else empty)
        return tuple(moved)

    def _encode(self, rows: mx.array) -> Rows:
        return (rows,)

    def _fetched(self, held: Rows, spans: list[tuple[int, int]]) -> Any:
        return self._rows(held[0], spans)

    def _rows(self, held: mx.array, spans: list[tuple[int, int]]) -> mx.array:
        parts = [held[..., begin - self.start : end - self.start, :] for begin, end in spans]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


class QuantizedAttentionCache(AttentionCache):
    """The same, quantised; mlx-lm's attention tells by `bits` and `group_size`."""

    def __init__(self, shape: PassLayout, window: int | None, bits: int) -> None:
        super().__init__(shape, window)
        self.bits = bits
        self.group_size = 64

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if keys.shape[-1] % 64 or values.shape[-1] % 64:
            self.group_size = 32
        return super().update_and_fetch(keys, values)

    def _encode(self, rows: mx.array) -> Rows:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))

    def _fetched(self, held: Rows, spans: list[tuple[int, int]]) -> Any:
        return tuple(self._rows(array, spans) for array in held)


def _positions(spans: list[tuple[int, int]]) -> mx.array:
    """int [1, n]: all of these, one after another."""
    parts = [mx.arange(begin, end) for begin, end in spans]
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts))[None]
