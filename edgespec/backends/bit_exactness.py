"""Find the passes of a loaded model whose logits are bit-identical to those of single-token passes.

In passes with more tokens or longer contexts, kernels may add numbers in a different order. The logits then
differ in the last bits, which can swap two tokens with nearly equal logits. `--exact` allows only
bit-identical passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import cycle

import numpy as np

from edgespec.backends.base import LanguageModel, Progress
from edgespec.backends.model_facts import Capabilities
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError

__all__ = ["BitExactPasses", "find_bit_exact_passes", "restricted_to"]

# Number of tokens in the largest pass to test: the longest draft of `--method auto` plus one.
_MAX_WIDTH = 17
# Context lengths to test. Beyond 256 tokens, llama.cpp uses a different attention kernel for single tokens.
_CONTEXT_LENGTHS = (290, 40)
# Number of single-token passes to compare with multi-token passes at each context length.
_STEPS = 3 * _MAX_WIDTH // 2 + 1
_STEPS_OF_SMALL_MODELS, _SMALL_MODEL_BYTES = 136, 256 * 2**20
# Prefill batch sizes to test. They must not influence the contents of the KV cache.
_BATCHES = (5, 37, 1, 3, 100, 64, 16, 1, 2, 8, 9, 4, 11, 7, 13, 6, 33, 130)
_TREES = 3
# Number of single-token passes after a tested pass, to check the KV cache that the tested pass wrote.
_STEPS_AFTER = 3


@dataclass(frozen=True, slots=True)
class BitExactPasses:
    """The passes whose logits and resulting cache are bit-identical to those of single-token passes.

    Attributes:
        max_width: Number of tokens in the longest bit-identical chain. 1 means single-token passes only.
        trees: Whether token trees of up to `max_width` tokens are bit-identical.
        prefill: Whether the cache is independent of how the tokens were split into batches and passes.
    """

    max_width: int
    trees: bool
    prefill: bool


def find_bit_exact_passes(model: LanguageModel, progress: Progress | None = None) -> BitExactPasses:
    """Test which passes of a model are bit-identical to single-token passes.

    This runs two or three prefills of a few hundred tokens, about 100 single-token passes (200 for small
    models) and 80 multi-token passes. The result is valid for the current context size. The cache is empty
    afterwards.

    Raises:
        CancelledError: `progress` returned False, or the model was interrupted.
    """
    capabilities = model.facts.capabilities
    width = min(_MAX_WIDTH, capabilities.max_width) if capabilities.rollback else 1
    trees, prefill = capabilities.rollback and capabilities.tree, True
    steps = _STEPS_OF_SMALL_MODELS if model.facts.weight_bytes < _SMALL_MODEL_BYTES else _STEPS
    try:
        for i, length in enumerate(_CONTEXT_LENGTHS):
            model.truncate(0)
            steps = min(steps, max(_STEPS, model.free_tokens - length - _STEPS_AFTER))
            length = min(length, model.free_tokens - steps - _STEPS_AFTER)
            if length < 1:
                return BitExactPasses(1, False, False)
            _report(progress, i / len(_CONTEXT_LENGTHS))
            trial = _Trial(model, length, steps)
            prefill = prefill and trial.prefill_is_exact()
            width = trial.max_width(width, thorough=not prefill)
            trees = trees and width > 3 and trial.trees_are_exact()
            steps = min(steps, _STEPS)
    finally:
        model.truncate(0)
    # The prefill test can miss small differences if the KV cache has a low precision. Therefore also require
    # bit-exact multi-token passes.
    return BitExactPasses(width, trees, prefill and (width > 1 or not capabilities.rollback))


def _report(progress: Progress | None, fraction: float) -> None:
    if progress and not progress("testing which passes are bit-exact", fraction):
        raise CancelledError("loading the model was cancelled")


class _Trial:
    """Random test tokens and their reference logits, which were computed one token at a time."""

    def __init__(self, model: LanguageModel, length: int, steps: int) -> None:
        self._model, self._length, self._steps = model, length, steps
        vocab_size = model.facts.vocab_size
        self._all_ids = np.arange(vocab_size)
        random = np.random.default_rng(length)
        self._tokens: list[int] = random.integers(
            vocab_size // 8, vocab_size, length + steps + _STEPS_AFTER
        ).tolist()
        model.truncate(0)
        model.prefill(self._tokens[:length])
        self._expected = [self._step(token) for token in self._tokens[length:]]

    def _run(self, tree: TokenTree) -> list[bytes]:
        logits = self._model.verify(tree)
        rows = (logits.at(row, self._all_ids) + 0.0 for row in range(tree.width))
        return [blake2b(row.tobytes()).digest() for row in rows]

    def _step(self, token: int) -> bytes:
        (digest,) = self._run(TokenTree.chain(token))
        self._model.commit(())
        return digest

    def _rewind(self) -> None:
        self._model.truncate(self._length)
        self._model.prefill(self._tokens[self._model.length : self._length])

    def _steps_after_are_exact(self, steps: int = _STEPS_AFTER) -> bool:
        """Return whether single-token passes after the cached tokens give the expected logits."""
        first = self._model.length
        digests = [self._step(token) for token in self._tokens[first : first + steps]]
        return digests == self._expected[first - self._length :][:steps]

    def max_width(self, limit: int, *, thorough: bool) -> int:
        """Return the largest pass size, up to `limit`, that gives the same logits as single-token passes.

        `thorough` runs more passes of each size.
        """
        widths = range(2, limit + 1)
        return next((width - 1 for width in widths if not self._width_is_exact(width, thorough)), limit)

    def _width_is_exact(self, width: int, thorough: bool) -> bool:
        self._rewind()
        end = self._steps if thorough else min(self._steps, 2 * width)
        done, right = 0, width // 2
        while done + width <= end:
            root, *rest = self._tokens[self._length + done :][:right]
            wrong = self._tokens[: width - right]
            digests = self._run(TokenTree.chain(root, [*rest, *wrong]))
            self._model.commit(tuple(range(1, right)))
            if digests[:right] != self._expected[done : done + right]:
                return False
            done, right = done + right, width
        return self._steps_after_are_exact(1)

    def trees_are_exact(self) -> bool:
        """Return whether token trees give the same logits as single-token passes."""
        self._rewind()
        for first in range(0, 2 * _TREES, 2):
            root, right = self._tokens[self._length + first :][:2]
            wrong = self._tokens[first]
            tree = TokenTree((root, wrong, right, wrong), (-1, 0, 0, 1), (None,) * 4)
            digests = self._run(tree)
            self._model.commit((2,))
            if [digests[0], digests[2]] != self._expected[first : first + 2]:
                return False
        return self._steps_after_are_exact()

    def prefill_is_exact(self) -> bool:
        """Return whether prefill gives a bit-identical KV cache for all tested batch sizes."""
        self._model.truncate(0)
        batches = cycle(_BATCHES)
        while (start := self._model.length) < self._length:
            size = min(next(batches), self._length - start)
            if size == 1:
                self._step(self._tokens[start])
            else:
                self._model.prefill(self._tokens[start : start + size])
        self._model.prefill(self._tokens[self._length : self._length + self._steps])
        if self._steps_after_are_exact():
            return True
        self._model.truncate(0)
        return False


def restricted_to(capabilities: Capabilities, exact: BitExactPasses) -> Capabilities:
    """Return a model's capabilities if all passes must give the same logits as single-token passes.

    Features that need other passes, such as token trees or self-drafting, are switched off.
    """
    width = exact.max_width if exact.prefill or capabilities.partial_truncate else 1
    restricted = replace(capabilities, exact=True, prefix_reuse_exact=exact.prefill)
    if not capabilities.rollback:
        return restricted
    if width == 1:
        reason = "--exact is set, and no verify pass of this model is bit-identical to single-token passes"
        return replace(
            restricted, rollback=False, tree=False, reason=reason, max_width=1, self_draft_methods=frozenset()
        )
    return replace(
        restricted,
        max_width=width,
        tree=capabilities.tree and exact.trees,
        self_draft_methods=capabilities.self_draft_methods if exact.prefill else frozenset(),
    )
