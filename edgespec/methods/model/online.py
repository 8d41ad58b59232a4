"""Train a draft model between replies on the tokens that it predicted incorrectly.

Implements online speculative decoding (OSD, arXiv 2310.07177): whenever the target rejects a drafted token,
the target's probabilities at that position are recorded. The draft model is trained on these probabilities
while no reply is being generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from edgespec.methods.base import DrafterMemory, ForcedDraft
from edgespec.methods.draft_cache import DraftCache, replace_unknown_ids
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.tree_growth import TreeGrowth
from edgespec.model.base import LanguageModel
from edgespec.model.drafter_training import Trainer, TrainingExample
from edgespec.store.saved_arrays import SavedArrays

__all__ = ["OnlineDrafter", "OnlineTrainer"]

# Number of the target's most likely tokens to record for each rejected draft token.
TARGET_TOKENS = 16
# Number of tokens per training example, including context tokens on which the model is not trained.
EXAMPLE_TOKENS = 96
_CONTEXT_TOKENS = 32
_MAX_EXAMPLES = 128
_STEPS_PER_EXAMPLE = 4
# Maximum number of training steps in one idle period between replies.
_MAX_STEPS = 64
# Approximate number of recent tokens used to compare the original and the trained weights.
_EVALUATION_TOKENS = 1024
_MIN_EVALUATION_TOKENS = 64
_EMPTY = np.zeros(0)


class OnlineDrafter(ModelDrafter):
    """A `ModelDrafter` that reports the outcome of each draft to the draft model's trainer."""

    has_idle_work = True

    def __init__(
        self,
        model: LanguageModel,
        vocab_size: int,
        trainer: OnlineTrainer,
        *,
        branches: tuple[int, ...] | TreeGrowth = (),
        min_confidence: float = 0.0,
    ) -> None:
        super().__init__(
            model, vocab_size, branches=branches, min_confidence=min_confidence, cache=trainer.cache
        )
        self.trainer = trainer
        self._proposed: TokenTree | None = None
        self._verified: tuple[TokenTree, Logits] | None = None

    @property
    def memory_use(self) -> DrafterMemory:
        return super().memory_use + DrafterMemory(other_bytes=self.trainer.size_bytes)

    def begin(self, tokens: Sequence[int]) -> None:
        self.trainer.begin(tokens)
        self._proposed = self._verified = None
        super().begin(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        self._proposed = super().propose(sampler, acceptance, draft_length)
        return self._proposed

    def propose_with_forced(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> ForcedDraft:
        draft = super().propose_with_forced(sampler, acceptance, draft_length)
        self._proposed = draft.tree
        return draft

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        self._verified = (tree, logits)
        super().observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        """See `Drafter.commit`. Also records what the target predicted instead of a rejected token."""
        if self._proposed and self._verified:
            self.trainer.record_round(self._proposed, *self._verified, tokens)
        self._proposed = self._verified = None
        super().commit(tokens)
        self.trainer.extend(tokens)

    def note(self) -> str:
        return self.trainer.note()

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        self.trainer.run_idle_work(should_continue)


class OnlineTrainer:
    """Trains an adapter for a draft model between replies. The original weights never change.

    Each example is evaluated with and without the adapter before it is used for training. The adapter is
    enabled only while it predicts at least as many recent tokens correctly as the original weights. Whenever
    the active weights change, the draft model's KV cache is recomputed.

    Args:
        cache: The draft model's KV cache.
        trainer: Runs the training steps for the draft model's adapter.
        store: Saves the adapter for later runs.
    """

    def __init__(self, cache: DraftCache, trainer: Trainer, *, store: SavedArrays | None = None) -> None:
        self.cache = cache
        self._draft = cache.model
        self._trainer = trainer
        self._store = store
        self._tokens: list[int] = []
        self._prompt_tokens = 0
        self._has_drafted = False
        # For each rejected draft token: the preceding position, and the target's most likely tokens with
        # their probabilities.
        self._rejections: list[tuple[int, NDArray[np.int64], NDArray[np.float32]]] = []
        # Training examples awaiting evaluation, each with its number of context tokens.
        self._pending: deque[tuple[TrainingExample, int]] = deque(maxlen=_MAX_EXAMPLES)
        self._examples: deque[TrainingExample] = deque(maxlen=_MAX_EXAMPLES)
        self._pending_steps = 0
        self._evaluations: deque[tuple[int, int, int]] = deque()
        self._trained_tokens = self._steps = 0
        self._random = np.random.default_rng(0)
        if store:
            self._restore(store)

    @property
    def size_bytes(self) -> int:
        return self._trainer.state_bytes + self._trainer.peak_step_bytes

    def begin(self, tokens: Sequence[int]) -> None:
        self._collect_examples()
        self._tokens, self._prompt_tokens = list(tokens), len(tokens)

    def extend(self, tokens: tuple[int, ...]) -> None:
        self._tokens.extend(tokens)

    def record_round(
        self, proposed: TokenTree, verified: TokenTree, logits: Logits, tokens: tuple[int, ...]
    ) -> None:
        """Record the target's probabilities if it rejected a token of the proposed draft.

        Args:
            proposed: The draft as proposed.
            verified: The tree that the target verified, which may lack parts of the draft.
            logits: The target's logits, one row per node of `verified`.
            tokens: The tokens emitted after verification.
        """
        self._has_drafted |= proposed.drafted > 0
        accepted_path = proposed.walk(tokens)
        accepted = len(accepted_path) - 1
        rows = verified.walk(tokens[:accepted])
        if len(rows) > accepted < len(tokens) and proposed.children(accepted_path[-1]):
            best, values = logits.limit_vocab(self._draft.facts.vocab_size).top(rows[-1], TARGET_TOKENS)
            # Sort and truncate, because `top` may return extra tokens with equal logits.
            order = np.argsort(-values, kind="stable")[:TARGET_TOKENS]
            weights = np.exp(values[order] - values.max())
            probs = (weights / weights.sum()).astype(np.float32)
            position = len(self._tokens) - 1 + accepted
            self._rejections.append((position, best[order].astype(np.int64), probs))

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Evaluate and train the draft model's adapter while `should_continue()` returns True."""
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
            old_steps, was_adapted = self._steps, self._trainer.adapted
            while self._pending_steps and self._examples and should_continue():
                # Favour recent examples by taking the larger of two random indices.
                index = int(self._random.integers(len(self._examples), size=2).max())
                self._trainer.train_step(self._examples[index])
                self._pending_steps -= 1
                self._steps += 1
            has_trained = self._steps > old_steps
            self._trainer.set_adapted(self._adapter_is_better)
            if has_trained and self._store:
                self._store.save(self._saved_arrays())
            if self._trainer.adapted != was_adapted or (has_trained and was_adapted):
                self._draft.truncate(0)
                self.cache.begin(self._tokens)
                with suppress(CancelledError):
                    self.cache.prefill(progress=lambda *_: should_continue())
        finally:
            self._trainer.release_thread_state()

    def _collect_examples(self) -> None:
        """Split the reply into examples, each preceded by some context tokens.

        Examples without a rejected draft token are used for evaluation but not for training.
        """
        part_tokens = EXAMPLE_TOKENS - _CONTEXT_TOKENS
        begins = range(self._prompt_tokens, len(self._tokens), part_tokens) if self._has_drafted else ()
        for begin in begins:
            end = min(begin + part_tokens, len(self._tokens))
            start = max(0, begin - _CONTEXT_TOKENS)
            rejections = [one for one in self._rejections if begin - 1 <= one[0] < end - 1]
            example = TrainingExample(
                tuple(replace_unknown_ids(self._draft, self._tokens[start:end])),
                tuple(position - start for position, _, _ in rejections),
                np.array([best for _, best, _ in rejections], np.int64),
                np.array([probs for _, _, probs in rejections], np.float32),
            )
            self._pending.append((example, begin - start))
        self._rejections, self._has_drafted = [], False

    def _evaluate(self, tokens: Sequence[int], first: int) -> None:
        original_hits, adapted_hits = (
            self._trainer.count_hits(tokens, first, adapted=adapted) for adapted in (False, True)
        )
        self._evaluations.append((original_hits, adapted_hits, len(tokens) - first))
        while self.evaluation[2] > _EVALUATION_TOKENS + EXAMPLE_TOKENS:
            self._evaluations.popleft()

    @property
    def evaluation(self) -> tuple[int, int, int]:
        """Number of correct predictions without and with the adapter, and total number of predictions."""
        original_hits, adapted_hits, tokens = np.sum([(0, 0, 0), *self._evaluations], axis=0).tolist()
        return original_hits, adapted_hits, tokens

    @property
    def _adapter_is_better(self) -> bool:
        original_hits, adapted_hits, tokens = self.evaluation
        return self._steps > 0 and (tokens < _MIN_EVALUATION_TOKENS or adapted_hits >= original_hits)

    def _saved_arrays(self) -> dict[str, NDArray[Any]]:
        judged = [(tokens, original, adapted) for original, adapted, tokens in self._evaluations]
        return {
            "learnt": np.array([self._steps, self._trained_tokens], np.int64),
            "judged": np.array(judged, np.int64).reshape(-1, 3),
            **self._trainer.adapter_weights(),
        }

    def _restore(self, store: SavedArrays) -> None:
        saved = dict(store.load())
        counts, judged = saved.pop("learnt", _EMPTY), saved.pop("judged", _EMPTY)
        if counts.shape != (2,) or judged.shape[1:] != (3,) or not self._trainer.load_adapter(saved):
            return
        self._steps, self._trained_tokens = max(1, int(counts[0])), int(counts[1])
        self._evaluations.extend((original, adapted, tokens) for tokens, original, adapted in judged.tolist())
        self._trainer.set_adapted(self._adapter_is_better)

    def note(self) -> str:
        """Return a one-line summary of the training progress for the user."""
        note = "the draft model has not been trained yet"
        original_hits, adapted_hits, tokens = self.evaluation
        if self._steps:
            note = (
                f"the draft model was trained for {self._steps} steps on {self._trained_tokens} tokens that"
                " it had mispredicted"
            )
            if tokens:
                note += (
                    f" and predicts {adapted_hits / tokens:.0%} of the last {tokens} tokens correctly,"
                    f" compared with {original_hits / tokens:.0%} without training"
                )
            if not self._trainer.adapted:
                note += "; edgespec uses the original draft model, which is more accurate"
        return " · ".join(filter(None, (note, self._store.notice if self._store else "")))
