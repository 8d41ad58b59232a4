"""Which passes of a loaded model say the very same, bit for bit: tried out, and not believed.

A kernel may add up in another order where a pass is wider, or the text before it longer; then logits differ
in their last places, and a near-tie can flip. `--exact` uses what was found to agree, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import cycle

import numpy as np

from edgespec.backends.base import Capabilities, LanguageModel, Progress
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError

__all__ = ["BitExactPasses", "find_bit_exact_passes", "restricted_to"]

# The longest draft that `auto` takes, and its root.
_MOST_WIDTH = 17
# After so many tokens: llama.cpp's attention has a kernel of its own for single steps beyond 256.
_DEPTHS = (290, 40)
# Steps that are taken there. Where a kernel rounds otherwise only once in some ten thousand numbers, a small
# model shows it once in fifty tokens, a large one in every other.
_STEPS = 3 * _MOST_WIDTH // 2 + 1
_STEPS_OF_SMALL, _SMALL_BYTES = 136, 256 * 2**20
# A text is read again in these: few rows, and more than a tile of any kernel has.
_PIECES = (5, 37, 1, 3, 100, 64, 16, 1, 2, 8, 9, 4, 11, 7, 13, 6, 33, 130)
_TREES = 3
# What was read or run is gone on from by so many steps.
_LAST = 3


@dataclass(frozen=True, slots=True)
class BitExactPasses:
    """What gives the logits of single steps to the last bit, and leaves a cache that goes on giving them.

    width: passes of 2 to so many rows do; 1 where none does. branches: token trees of as many do, too.
    reading: a text may have been read in any passes, and token by token.
    """

    width: int
    branches: bool
    reading: bool


def find_bit_exact_passes(model: LanguageModel, progress: Progress | None = None) -> BitExactPasses:
    """Try passes of a model after some hundred tokens and after a few; its cache is empty afterwards.

    It takes two or three readings of some hundred tokens, and about 100 single steps (of a small model 200)
    and 80 wider passes. What is found holds for a context of this size.
    Raises CancelledError where `progress` (called with what, fraction) says False, or the model is
    interrupted.
    """
    able = model.facts.capabilities
    width = min(_MOST_WIDTH, able.max_width) if able.rollback else 1
    branches, reading = able.rollback and able.tree, True
    count = _STEPS_OF_SMALL if model.facts.weight_bytes < _SMALL_BYTES else _STEPS
    try:
        for i, depth in enumerate(_DEPTHS):
            model.truncate(0)
            count = min(count, max(_STEPS, model.free_tokens - depth - _LAST))
            depth = min(depth, model.free_tokens - count - _LAST)
            if depth < 1:
                return BitExactPasses(1, False, False)
            _tell(progress, i / len(_DEPTHS))
            trial = _Trial(model, depth, count)
            reading = reading and trial.reading_agrees()
            # Where a text reads the same in all sizes, its layers round the same: a few rows show the head.
            width = trial.widest(width, thorough=not reading)
            branches = branches and width > 3 and trial.trees_agree()
            count = min(count, _STEPS)
    finally:
        model.truncate(0)
    # Of what rounds otherwise in every wider pass a trial may see nothing where a cache rounds it away.
    return BitExactPasses(width, branches, reading and (width > 1 or not able.rollback))


def _tell(progress: Progress | None, fraction: float) -> None:
    if progress and not progress("finding out which passes agree to the bit", fraction):
        raise CancelledError("loading was cancelled")


class _Trial:
    """A text of `depth` tokens read at once, and what single steps said after each of the next `count`."""

    def __init__(self, model: LanguageModel, depth: int, count: int) -> None:
        self._model, self._depth, self._count = model, depth, count
        size = model.facts.vocab_size
        self._everything = np.arange(size)
        words = np.random.default_rng(depth).integers(size // 8, size, depth + count + _LAST)
        self._tokens: list[int] = words.tolist()
        model.truncate(0)
        model.prefill(self._tokens[:depth])
        self._said = [self._step(token) for token in self._tokens[depth:]]

    def _run(self, tree: TokenTree) -> list[bytes]:
        """What a pass says after each node: a digest of all logits."""
        logits = self._model.verify(tree)
        rows = (logits.at(row, self._everything) + 0.0 for row in range(tree.width))
        return [blake2b(row.tobytes()).digest() for row in rows]

    def _step(self, token: int) -> bytes:
        (said,) = self._run(TokenTree.chain(token))
        self._model.commit(())
        return said

    def _go_back(self) -> None:
        self._model.truncate(self._depth)
        self._model.prefill(self._tokens[self._model.length : self._depth])

    def _goes_on(self, steps: int = _LAST) -> bool:
        """Whether steps after what the cache holds say what they said."""
        first = self._model.length
        said = [self._step(token) for token in self._tokens[first : first + steps]]
        return said == self._said[first - self._depth :][:steps]

    def widest(self, most: int, *, thorough: bool) -> int:
        """The most rows of a chain up to which every one agrees: two passes of each, or the whole text."""
        widths = range(2, most + 1)
        return next((width - 1 for width in widths if not self._agrees(width, thorough)), most)

    def _agrees(self, width: int, thorough: bool) -> bool:
        """Whether passes of so many rows do, one after another; of the first one the last half is wrong."""
        self._go_back()
        end = self._count if thorough else min(self._count, 2 * width)
        done, right = 0, width // 2
        while done + width <= end:
            root, *rest = self._tokens[self._depth + done :][:right]
            wrong = self._tokens[: width - right]
            said = self._run(TokenTree.chain(root, [*rest, *wrong]))
            self._model.commit(tuple(range(1, right)))
            if said[:right] != self._said[done : done + right]:
                return False
            done, right = done + right, width
        return self._goes_on(1)

    def trees_agree(self) -> bool:
        """Whether the right path of one tree after another does, with wrong turns before its nodes."""
        self._go_back()
        for first in range(0, 2 * _TREES, 2):
            root, right = self._tokens[self._depth + first :][:2]
            wrong = self._tokens[first]
            tree = TokenTree((root, wrong, right, wrong), (-1, 0, 0, 1), (None,) * 4)
            said = self._run(tree)
            self._model.commit((2,))
            if [said[0], said[2]] != self._said[first : first + 2]:
                return False
        return self._goes_on()

    def reading_agrees(self) -> bool:
        """Whether it makes no difference what of the text was read at once, in pieces, and in steps."""
        self._model.truncate(0)
        pieces = cycle(_PIECES)
        while (start := self._model.length) < self._depth:
            size = min(next(pieces), self._depth - start)
            if size == 1:
                self._step(self._tokens[start])
            else:
                self._model.prefill(self._tokens[start : start + size])
        self._model.prefill(self._tokens[self._depth : self._depth + self._count])
        if self._goes_on():
            return True
        self._model.truncate(0)  # what was read like this is no beginning for other trials
        return False


def restricted_to(able: Capabilities, found: BitExactPasses) -> Capabilities:
    """What a model can do where only passes that agree to the bit are wanted.

    Memories that take tokens back by running some again, and drafts on the target's own memory, run passes
    of any width: those are left only where that makes no difference. Where nothing may be guessed no pass has
    two rows, not even one that begins with what is run again.
    """
    width = found.width if found.reading or able.partial_truncate else 1
    exact = replace(able, exact=True, prefix_reuse_exact=found.reading)
    if not able.rollback:
        return exact
    if width == 1:
        why = "no wider pass of it gives the very logits of single steps, and --exact was asked for"
        return replace(
            exact, rollback=False, tree=False, reason=why, max_width=1, self_draft_methods=frozenset()
        )
    return replace(
        exact,
        max_width=width,
        tree=able.tree and found.branches,
        self_draft_methods=able.self_draft_methods if found.reading else frozenset(),
    )
