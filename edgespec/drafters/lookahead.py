"""Lookahead decoding (arXiv 2402.02057): draft with the target's own passes, without a draft model.

In addition to the tokens to verify, each pass runs a window of guesses about future tokens. The window has W
columns, one per future position, and a column has N - 1 levels. Each level contains the target's predictions
from the previous level (Jacobi iteration). When all levels of a column are complete, the column is added to a
pool as an n-gram. The draft consists of the n-grams in the pool that begin with the last token. Lookahead
decoding needs wider passes, but no extra space in the target's KV cache.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from edgespec.backends.base import Capabilities
from edgespec.costs.curve import CostCurve
from edgespec.drafters.base import Drafter
from edgespec.drafters.lookahead_window import (
    HitRate,
    LookaheadWindow,
    choose_window,
    expected_speed_up,
    smallest_window,
)
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.prefix import common_prefix_length
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.errors import OptionError

__all__ = ["LookaheadDrafter", "NgramPool"]

# Depth limit of the first window, which is chosen before the draft length is known.
_INITIAL_DRAFT_LENGTH = 16
# Number of emitted tokens between checks that the window still saves time.
_CHECK_INTERVAL_TOKENS = 64
# New columns are filled with tokens drawn at random from this many recent tokens.
_RECENT_TOKENS = 512


class NgramPool:
    """A pool of n-grams that can be looked up by their first token (arXiv 2402.02057, section 3.2).

    The pool holds at most `MAX_PER_TOKEN` n-grams per first token and `MAX_NGRAMS` in total. It evicts the
    least recently added n-grams first.
    """

    MAX_NGRAMS = 1 << 14
    MAX_PER_TOKEN = 16

    def __init__(self) -> None:
        self._continuations: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Return the number of n-grams in the pool."""
        return self._count

    def add(self, ngram: tuple[int, ...]) -> None:
        """Add an n-gram of at least two tokens. If the pool already contains it, mark it as most recent."""
        token, continuation = ngram[0], ngram[1:]
        continuations = self._continuations.setdefault(token, OrderedDict())
        self._continuations.move_to_end(token)
        self._count += continuation not in continuations
        continuations[continuation] = None
        continuations.move_to_end(continuation)
        if len(continuations) > self.MAX_PER_TOKEN:
            continuations.popitem(last=False)
            self._count -= 1
        if self._count > self.MAX_NGRAMS:
            oldest = next(iter(self._continuations))
            self._continuations[oldest].popitem(last=False)
            self._count -= 1
            if not self._continuations[oldest]:
                del self._continuations[oldest]

    def after(self, token: int, count: int) -> list[tuple[int, ...]]:
        """Return the remaining tokens of up to `count` n-grams that begin with `token`, most recent first."""
        return list(islice(reversed(self._continuations.get(token, OrderedDict())), count))


@dataclass(slots=True)
class _Column:
    """One column of the window of guessed tokens.

    Attributes:
        tokens: The tokens in the column, starting with level 0.
        predicted: Number of tokens at the end that were predicted by the target. The tokens before them are
            the initial random tokens.
        next: The token that the target predicted after the column in the last verify pass. None if the pass
            did not include the column.
    """

    tokens: list[int]
    predicted: int = 0
    next: int | None = field(default=None)


@dataclass(slots=True)
class _Trial:
    """Measures how many tokens of the candidate n-grams were right, given the tokens emitted since.

    This works even if the candidates were not verified.
    """

    candidates: list[tuple[int, ...]]
    emitted: list[int] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """Number of correct tokens so far in the best candidate."""
        matches = (common_prefix_length(candidate, self.emitted) for candidate in self.candidates)
        return max(matches, default=0)

    @property
    def decided(self) -> bool:
        """Whether `hits` is final, so that further tokens cannot change it."""
        return not any(
            len(self.emitted) < len(candidate) and list(candidate[: len(self.emitted)]) == self.emitted
            for candidate in self.candidates
        )


