"""Train a draft model between replies on the tokens that it predicted incorrectly.

Implements online speculative decoding (OSD, arXiv 2310.07177): whenever the target rejects a draft token, the
target's probabilities for that token are recorded. The draft model is trained on them while no reply is being
generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.optional_features import Trainer, TrainingExample
from edgespec.drafters.array_store import ArrayStore
from edgespec.drafters.draft_cache import DraftCache, replace_unknown_ids
from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError

__all__ = ["OnlineTrainer"]

# All limits below are heuristics. Number of the target's most probable tokens to record for each rejected
# draft token.
TARGET_TOKENS = 16
# Number of tokens per training example. The first `_CONTEXT_TOKENS` of them only provide context.
EXAMPLE_TOKENS = 96
_CONTEXT_TOKENS = 32
_MAX_EXAMPLES = 128
# Number of training steps per new example, and maximum number of steps per idle period.
_STEPS_PER_EXAMPLE = 4
_MAX_STEPS = 64
# Approximate number of recent tokens on which the original and the trained weights are compared, and minimum
# number of evaluated tokens for a comparison.
_EVALUATION_TOKENS = 1024
_MIN_EVALUATION_TOKENS = 64
_EMPTY = np.zeros(0)


@dataclass(frozen=True, slots=True)
class _Rejection:
    """The target's probabilities for the token after `position`, where a draft token was rejected."""

    position: int
    best: NDArray[np.int64]
    probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Number of reply tokens predicted correctly by the original weights and by the trained weights."""

    tokens: int
    original_hits: int
    adapted_hits: int


class OnlineTrainer:
    """Trains an adapter for a draft model in idle time. The model's original weights never change.

    Each training example is evaluated with and without the adapter before it is used for training. The
    adapter is enabled only while it predicts at least as many recent tokens correctly as the original
    weights. When the active weights change, the draft model's KV cache is recomputed in idle time or when the
    next reply begins.

    Args:
        cache: The draft model's KV cache.
        trainer: Runs the training steps for the draft model's adapter.
        store: Saves the adapter for later runs.
    """

    def __init__(self, cache: DraftCache, trainer: Trainer, *, store: ArrayStore | None = None) -> None:
        self._cache = cache
        self._draft = cache.model
        self._trainer = trainer
        self._store = store
        self._tokens: list[int] = []
        self._prompt_tokens = 0
        # Whether any token has been drafted in the current reply.
        self._drafted = False
        self._rejections: list[_Rejection] = []
        # Each entry consists of an example and the index of its first token after the context.
        self._pending: deque[tuple[TrainingExample, int]] = deque(maxlen=_MAX_EXAMPLES)
        self._examples: deque[TrainingExample] = deque(maxlen=_MAX_EXAMPLES)
        self._pending_steps = 0
        self._evaluations: deque[_Evaluation] = deque()
        self._trained_tokens = self._steps = 0
        self._random = np.random.default_rng(0)
        # Whether the draft model's KV cache must be recomputed because the active weights have changed.
        self._cache_is_stale = False
        if store:
            self._restore(store)

    @property
    def size_bytes(self) -> int:
        """Memory used for training, in bytes. Peak memory during a step is unknown before the first step."""
        return self._trainer.state_bytes + self._trainer.peak_step_bytes

    def begin(self, tokens: Sequence[int]) -> None:
        """Begin a reply to the prompt `tokens`."""
        if self._cache_is_stale:
            self._draft.truncate(0)
            self._cache_is_stale = False
        self._collect_examples()
        self._tokens, self._prompt_tokens = list(tokens), len(tokens)

    def extend(self, tokens: tuple[int, ...]) -> None:
        """Append emitted tokens."""
        self._tokens.extend(tokens)

    def record_round(
        self, proposed: TokenTree, verified: TokenTree, logits: Logits, tokens: tuple[int, ...]
    ) -> None:
        """Record the target's probabilities if it rejected a draft token.

        Args:
            proposed: The draft.
            verified: The tree that the target verified. It may be only a part of the draft.
            logits: The target's logits, one row per node of `verified`.
            tokens: The tokens emitted after verification.
        """
        self._drafted |= proposed.drafted > 0
        accepted_path = proposed.walk(tokens)
        accepted = len(accepted_path) - 1
        rows = verified.walk(tokens[:accepted])
        if len(rows) <= accepted:  # the rest of the draft was not verified, so nothing was rejected
            return
        if accepted < len(tokens) and proposed.children(accepted_path[-1]):
            position = len(self._tokens) - 1 + accepted
            self._rejections.append(self._rejection(position, logits, rows[-1]))

    def _rejection(self, position: int, logits: Logits, row: int) -> _Rejection:
        vocab_size = self._draft.facts.vocab_size
        tokens, values = logits.limit_vocab(vocab_size).top(row, TARGET_TOKENS)
        # `top` may return more tokens than requested if there are ties, but all rows of an example must have
        # the same length.
        order = np.argsort(-values, kind="stable")[:TARGET_TOKENS]
        weights = np.exp(values[order] - values.max())
        return _Rejection(
            position, tokens[order].astype(np.int64), (weights / weights.sum()).astype(np.float32)
        )

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Evaluate the last reply, then train on it, until `should_continue()` returns False."""
        try:
            self._collect_examples()
            while self._pending and should_continue():
                example, first = self._pending.popleft()
                if self._steps:
                    self._evaluate(example.tokens, first)
                if example.rows:
                    self._examples.append(example)
                    self._trained_tokens += len(example.rows)
                    self._pending_steps = min(self._pending_steps + _STEPS_PER_EXAMPLE, _MAX_STEPS)
            changed = self._train(should_continue)
            self._select_weights(changed)
            if self._cache_is_stale and should_continue():
                self._recompute_cache(should_continue)
        finally:
            self._trainer.release_thread_state()

    def _collect_examples(self) -> None:
        """Split the reply into examples, each preceded by some context tokens.

        Examples in which no draft token was rejected are used for evaluation but not for training. Without
        them, the evaluation would only see text that is hard to predict.
        """
        part_tokens = EXAMPLE_TOKENS - _CONTEXT_TOKENS
        begins = range(self._prompt_tokens, len(self._tokens), part_tokens) if self._drafted else ()
        for begin in begins:
            end = min(begin + part_tokens, len(self._tokens))
            start = max(0, begin - _CONTEXT_TOKENS)
            rejections = [one for one in self._rejections if begin - 1 <= one.position < end - 1]
            example = TrainingExample(
                tuple(replace_unknown_ids(self._draft, self._tokens[start:end])),
                tuple(one.position - start for one in rejections),
                np.array([one.best for one in rejections], np.int64),
                np.array([one.probs for one in rejections], np.float32),
            )
            self._pending.append((example, begin - start))
        self._rejections, self._drafted = [], False

    def _evaluate(self, tokens: Sequence[int], first: int) -> None:
        original_hits = self._trainer.count_hits(tokens, first, adapted=False)
        adapted_hits = self._trainer.count_hits(tokens, first, adapted=True)
        self._evaluations.append(_Evaluation(len(tokens) - first, original_hits, adapted_hits))
        while sum(one.tokens for one in self._evaluations) > _EVALUATION_TOKENS + EXAMPLE_TOKENS:
            self._evaluations.popleft()

    def _train(self, should_continue: Callable[[], bool]) -> bool:
        """Run the training steps that are due, and return whether any weight has changed."""
        changed = False
        while self._pending_steps and self._examples and should_continue():
            # The larger of two random indices favours recent examples but sometimes selects old ones.
            index = int(self._random.integers(len(self._examples), size=2).max())
            self._trainer.train_step(self._examples[index])
            self._pending_steps -= 1
            self._steps += 1
            changed = True
        return changed

    def _select_weights(self, changed: bool) -> None:
        """Enable the adapter unless the original weights predict recent tokens better."""
        use_adapter = self._adapter_is_better
        if use_adapter != self._trainer.adapted:
            self._trainer.set_adapted(use_adapter)
            self._cache_is_stale = True
        elif changed and use_adapter:
            self._cache_is_stale = True
        if changed and self._store:
            self._store.save(self._saved_arrays())

    @property
    def _adapter_is_better(self) -> bool:
        original_hits, adapted_hits, tokens = self.evaluation
        return self._steps > 0 and (tokens < _MIN_EVALUATION_TOKENS or adapted_hits >= original_hits)

    def _recompute_cache(self, should_continue: Callable[[], bool]) -> None:
        """Recompute the draft model's KV cache with the active weights, as far as idle time allows."""
        self._draft.truncate(0)
        self._cache_is_stale = False
        self._cache.begin(self._tokens)
        with suppress(CancelledError):  # `propose` prefills the remaining tokens later
            self._cache.prefill(progress=lambda *_: should_continue())

    def _saved_arrays(self) -> dict[str, NDArray[Any]]:
        evaluations = [(one.tokens, one.original_hits, one.adapted_hits) for one in self._evaluations]
        return {
            "learnt": np.array([self._steps, self._trained_tokens], np.int64),
            "judged": np.array(evaluations, np.int64).reshape(-1, 3),
            **self._trainer.adapter_weights(),
        }

    def _restore(self, store: ArrayStore) -> None:
        """Restore the saved adapter and statistics if they fit the model."""
        saved = dict(store.load())
        counts, evaluations = saved.pop("learnt", _EMPTY), saved.pop("judged", _EMPTY)
        if counts.shape != (2,) or evaluations.shape[1:] != (3,) or not self._trainer.load_adapter(saved):
            return
        self._steps, self._trained_tokens = max(1, int(counts[0])), int(counts[1])
        self._evaluations.extend(_Evaluation(*one) for one in evaluations.tolist())
        self._trainer.set_adapted(self._adapter_is_better)

    @property
    def evaluation(self) -> tuple[int, int, int]:
        """Recent tokens that the original weights and the adapter predicted correctly, and in total."""
        return (
            sum(one.original_hits for one in self._evaluations),
            sum(one.adapted_hits for one in self._evaluations),
            sum(one.tokens for one in self._evaluations),
        )

    def note(self) -> str:
        """Return a one-line summary of the training progress for the user."""
        return " · ".join(filter(None, (self._progress(), self._store.notice if self._store else "")))

    def _progress(self) -> str:
        if not self._steps:
            return "the draft model is not trained yet"
        original_hits, adapted_hits, tokens = self.evaluation
        training = f"the draft model took {self._steps} training steps on {self._trained_tokens} wrong tokens"
        if tokens:
            training += (
                f" and predicts {adapted_hits / tokens:.0%} of the last {tokens} tokens,"
                f" {original_hits / tokens:.0%} without training"
            )
        return training if self._trainer.adapted else f"{training}; not used, the original model is better"
