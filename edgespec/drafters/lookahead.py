"""Lookahead decoding: the target guesses for itself, many positions at once (Fu et al., arXiv 2402.02057).

Every pass carries a Jacobi window beside what it verifies: W columns, one for each position ahead, of N - 1
levels, each level what the target said of the one before. A column that went through a pass gives an n-gram
for the pool; n-grams of the pool that begin with the last token are what is verified. No second model, and
nothing is kept in the target's memory: it costs the rows of a wider pass.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.backends.base import Capabilities
from edgespec.costs.curve import CostCurve
from edgespec.drafters.base import Drafter
from edgespec.drafters.lookahead_window import HitRate, LookaheadWindow, choose_window, smallest, speed_up
from edgespec.drafters.ngram_pool import NgramPool
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.prefix import common_prefix_length
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.errors import OptionError

__all__ = ["LookaheadDrafter"]

# How deep a draft may be as long as nobody has said so.
_ANY_DEPTH = 16
# Emitted tokens between two looks at whether it pays.
_LOOK_TOKENS = 64
# New columns begin with words of the text: of this many last ones.
_WORDS = 512


@dataclass(slots=True)
class _Column:
    """One column of the window: its tokens, level 0 first, of which the last `said` the target said."""

    tokens: list[int]
    said: int = 0
    next: int | None = field(default=None)


@dataclass(slots=True)
class _Trial:
    """Candidates and what was emitted since they were looked up, whether they were verified or not."""

    candidates: list[tuple[int, ...]]
    emitted: list[int] = field(default_factory=list)

    @property
    def right(self) -> int:
        """How many tokens the best candidate was right in."""
        return max((common_prefix_length(known, self.emitted) for known in self.candidates), default=0)

    @property
    def settled(self) -> bool:
        """True when more text would change nothing."""
        return not any(
            len(self.emitted) < len(known) and list(known[: len(self.emitted)]) == self.emitted
            for known in self.candidates
        )


class LookaheadDrafter(Drafter):
    """Guesses with the target's own passes. Everything it guesses is a certain guess, without a law.

    What it proposes follows from the text, from its own dice and from earlier passes: what it draws for its
    window takes the noise of `Stream.TOKEN`, which rejection mode's dice never touch, so that what is
    accepted stays unbiased. When a reply begins it keeps only how lucky it has been.

    able: what the target can do. Without branches it proposes n-grams of the text only, as chains.
    curve: what passes cost; without one they are taken to be cheap (`gentle`).
    window: the shape, whatever it costs. Raises OptionError when that does not fit the target.
    """

    name = "lookahead"

    def __init__(
        self,
        able: Capabilities,
        curve: CostCurve | None = None,
        *,
        window: LookaheadWindow | None = None,
    ) -> None:
        self._able = able
        self._least = smallest(able)
        self._curve = curve or CostCurve((1,), (1.0,))
        self._forced = window is not None
        if window and not window.fits(able):
            raise OptionError(
                f"{window} needs {window.rows} rows and {window.leaves} branches; the target takes"
                f" {able.max_width} and {able.max_branches if able.tree else 1}",
                "choose a smaller window",
            )
        self._window = window
        self._luck = HitRate()
        self._depth = 0
        if not self._forced:
            self._window = choose_window(self._curve, able, _ANY_DEPTH, self._luck)
        self._reset()

    def _reset(self) -> None:
        self._pool = NgramPool()
        self._columns: list[_Column] = []
        self._text: deque[int] = deque(maxlen=_WORDS)
        self._random = random.Random(0)
        self._trial: _Trial | None = None
        self._unlooked = 0

    def note(self) -> str:
        if self._window is None:
            return f"lookahead is off: {self._why_off()}"
        line = f"lookahead runs {self._window} ({self._reckoning(self._window)})"
        return line if self._able.tree else f"{line}; n-grams of the text only: {self._able.reason}"

    def _why_off(self) -> str:
        if not self._least.fits(self._able):
            rows, leaves = self._least.rows, self._least.leaves
            return f"its smallest tree, {rows} rows and {leaves} branches, is more than the target takes"
        if 0 < self._depth < self._least.depth:
            return f"its smallest draft is {self._least.depth} deep, the draft length {self._depth}"
        return f"no window is worth its rows here ({self._reckoning(self._least)})"

    def _reckoning(self, window: LookaheadWindow) -> str:
        tokens = 1 + self._luck.gain(window)
        return f"{window.rows} rows cost {self._curve.v(window.rows):.2f} plain steps for {tokens:.2f} tokens"

    def begin(self, tokens: Sequence[int]) -> None:
        self._reset()
        self._depth = 0
        self._learn(tokens[-NgramPool.MOST :])

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        self._look(draft_length)
        last = self._text[-1]
        shape = self._window or self._least
        candidates = [known[: shape.levels] for known in self._pool.after(last, shape.candidates)]
        if self._trial is None:
            self._trial = _Trial(candidates)
        if self._window is None:
            return TokenTree.chain(last)
        if not self._able.tree:
            return TokenTree.chain(last, candidates[0][:draft_length] if candidates else ())
        grown = TreeBuilder([last])
        for candidate in candidates:
            grown.add_path(0, candidate[:draft_length])
        self._fill(shape)
        before = 0
        for number, column in enumerate(self._columns):
            if number + len(column.tokens) > draft_length:
                break
            before = grown.add_path(before, column.tokens[:1])
            grown.add_path(before, column.tokens[1:])
        return grown.build()

    def _look(self, draft_length: int) -> None:
        """Does it pay? Asked when a reply begins, and now and then."""
        if self._forced:
            return
        window = self._window
        if draft_length > self._depth:
            self._depth = draft_length
        elif self._unlooked < _LOOK_TOKENS:
            return
        elif window and speed_up(self._curve, window, self._luck) > 1:
            self._unlooked = 0
            return  # another one might pay more, but has to be worked in before it gives anything
        self._unlooked = 0
        self._window = choose_window(self._curve, self._able, self._depth, self._luck)
        if self._window != window:
            self._columns, self._trial = [], None

    def _fill(self, shape: LookaheadWindow) -> None:
        while len(self._columns) < shape.columns:
            self._columns.append(_Column(self._random.choices(self._text, k=shape.levels)))

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        """Ask for the target's token after each column, with the noise and the penalties of its place."""
        nodes = tree.walk([column.tokens[0] for column in self._columns])[1:]
        for node, column in zip(nodes, self._columns, strict=False):
            sampler.push(column.tokens[0])
            column.next = self._after(node, column.tokens[1:], tree, logits, sampler)
        sampler.pop(len(nodes))

    @staticmethod
    def _after(
        node: int, tokens: Sequence[int], tree: TokenTree, logits: Logits, sampler: Sampler
    ) -> int | None:
        """What the target says after `node` and these tokens; None where a cut took them from the tree."""
        path = tree.walk(tokens, node)
        if len(path) <= len(tokens):
            return None
        for token in tokens:
            sampler.push(token)
        said = sampler.token(logits, path[-1])
        sampler.pop(len(tokens))
        return said

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._count(tokens)
        columns: list[_Column] = []
        for column in self._columns:
            if column.next is None:
                break  # what stands further ahead was not in the pass either
            said = column.said + 1
            if said >= len(column.tokens):
                self._pool.add((*column.tokens, column.next))
            columns.append(_Column([*column.tokens[1:], column.next], min(said, len(column.tokens))))
        # One token on, every level is its successor; more tokens, and the nearest columns are behind.
        self._columns = columns[max(0, len(tokens) - 1) :]
        self._learn(tokens)
        self._unlooked += len(tokens)

    def _count(self, tokens: tuple[int, ...]) -> None:
        """How far the best candidate was right; where nothing is verified, the text shows it later."""
        if self._trial:
            self._trial.emitted += tokens
            if self._trial.settled:
                self._luck.count(self._window or self._least, self._trial.right)
                self._trial = None

    def _learn(self, tokens: Sequence[int]) -> None:
        size = (self._window or self._least).size
        for token in tokens:
            self._text.append(token)
            if len(self._text) >= size:
                self._pool.add(tuple(self._text[i] for i in range(-size, 0)))

    def close(self) -> None:
        self._reset()