class LookaheadDrafter(Drafter):
    """Drafts with the target's own passes (lookahead decoding, Fu et al. 2024, arXiv 2402.02057).

    Drafts depend only on emitted tokens, earlier passes and the drafter's own random numbers. Tokens in the
    window are sampled with the random numbers of `Stream.TOKEN`. Rejection sampling uses another stream to
    accept tokens, so it remains unbiased. Only the hit rate is kept between replies.

    Args:
        capabilities: What kinds of drafts the target can verify. If it cannot verify trees, n-grams from the
            sequence are drafted as chains.
        curve: Cost of verify passes by width. By default, wider passes are assumed to be as fast as narrow
            ones.
        window: Window to use regardless of its cost. By default, the fastest window is chosen.

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
        self._smallest = smallest_window(capabilities)
        self._curve = curve or CostCurve((1,), (1.0,))
        self._forced = window is not None
        if window and not window.fits(capabilities):
            raise OptionError(
                f"the lookahead window {window} needs passes of {window.rows} tokens and {window.leaves}"
                f" branches, but the target supports only {capabilities.max_width} tokens and"
                f" {capabilities.max_branches if capabilities.tree else 1} branches",
                "choose a smaller window",
            )
        self._window = window
        self._hit_rate = HitRate()
        self._draft_length = 0
        if not self._forced:
            self._window = choose_window(self._curve, capabilities, _INITIAL_DRAFT_LENGTH, self._hit_rate)
        self._clear()

    def _clear(self) -> None:
        self._pool = NgramPool()
        self._columns: list[_Column] = []
        self._recent: deque[int] = deque(maxlen=_RECENT_TOKENS)
        self._random = random.Random(0)
        self._trial: _Trial | None = None
        self._tokens_since_check = 0

    def note(self) -> str:
        if self._window is None:
            return f"lookahead is off: {self._reason_off()}"
        line = f"lookahead runs with {self._window} ({self._estimate(self._window)})"
        if self._capabilities.tree:
            return line
        return f"{line}; only n-grams of the text, because {self._capabilities.reason}"

    def _reason_off(self) -> str:
        if not self._smallest.fits(self._capabilities):
            rows, leaves = self._smallest.rows, self._smallest.leaves
            return f"the target does not support passes of {rows} tokens and {leaves} branches"
        if 0 < self._draft_length < self._smallest.depth:
            return f"it needs a draft length of at least {self._smallest.depth}, not {self._draft_length}"
        return f"no window is faster here ({self._estimate(self._smallest)})"

    def _estimate(self, window: LookaheadWindow) -> str:
        tokens = 1 + self._hit_rate.expected_tokens(window)
        cost = self._curve.v(window.rows)
        return f"a pass of {window.rows} tokens takes {cost:.2f} times as long and yields {tokens:.2f} tokens"

    def begin(self, tokens: Sequence[int]) -> None:
        self._clear()
        self._draft_length = 0
        self._add_tokens(tokens[-NgramPool.MAX_NGRAMS :])

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        self._update_window(draft_length)
        last = self._recent[-1]
        shape = self._window or self._smallest
        candidates = [ngram[: shape.levels] for ngram in self._pool.after(last, shape.candidates)]
        if self._trial is None:
            self._trial = _Trial(candidates)
        if self._window is None:
            return TokenTree.chain(last)
        if not self._capabilities.tree:
            return TokenTree.chain(last, candidates[0][:draft_length] if candidates else ())
        builder = TreeBuilder([last])
        for candidate in candidates:
            builder.add_path(0, candidate[:draft_length])
        self._fill_columns(shape)
        parent = 0
        for position, column in enumerate(self._columns):
            if position + len(column.tokens) > draft_length:
                break
            parent = builder.add_path(parent, column.tokens[:1])
            builder.add_path(parent, column.tokens[1:])
        return builder.build()

    def _update_window(self, draft_length: int) -> None:
        """Choose the window at the start of a reply and after every `_CHECK_INTERVAL_TOKENS` tokens."""
        if self._forced:
            return
        window = self._window
        if draft_length > self._draft_length:
            self._draft_length = draft_length
        elif self._tokens_since_check < _CHECK_INTERVAL_TOKENS:
            return
        elif window and expected_speed_up(self._curve, window, self._hit_rate) > 1:
            self._tokens_since_check = 0
            # Keep a window that saves time. Another might be faster, but would first have to be filled.
            return
        self._tokens_since_check = 0
        self._window = choose_window(self._curve, self._capabilities, self._draft_length, self._hit_rate)
        if self._window != window:
            self._columns, self._trial = [], None

    def _fill_columns(self, shape: LookaheadWindow) -> None:
        while len(self._columns) < shape.columns:
            self._columns.append(_Column(self._random.choices(self._recent, k=shape.levels)))

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        """Sample the token after each column with the target's own sampler settings."""
        nodes = tree.walk([column.tokens[0] for column in self._columns])[1:]
        for node, column in zip(nodes, self._columns, strict=False):
            sampler.push(column.tokens[0])
            column.next = self._token_after(node, column.tokens[1:], tree, logits, sampler)
        sampler.pop(len(nodes))

    @staticmethod
    def _token_after(
        node: int, tokens: Sequence[int], tree: TokenTree, logits: Logits, sampler: Sampler
    ) -> int | None:
        """Return the token that the target predicts after `node` and `tokens`, or None if not in the tree."""
        path = tree.walk(tokens, node)
        if len(path) <= len(tokens):
            return None
        for token in tokens:
            sampler.push(token)
        predicted = sampler.token(logits, path[-1])
        sampler.pop(len(tokens))
        return predicted

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._record_hits(tokens)
        columns: list[_Column] = []
        for column in self._columns:
            if column.next is None:
                break  # the pass did not include the columns after this one either
            predicted = column.predicted + 1
            if predicted >= len(column.tokens):
                self._pool.add((*column.tokens, column.next))
            columns.append(_Column([*column.tokens[1:], column.next], min(predicted, len(column.tokens))))
        # Each column advanced by one position. Drop the columns for positions that have been emitted.
        self._columns = columns[max(0, len(tokens) - 1) :]
        self._add_tokens(tokens)
        self._tokens_since_check += len(tokens)

    def _record_hits(self, tokens: tuple[int, ...]) -> None:
        """Compare the candidates with the emitted tokens and update the hit rate."""
        if self._trial:
            self._trial.emitted += tokens
            if self._trial.decided:
                self._hit_rate.record(self._window or self._smallest, self._trial.hits)
                self._trial = None

    def _add_tokens(self, tokens: Sequence[int]) -> None:
        ngram_tokens = (self._window or self._smallest).ngram_tokens
        for token in tokens:
            self._recent.append(token)
            if len(self._recent) >= ngram_tokens:
                self._pool.add(tuple(self._recent[i] for i in range(-ngram_tokens, 0)))

    def close(self) -> None:
        self._clear()
