"""Draw prompts of all kinds and lengths from a seed. None is chosen by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Protocol, TypeAlias

from edgespec.chat.message import Message
from edgespec.losslessness.cases import Prompt

Range: TypeAlias = tuple[int, int]

KINDS = ("question", "code", "story", "list", "language", "copy")
# Ranges of prompt lengths in tokens. Lengths are drawn from them in turn, uniformly on a logarithmic scale.
_LENGTHS = ((2, 20), (20, 120), (120, 600))
# Replies to long prompts take several times longer, so only this fraction of the draws contain one, as the
# last prompt.
_LONG, _LONG_SHARE = (600, 3000), 0.25
# Fraction of prompts that follow an earlier question and answer, whose lengths in tokens are below.
_SECOND_TURN_SHARE = 0.25
_TURN_TOKENS = 24
# Minimum number of characters to tokenise per token. Longer tokens are rare.
_CHARACTERS_PER_TOKEN = 8
_ROOT = Path(__file__).resolve().parents[2]
_SHORT_TEXTS = Path(__file__).with_suffix(".jsonl")
_SENTENCE = re.compile(r"[^.?!。？؟।;]+[.?!。？؟।;]\S*\s?")
_NOUNS = ("apple", "bridge", "candle", "desert", "engine", "feather", "garden", "harbour", "island", "kettle")
_COLOURS = ("red", "green", "blue", "white", "grey", "yellow")


class Vocabulary(Protocol):
    """The part of a model's vocabulary that cuts texts."""

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...


def draw_prompts(
    seed: str, count: int, vocabulary: Vocabulary, max_tokens: int, lengths: Sequence[Range] = _LENGTHS
) -> list[Prompt]:
    """Return prompts of different kinds, shortest first.

    Long prompts are made from this repository's documents and programs, and from the sentences in
    prompts.jsonl in random order. The number of tokens does not include what the chat template adds.

    Args:
        seed: Determines the prompts, together with the vocabulary and the repository's files.
        count: Number of prompts, up to the number of kinds.
        vocabulary: Cuts the texts to their lengths.
        max_tokens: Maximum length of a prompt in tokens.
        lengths: Ranges of prompt lengths in tokens. A long prompt is added only to the default ranges.
    """
    rng = Random(seed)
    prompts = []
    ranges = [lengths[number % len(lengths)] for number in range(count)]
    if rng.random() < _LONG_SHARE and lengths is _LENGTHS:
        ranges[-1] = _LONG
    for kind, (low, high) in zip(rng.sample(KINDS, count), ranges, strict=True):
        wanted = round(math.exp(rng.uniform(math.log(low), math.log(high))))
        tokens = min(wanted, max_tokens)
        messages: list[Message] = []
        if rng.random() < _SECOND_TURN_SHARE:
            question, answer = (_cut(rng, name, _TURN_TOKENS, vocabulary) for name in ("question", "story"))
            messages += [Message("user", question), Message("assistant", answer)]
        text = _cut(rng, kind, tokens, vocabulary)
        prompts.append((tokens, Prompt(f"{kind}-{tokens}", (*messages, Message("user", text)), kind)))
    return [prompt for _, prompt in sorted(prompts, key=lambda item: item[0])]


def _cut(rng: Random, kind: str, tokens: int, vocabulary: Vocabulary) -> str:
    """Return text of the given kind with this number of tokens, or one fewer if a character would be cut."""
    text, pieces = "", _pieces(rng, kind)
    while len(text) < tokens * _CHARACTERS_PER_TOKEN:
        text += next(pieces)
    ids = vocabulary.tokenize(text, special=False, start=False)[:tokens]
    cut = b"".join(map(vocabulary.piece, ids)).decode("utf-8", "ignore")
    return cut if cut.strip() else text[:tokens]


def _pieces(rng: Random, kind: str) -> Iterator[str]:
    """Yield text of a kind without an end, in pieces."""
    texts = _short_texts()[kind]
    if kind in ("question", "code", "copy"):
        yield rng.choice(texts) + "\n\n"
        while True:
            yield _excerpt(rng, "edgespec/**/*.py" if kind == "code" else "docs/*.md")
    if kind == "list":
        yield rng.choice(texts) + "\n"
        start, format_row = rng.randrange(100), rng.choice(_ROWS)
        while True:
            start += 1
            values = rng.choice(_NOUNS), rng.choice(_COLOURS), rng.randrange(1000)
            yield format_row.format(start, *values)
    yield rng.choice(texts) + (" " if kind == "story" else "\n")
    sentences = [sentence for text in texts for sentence in _SENTENCE.findall(text)]
    while True:
        yield rng.choice(sentences).rstrip() + rng.choice((" ", " ", " ", "\n\n"))


_ROWS = (
    "{0}. {1}\n",
    "- {2} {1} ({3})\n",
    "{0},{1},{2},{3}\n",
    '{{"id": {0}, "name": "{1}", "colour": "{2}", "count": {3}}}\n',
    "| {1} | {2} | {3} |\n",
)


def _excerpt(rng: Random, pattern: str) -> str:
    """Return some paragraphs of a random file of this repository."""
    paragraphs = _read(rng.choice(_files(pattern))).split("\n\n")
    first = rng.randrange(len(paragraphs))
    return "\n\n".join(paragraphs[first : first + 20]) + "\n\n"


@cache
def _files(pattern: str) -> Sequence[Path]:
    return sorted(path for path in _ROOT.glob(pattern) if path.stat().st_size)


@cache
def _read(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def _short_texts() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for line in _SHORT_TEXTS.read_text("utf-8").splitlines():
        entry = json.loads(line)
        found[entry["kind"]].append(entry["text"])
    return found
