"""Write many texts at once with a GGUF model, to train drafters on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan, choose_kv_types, kv_bytes_per_token
from edgespec.backends.llamacpp.loading import load_weights, threads_for
from edgespec.backends.llamacpp.metadata import LlamaVocabulary
from edgespec.backends.llamacpp.native import library
from edgespec.errors import CancelledError
from edgespec.model.base import LoadOptions, Progress, Vocabulary

__all__ = ["LlamaWriter", "open_writer"]

# Number of texts that are generated at once. With more texts, a pass takes longer, but less time per token.
_TEXTS = 32
# Number of KV cells that all texts share. This is enough for 32 texts of 256 tokens. The number does not
# depend on free memory, so that an interrupted training run continues with the same text.
_CELLS = 8_192


@dataclass(eq=False, slots=True)
class _Text:
    """A text that is being written.

    `index` is that of its prompt, and `cells` the number of KV cells reserved for it in its llama.cpp
    `sequence`. The first `length` tokens have been run, and the `pending` ones follow.
    """

    index: int
    sequence: int
    cells: int
    temperature: float
    # Each text has its own random numbers, so that other texts change it at most by rounding.
    random: np.random.Generator
    pending: list[int]
    length: int = 0
    tokens: list[int] = field(default_factory=list)


class LlamaWriter:
    """Implements `Writer` for GGUF models.

    Args:
        context: An empty context with `_TEXTS` sequences.
        vocabulary: The model's vocabulary.
        context_tokens: See `Writer`.
        memory_bytes: See `Writer`.
    """

    def __init__(
        self, context: LlamaContext, vocabulary: LlamaVocabulary, context_tokens: int, memory_bytes: int
    ) -> None:
        self._context = context
        self.vocabulary: Vocabulary = vocabulary
        self.context_tokens, self.memory_bytes = context_tokens, memory_bytes

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_tokens: int,
        seed: int,
        progress: Progress,
    ) -> list[list[int]]:
        waiting = deque(range(len(prompts)))
        sequences = list(range(_TEXTS))
        active: list[_Text] = []
        texts: list[list[int]] = [[] for _ in prompts]
        self._context.clear()
        while waiting or active:
            while waiting and sequences:
                index = waiting[0]
                cells = len(prompts[index]) + max_tokens
                if active and cells + sum(text.cells for text in active) > _CELLS:
                    break
                waiting.popleft()
                random = np.random.default_rng([seed, index])
                pending = list(prompts[index])
                active.append(_Text(index, sequences.pop(0), cells, temperatures[index], random, pending))
            if not progress("writing", 1.0 - (len(waiting) + len(active)) / len(prompts)):
                raise CancelledError("generating text was cancelled")
            for text in self._run(active):
                if self.vocabulary.is_end(text.tokens[-1]) or len(text.tokens) == max_tokens:
                    texts[text.index] = text.tokens
                    active.remove(text)
                    self._context.drop(text.sequence, 0)
                    sequences.append(text.sequence)
        return texts

    def _run(self, active: Sequence[_Text]) -> list[_Text]:
        """Run a pass with as many pending tokens as fit, and return the texts that it continued."""
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[tuple[int]] = []
        needs_logits: list[bool] = []
        continued: list[_Text] = []
        for text in active:
            part = text.pending[: self._context.batch_tokens - len(tokens)]
            tokens += part
            positions += range(text.length, text.length + len(part))
            sequences += [(text.sequence,)] * len(part)
            text.length += len(part)
            text.pending = text.pending[len(part) :]
            is_complete = bool(part) and not text.pending
            needs_logits += [is_complete and row == len(part) - 1 for row in range(len(part))]
            if is_complete:
                continued.append(text)
        logits = self._context.run(tokens, positions, sequences, needs_logits)
        for text, row in zip(continued, logits, strict=True):
            token = _sample(row, text.temperature, text.random)
            text.tokens.append(token)
            text.pending = [token]
        return continued


def _sample(logits: NDArray[np.float32], temperature: float, random: np.random.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    probs = np.cumsum(np.exp((logits - logits.max()) / temperature), dtype=np.float64)
    token = int(np.searchsorted(probs, random.random() * probs[-1], side="right"))
    # Rounding can make the product equal to the last sum.
    return min(token, len(probs) - 1)


@contextmanager
def open_writer(path: str, name: str, progress: Progress | None) -> Iterator[LlamaWriter]:
    """Load a GGUF model for writing texts, and close it at the end of the block.

    Raises:
        ModelFileError: The file is damaged or not supported.
        MemoryBudgetError: The weights or the context cannot be allocated.
        CancelledError: `progress` returned False.
    """
    lib, options = library(), LoadOptions(exact=False)
    weights = load_weights(path, name, options, progress)
    vocabulary = LlamaVocabulary(weights)
    try:
        types = choose_kv_types(options)
        plan = ContextPlan(_CELLS, types, _TEXTS, rows=_TEXTS)
        context = LlamaContext(weights, options, plan, threads_for(weights, options))
        try:
            memory_bytes = lib.llama_model_size(weights) + _CELLS * kv_bytes_per_token(weights, types)
            yield LlamaWriter(context, vocabulary, lib.llama_model_n_ctx_train(weights), memory_bytes)
        finally:
            context.close()
    finally:
        vocabulary.close(lambda: lib.llama_model_free(weights))
