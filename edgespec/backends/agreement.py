"""Which passes of a loaded model say the very same, bit for bit: tried out, and not believed.

A kernel may add up in another order where a pass is wider, or the text before it longer; then logits differ
in their last places, and a near-tie can flip. `--exact` uses what was found to agree, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, LanguageModel, Progress
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError

__all__ = ["Agreement", "find_agreement", "held_to"]

# The longest draft that `auto` takes, and its root.
_MOST_WIDTH = 17
# After so many tokens: llama.cpp's attention has a kernel of its own for single steps beyond 256.
_DEPTHS = (290, 40)
# A text is read again in these: few rows, and more than a tile of any kernel has.
_PIECES = (5, 37, 1, 3, 100, 64, 16, 1, 2, 130)
_TREES = 3


@dataclass(frozen=True, slots=True)
class Agreement:
    """What gives the logits of single steps to the last bit, and leaves a cache that goes on giving them.

    width: passes of 2 to so many rows do; 1 where none does. branches: token trees of as many do, too.
    reading: a text may have been read in any passes, and token by token.
    """

    width: int
    branches: bool
    reading: bool


def find_agreement(model: LanguageModel, progress: Progress | None = None) -> Agreement:
    """Try passes of a model after a few and after some hundred tokens; its cache is empty afterwards.

    It takes three readings of a few hundred tokens, about 80 single steps and 40 wider passes.
    Raises CancelledError where `progress` (called with what, fraction) says False or the model is
    interrupted.
    """
    able = model.facts.capabilities
    width = min(_MOST_WIDTH, able.max_width) if able.rollback else 1
    branches, reading = able.rollback and able.tree, True
    model.truncate(0)
    try:
        for i, depth in enumerate(_DEPTHS):
            depth = min(depth, model.room - 2 * _MOST_WIDTH)
            if depth < 1:
                return Agreement(1, False, False)
            _tell(progress, i / len(_DEPTHS))
            trial = _Trial(model, depth, max(width, 2 * _TREES) + 2)
            width = trial.widest(width)
            branches = branches and width > 3 and trial.trees_agree()
            reading = reading and trial.reading_agrees()
    finally:
        model.truncate(0)
    return Agreement(width, branches, reading)


def _tell(progress: Progress | None, fraction: float) -> None:
    if progress and not progress("finding out which passes agree to the bit", fraction):
        raise CancelledError("loading was cancelled")


class _Trial:
    """A text of `depth` tokens and `count` more, whose logits single steps gave after one reading."""

    def __init__(self, model: LanguageModel, depth: int, count: int) -> None:
        self._model, self._depth = model, depth
        self._everything = np.arange(model.facts.vocab_size)
        size = model.facts.vocab_size
        self._tokens = np.random.default_rng(depth).integers(size // 8, size, depth + count).tolist()
        model.truncate(0)
        model.prefill(self._tokens[:depth])
        self._steps = [self._step(token) for token in self._tokens[depth:]]

    def _rows(self, tree: TokenTree) -> list[NDArray[np.floating]]:
        logits = self._model.verify(tree)
        return [logits.at(row, self._everything).copy() for row in range(tree.width)]

    def _step(self, token: int) -> NDArray[np.floating]:
        (row,) = self._rows(TokenTree.chain(token))
        self._model.commit(())
        return row

    def _go_back(self) -> None:
        self._model.truncate(self._depth)
        self._model.prefill(self._tokens[self._model.length : self._depth])

    def _is(self, rows: Sequence[NDArray[np.floating]], first: int) -> bool:
        """Whether these are the logits after tokens `first` and up of those beyond the depth."""
        return all(map(np.array_equal, rows, self._steps[first : first + len(rows)]))

    def _goes_on(self, first: int) -> bool:
        """Whether a step after a pass still says what it said."""
        return self._is([self._step(self._tokens[self._depth + first])], first)

    def widest(self, most: int) -> int:
        """The most rows of a chain up to which every one agrees."""
        for width in range(2, most + 1):
            self._go_back()
            root, *rest = self._tokens[self._depth : self._depth + width]
            rows = self._rows(TokenTree.chain(root, rest))
            self._model.commit(tuple(range(1, width)))
            if not (self._is(rows, 0) and self._goes_on(width)):
                return width - 1
        return most

    def trees_agree(self) -> bool:
        """Whether the right path of one tree after another does, with wrong turns before its nodes."""
        self._go_back()
        for turn in range(_TREES):
            first = 2 * turn
            root, right = self._tokens[self._depth + first : self._depth + first + 2]
            wrong = self._tokens[turn]
            tree = TokenTree((root, wrong, right, wrong), (-1, 0, 0, 1), (None,) * 4)
            rows = self._rows(tree)
            self._model.commit((2,))
            if not self._is([rows[0], rows[2]], first):
                return False
        return self._goes_on(2 * _TREES)

    def reading_agrees(self) -> bool:
        """Whether the text read in pieces leaves what it left when it was read at once."""
        self._model.truncate(0)
        for turn in range(self._depth):
            start = self._model.length
            if start == self._depth:
                break
            size = min(_PIECES[turn % len(_PIECES)], self._depth - start)
            if size == 1:
                self._step(self._tokens[start])
            else:
                self._model.prefill(self._tokens[start : start + size])
        return all(self._goes_on(i) for i in range(len(self._steps)))


def held_to(able: Capabilities, found: Agreement) -> Capabilities:
    """What a model can do where only passes that agree to the bit are wanted.

    Memories that take tokens back by running some again, and drafts on the target's own memory, run passes
    of any width: those are left only where that makes no difference.
    """
    width = found.width if found.reading or able.cuts else 1
    exact = replace(able, exact=True, continues=found.reading)
    if not able.rollback:
        return exact
    if width == 1:
        why = "no wider pass of it gives the very logits of single steps, and --exact was asked for"
        return replace(exact, rollback=False, tree=False, reason=why, self_drafts=frozenset())
    return replace(
        exact,
        max_width=width,
        tree=able.tree and found.branches,
        self_drafts=able.self_drafts if found.reading else frozenset(),
    )
