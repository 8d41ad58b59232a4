"""Was it rounding? The first divergence of two replies, scored again at both widths.

Quantised kernels give slightly different logits for passes of different widths, so that a near-tie can
flip. How different is measured on the very tokens, and only a choice that this much decides is excused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel
from edgespec.engine.logits import HostLogits
from edgespec.engine.noise import Stream, gumbel
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree

__all__ = ["LARGEST_ROUNDING", "Rescored", "is_near_tie", "rescore", "score_gap"]

# Rounding of a healthy kernel stays far below one logit: a larger difference between widths is a fault
# of its own, and must not excuse what it caused.
LARGEST_ROUNDING = 1.0
_MOST_ROWS = 64


class Rescored:
    """The logits of one position: by single steps, by wide passes, and how far rows like it lay apart."""

    def __init__(self, plain: NDArray[np.float32], wide: list[NDArray[np.float32]], error: float) -> None:
        self.plain = plain
        self.wide = wide
        self.error = error


def rescore(
    model: LanguageModel,
    prompt: Sequence[int],
    reply: Sequence[int],
    widths: Sequence[int],
    *,
    pieces: Sequence[int] = (),
) -> Rescored:
    """Score the token after `prompt` and `reply` by single steps and by passes of each width.

    pieces: of so many tokens the prompt is read, too, with single steps after it: a text that was kept was
    read, and in part written, in other passes than the longest ones.

    The error is the largest difference over the rows of the reply (the last 64 of them). The prompt's
    last token is the first to be run in passes, as in decoding. The model's cache is overwritten.
    """
    plain = _rows(model, prompt, reply, 1)
    wide = [_rows(model, prompt, reply, min(width, _widest(model, prompt, reply))) for width in widths]
    wide += [_rows(model, prompt, reply, 1, piece) for piece in pieces]
    error = max((float(_distance(plain, rows).max()) for rows in wide), default=0.0)
    return Rescored(plain[-1], [rows[-1] for rows in wide], error)


def _widest(model: LanguageModel, prompt: Sequence[int], reply: Sequence[int]) -> int:
    """The widest pass that still fits the context after the last token."""
    return max(1, model.facts.context_tokens - len(prompt) - len(reply) + 1)


def _rows(
    model: LanguageModel, prompt: Sequence[int], reply: Sequence[int], width: int, piece: int = 0
) -> NDArray[np.float32]:
    """The logits after the prompt's last token and after each token of the reply: float32 [n, vocab]."""
    model.truncate(0)
    for start in range(0, len(prompt) - 1, piece or len(prompt)):
        model.prefill(prompt[start : min(start + (piece or len(prompt)), len(prompt) - 1)])
    tokens = [prompt[-1], *reply]
    everything = np.arange(model.facts.vocab_size)
    rows: list[NDArray[np.float32]] = []
    for start in range(0, len(tokens), width):
        real = tokens[start : start + width]
        # The last pass is filled up: a narrower one would not show the error of the method's width.
        logits = model.verify(TokenTree.chain(real[0], [*real[1:], *[real[-1]] * (width - len(real))]))
        rows += [logits.at(row, everything).astype(np.float32) for row in range(len(real))]
        del rows[:-_MOST_ROWS]
        model.commit(tuple(range(1, len(real))))
    return np.stack(rows)


def _distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """|a - b|, zero where both are the same infinity, infinite where something is not a number."""
    with np.errstate(invalid="ignore"):
        distance = np.where(a == b, np.float32(0), np.abs(a - b))
    return np.where(np.isnan(distance), np.float32(np.inf), distance)


def is_near_tie(
    rescored: Rescored, params: SamplingParams, seed: int, history: Sequence[int], plain: int, other: int
) -> bool:
    """True when rounding alone decides between two tokens.

    The sampler chain is run again, filters and noise included, on logits moved by no more than the measured
    error: once in favour of each token. A wide row that picks `other` by itself is such logits, too.
    """
    if not rescored.error <= LARGEST_ROUNDING:
        return False

    def choice(row: NDArray[np.float32]) -> int:
        return Sampler(params, seed, history).token(HostLogits(row[None]), 0)

    favours_plain = choice(_moved(rescored.plain, plain, other, rescored.error)) == plain
    favours_other = choice(_moved(rescored.plain, other, plain, rescored.error)) == other
    return favours_plain and (favours_other or any(choice(row) == other for row in rescored.wide))


def _moved(row: NDArray[np.float32], up: int, down: int, error: float) -> NDArray[np.float32]:
    moved = row.copy()
    moved[up] += np.float32(error)
    moved[down] -= np.float32(error)
    return moved


def score_gap(
    row: NDArray[np.float32], params: SamplingParams, seed: int, history: Sequence[int], a: int, b: int
) -> float:
    """How far two tokens lie apart in what decides between them, in logits; the filters left out."""
    temperature = params.temperature or 1.0
    open_params = replace(params, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
    sampler = Sampler(open_params, seed, history)
    tokens, scores = sampler.scores(HostLogits(row[None]), 0)
    if params.temperature == 0:
        scores = scores - gumbel(seed, Stream.TOKEN, sampler.position, tokens)
    places = np.searchsorted(tokens, [a, b])
    return float(abs(scores[places[0]] - scores[places[1]])) * temperature
