"""Lookahead decoding (arXiv 2402.02057): draft with the target's own passes, without a draft model.

In addition to the tokens to verify, each pass runs a window of guesses about future tokens. The window has W
columns, one per future position, with N - 1 levels each. Each level contains the target's predictions from
the previous level (Jacobi iteration). Once all levels of a column are filled, the column is added to a pool
as an n-gram. The draft consists of the n-grams in the pool that start with the last token. Lookahead decoding
needs wider passes, but no extra space in the target's KV cache.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from edgespec.engine.acceptance import Acceptance, best_after
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.errors import OptionError
from edgespec.methods.base import Drafter
from edgespec.methods.constants import (
    LOOKAHEAD_DRAFT_LENGTH,
    LOOKAHEAD_PASSES_PER_HIT,
    LOOKAHEAD_PROMPT_TOKENS,
    LOOKAHEAD_RECENT_TOKENS,
    LOOKAHEAD_TOKEN_PROBABILITY,
    MAX_NGRAMS_PER_TOKEN,
)
from edgespec.methods.costs.curve import CostCurve
from edgespec.model.model_facts import Capabilities

__all__ = ["LookaheadDrafter", "LookaheadWindow", "NgramPool", "choose_window"]


class LookaheadWindow(NamedTuple):
    """Dimensions of the lookahead window, called W, N and G in the paper (arXiv 2402.02057).

    Attributes:
        columns: W, the number of future tokens predicted in parallel. If 0, only n-grams that occur in the
            sequence are drafted.
        ngram_tokens: N, the length of an n-gram, including its first token, which is the lookup key.
        candidates: G, the number of n-grams verified per pass.
    """

    columns: int
    ngram_tokens: int
    candidates: int

    def __str__(self) -> str:
        return f"W {self.columns}, N {self.ngram_tokens}, G {self.candidates}"

    @property
    def levels(self) -> int:
        """Number of tokens in an n-gram after the first token, which is the lookup key."""
        return self.ngram_tokens - 1

    @property
    def rows(self) -> int:
        """Maximum number of tokens in a verify pass."""
        return 1 + self.levels * (self.columns + self.candidates)

    @property
    def leaves(self) -> int:
        """Maximum number of leaves in a draft tree."""
        return (self.columns if self.levels > 1 else min(self.columns, 1)) + self.candidates

    @property
    def depth(self) -> int:
        """Maximum depth of a draft tree."""
        return self.levels + max(0, self.columns - 1)

    @property
    def expected_tokens(self) -> float:
        """Typical number of accepted tokens per pass, as modelled in section 4 of arXiv 2402.02057."""
        tries = min(self.candidates, self.columns or 1)
        right = sum(1 - (1 - LOOKAHEAD_TOKEN_PROBABILITY**i) ** tries for i in range(1, self.ngram_tokens))
        return right / LOOKAHEAD_PASSES_PER_HIT

    def fits(self, capabilities: Capabilities) -> bool:
        """Return whether a target with these capabilities can verify this window's draft trees."""
        max_leaves = capabilities.max_branches if capabilities.tree else 1
        return self.rows <= capabilities.max_width and self.leaves <= max_leaves


# Window sizes to choose from if the target can verify token trees. The largest are similar to those in the
# paper (arXiv 2402.02057).
_TREE_WINDOWS = [LookaheadWindow(w, n, g) for w in range(2, 17) for n in range(3, 7) for g in range(1, w + 1)]
# Window sizes to choose from if the target can verify only chains.
_CHAIN_WINDOWS = [LookaheadWindow(0, n, 1) for n in range(3, 7)]


def choose_window(curve: CostCurve, capabilities: Capabilities, draft_length: int) -> LookaheadWindow | None:
    """Return the window with the highest expected speed-up, or None if none speeds up decoding."""

    def speed_up(window: LookaheadWindow) -> float:
        return (1 + window.expected_tokens) / curve.v(window.rows)

    windows = _TREE_WINDOWS if capabilities.tree else _CHAIN_WINDOWS
    fitting = (window for window in windows if window.depth <= draft_length and window.fits(capabilities))
    best = max(fitting, key=lambda window: (speed_up(window), -window.rows), default=None)
    return best if best and speed_up(best) > 1 else None


class NgramPool:
    """Stores the most recent n-grams that begin with each token (arXiv 2402.02057, section 3.2)."""

    def __init__(self) -> None:
        # Maps each first token to the remaining tokens of its n-grams, oldest n-gram first.
        self._continuations: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: tuple[int, ...]) -> None:
        """Add an n-gram of at least two tokens to the pool, or mark a known one as most recent."""
        continuations = self._continuations.setdefault(ngram[0], {})
        continuations.pop(ngram[1:], None)
        continuations[ngram[1:]] = None
        if len(continuations) > MAX_NGRAMS_PER_TOKEN:
            del continuations[next(iter(continuations))]

    def after(self, token: int, count: int) -> list[tuple[int, ...]]:
        """Return the remaining tokens of up to `count` n-grams that begin with `token`, most recent first."""
        return list(islice(reversed(self._continuations.get(token, {})), count))


@dataclass(slots=True)
class _Column:
    """A sequence of guessed future tokens in lookahead decoding.

    Attributes:
        tokens: The guessed tokens, initially random.
        predicted: Number of tokens at the end of `tokens` that the target predicted.
        next: The token that the target predicted after `tokens`, or None before verification.
    """

    tokens: list[int]
    predicted: int = 0
    next: int | None = None


class LookaheadDrafter(Drafter):
    """Implements lookahead decoding (Fu et al. 2024, arXiv 2402.02057), which needs no draft model.

    Drafts n-grams that occurred earlier in the sequence. If the target can verify trees, n-grams that the
    target has predicted are also drafted. N-grams are not kept between replies.

    Args:
        capabilities: Capabilities of the target.
        curve: Measured duration of verify passes by width. By default, a typical curve is assumed.
        window: Size of the lookahead window. By default, the fastest size is chosen.

    Raises:
        OptionError: The target cannot verify `window`.
    """

    name = "lookahead"

    def __init__(
        self,
        capabilities: Capabilities,
        curve: CostCurve | None = None,
        *,
        window: LookaheadWindow | None = None,
    ) -> None:
        self._capabilities = capabilities
        self._curve = curve or CostCurve((1,), (1.0,))
        if window and not window.fits(capabilities):
            raise OptionError(
                f"the lookahead window {window} is too large: it needs to check {window.rows} tokens and"
                f" {window.leaves} branches at once, but the model supports only {capabilities.max_width}"
                f" tokens and {capabilities.max_branches if capabilities.tree else 1} branches",
                "choose a smaller window",
                code="option_not_supported",
            )
        self._forced = window is not None
        self._smallest = (_TREE_WINDOWS if capabilities.tree else _CHAIN_WINDOWS)[0]
        self._draft_length = LOOKAHEAD_DRAFT_LENGTH
        self._window = window or choose_window(self._curve, capabilities, self._draft_length)
        self._clear()

    def _clear(self) -> None:
        self._pool = NgramPool()
        self._columns: list[_Column] = []
        self._recent: deque[int] = deque(maxlen=LOOKAHEAD_RECENT_TOKENS)
        self._random = random.Random(0)

    def note(self) -> str:
        window = self._window
        if window is None:
            smallest = self._smallest
            if not smallest.fits(self._capabilities):
                rows, leaves = smallest.rows, smallest.leaves
                why = f"the model cannot check {rows} tokens and {leaves} branches at once"
            elif self._draft_length < smallest.depth:
                why = f"it needs a draft length of at least {smallest.depth}, not {self._draft_length}"
            else:
                why = f"it would not save time here ({self._estimate(smallest)})"
            return f"lookahead is off: {why}"
        line = f"lookahead runs with {window} ({self._estimate(window)})"
        if self._capabilities.tree:
            return line
        return f"{line}; it can only reuse phrases from the text, because {self._capabilities.reason}"

    def _estimate(self, window: LookaheadWindow) -> str:
        cost, tokens = self._curve.v(window.rows), 1 + window.expected_tokens
        return (
            f"checking {window.rows} tokens takes {cost:.2f} times as long as checking one, and yields"
            f" {tokens:.2f} tokens on average"
        )

    def begin(self, tokens: Sequence[int]) -> None:
        self._clear()
        self._draft_length = 0
        self._add_tokens(tokens[-LOOKAHEAD_PROMPT_TOKENS:])

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        # Keep the lookahead window when the draft length shrinks near the end of a reply.
        if draft_length > self._draft_length and not self._forced:
            self._window = choose_window(self._curve, self._capabilities, draft_length)
        self._draft_length = max(self._draft_length, draft_length)
        last, window = self._recent[-1], self._window
        if window is None:
            return TokenTree.chain(last)
        candidates = [ngram[: window.levels] for ngram in self._pool.after(last, window.candidates)]
        if not self._capabilities.tree:
            return TokenTree.chain(last, candidates[0][:draft_length] if candidates else ())
        builder = TreeBuilder([last])
        for candidate in candidates:
            builder.add_path(0, candidate[:draft_length])
        while len(self._columns) < window.columns:
            self._columns.append(_Column(self._random.choices(self._recent, k=window.levels)))
        parent = 0
        for position, column in enumerate(self._columns):
            if position + len(column.tokens) > draft_length:
                break
            parent = builder.add_path(parent, column.tokens[:1])
            builder.add_path(parent, column.tokens[1:])
        return builder.build()

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        nodes = tree.walk([column.tokens[0] for column in self._columns])[1:]
        for node, column in zip(nodes, self._columns, strict=False):
            first, *others = column.tokens
            sampler.push(first)
            path = tree.walk(others, node)
            if len(path) > len(others):
                for token in others:
                    sampler.push(token)
                # If no token can be chosen after this guess, the column ends here.
                column.next = best_after(sampler, logits, path[-1])
                sampler.pop(len(others))
        sampler.pop(len(nodes))

    def commit(self, tokens: tuple[int, ...]) -> None:
        columns: list[_Column] = []
        for column in self._columns:
            if column.next is None:
                break
            predicted = column.predicted + 1
            if predicted >= len(column.tokens):
                self._pool.add((*column.tokens, column.next))
            columns.append(_Column([*column.tokens[1:], column.next], min(predicted, len(column.tokens))))
        self._columns = columns[max(0, len(tokens) - 1) :]
        self._add_tokens(tokens)

    def _add_tokens(self, tokens: Sequence[int]) -> None:
        ngram_tokens = (self._window or self._smallest).ngram_tokens
        for token in tokens:
            self._recent.append(token)
            if ngram_tokens <= len(self._recent):
                self._pool.add(tuple(self._recent[i] for i in range(-ngram_tokens, 0)))

    def close(self) -> None:
        self._clear()
