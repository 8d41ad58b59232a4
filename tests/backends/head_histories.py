"""Checks of heads: after any history, they draft like fresh ones, and damaged heads change no reply."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import gguf
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from numpy.typing import NDArray

import edgespec
from edgespec.api.loading import always_draft
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, EdgespecError
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.pressure import MemoryPressure
from edgespec.memory.target_cache import TargetCache
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import LanguageModel
from edgespec.model.hidden_states import HeadModel
from tests.memory.prefix_cache.helpers import keeper

Round: TypeAlias = tuple[str, int, bool]
# An action, a number that says how many tokens it affects, and whether the head drafts first.
ROUNDS = st.tuples(
    st.sampled_from(
        ["say", "say", "say", "cut", "resize", "read", "leave", "come back", "cancel", "restart"]
    ),
    st.integers(0, 40),
    st.booleans(),
)
# ID of the first token of the tiny models that is not a control token.
_FIRST_TOKEN = 3
# Tokens of a draft after the first.
_DRAFT = (60, 70, 80, 90)
# Texts of at least this many tokens are not continued, because the context could overflow.
_LONG_TEXT = 200


def first_logits(head: HeadModel, cache: HeadCache, tokens: list[int], depth: int = 1) -> NDArray[np.float64]:
    """Return the head's logits for the first token of a draft, or for one token at each depth.

    Then commit the tokens before the draft, or discard the draft.
    """
    cache.begin(tokens)
    # `auto` states how many tokens it has time for.
    cache.prefill(cache.full_pending_tokens or None)
    assert cache.can_draft(8)
    lag = tokens[head.length :]
    draft = [*lag, *_DRAFT[: depth - 1]]
    vocab, rows, first = np.arange(head.facts.vocab_size), [], 0
    for width in range(len(lag), len(draft) + 1):
        logits = head.verify(TokenTree.chain(draft[0], draft[1:width]), first)
        rows.append(np.array(logits.at(width - first - 1, vocab)))
        first = width
    if len(tokens) % 2:
        head.commit(tuple(range(1, len(lag))))
    else:
        head.truncate(head.length)
    return np.concatenate(rows)


class _History:
    """A target with a head and a prefix cache on disk, and the text in the target's cache.

    Attributes:
        tokens: The text, whose last token is not in the cache.
    """

    def __init__(
        self,
        load: Callable[[], LanguageModel],
        head_of: Callable[[LanguageModel], HeadModel],
        folder: Path,
        seed: int,
    ) -> None:
        self._load, self._head_of, self._folder = load, head_of, folder
        self._random = np.random.default_rng(seed)
        self._left: list[list[int]] = []
        self._start()
        self._vocab = self.target.facts.vocab_size
        self.tokens = self._some(12)
        self._prepare(self.tokens)

    def _start(self) -> None:
        self.target = self._load()
        self.head = self._head_of(self.target)
        self.cache = HeadCache(self.head)
        self._prefixes = keeper(self.target, self._folder, heads=[self.cache])
        context = ResizableContext(self.target)
        self._target_cache = TargetCache(
            self.target, self._prefixes, context, MemoryPressure(context, self._prefixes.store), [self.cache]
        )

    def close(self) -> None:
        self.head.close()
        self.target.close()

    def _some(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(_FIRST_TOKEN, self._vocab, count)]

    def _prepare(self, tokens: list[int]) -> None:
        self._target_cache.sync_length()
        logits = self._target_cache.prepare(tokens, 16, Stats(), None)
        self.tokens = tokens
        self.cache.begin(tokens)
        if logits and self._random.integers(2):
            # As in a reply, whose first token needs no pass of its own.
            self.target.commit(())
            self.tokens = [*tokens, *self._some(1)]
        else:
            # As after a reply that was cancelled before its first token.
            self.target.truncate(self.target.length)

    def read(self, number: int) -> None:
        """Append many tokens that the head has not seen to the text."""
        more = self._some(number)
        self.target.prefill(self.tokens[self.target.length :] + more[:-1] if more else [])
        self.tokens += more

    def say(self, number: int) -> None:
        # For some recurrent targets, llama.cpp can undo eight tokens. If more are rejected, they replay the
        # accepted ones.
        draft = self._some(10)
        first = 4 if number % 2 else 0
        if first:
            self.target.verify(TokenTree.chain(self.tokens[-1], draft[: first - 1]))
        self.target.verify(TokenTree.chain(self.tokens[-1], draft), first)
        kept = number % 11
        self.target.commit(tuple(range(1, kept + 1)))
        self.tokens += [*draft[:kept], *self._some(1)]

    def cut(self, number: int) -> None:
        self._prepare([*self.tokens[: 2 + number % (self.target.length - 2)], *self._some(1)])

    def resize(self, number: int) -> None:
        if self.target.length < 256:
            self.target.resize(256 + 256 * (number % 2))

    def leave(self, number: int) -> None:
        """Continue with another text, which begins in the same way."""
        self._left.append(list(self.tokens))
        self._prepare([*self.tokens[:number], *self._some(90)])

    def come_back(self, number: int) -> None:
        """Continue an earlier text, or another text that shares part of it."""
        text = self._left[number % len(self._left)]
        self._left.append(list(self.tokens))
        kept = len(text) if number % 2 else 2 + (len(text) - 2) * number // 41
        self._prepare([*text[:kept], *self._some(1 + number % 3)])

    def cancel(self, number: int) -> None:
        """Cancel the next computations of the head and the target, and repeat them."""
        for model in (self.head, self.target):
            model.interrupt(True)
        with suppress(CancelledError):
            first_logits(self.head, self.cache, self.tokens)
        with suppress(CancelledError):
            self._prepare([*self.tokens, *self._some(number)])
        for model in (self.head, self.target):
            model.interrupt(False)
        self._prepare(list(self.tokens))

    def restart(self) -> None:
        """Reload everything, like a new process that finds the text on disk."""
        self._target_cache.save()
        self._prefixes.store.write()
        self.close()
        self._start()
        self._prepare(list(self.tokens))

    def can_draft(self) -> bool:
        """Return whether the head can draft before the target's next pass.

        It occasionally cannot after a return to an earlier text, because the hidden state of the last cached
        token
        is unknown.
        """
        self.cache.begin(self.tokens)
        self.cache.prefill(self.cache.full_pending_tokens or None)
        return self.cache.can_draft(8)

    def run(self, what: str, number: int) -> None:
        match what:
            case "read" if len(self.tokens) < _LONG_TEXT:
                self.read(number)
            case "say" if len(self.tokens) < _LONG_TEXT:
                self.say(number)
            case "cut" if self.target.length > 4:
                self.cut(number)
            case "resize":
                self.resize(number)
            case "leave":
                self.leave(number)
            case "come back" if self._left:
                self.come_back(number)
            case "cancel":
                self.cancel(number)
            case "restart":
                self.restart()


def check_history(
    load: Callable[[], LanguageModel],
    head_of: Callable[[LanguageModel], HeadModel],
    rounds: list[Round],
    seed: int,
    depth: int = 1,
    tolerance: float = 4e-3,
) -> None:
    """Check that after these rounds, a head drafts like one that processed all tokens at once.

    `tolerance` is the maximum rounding difference, as a share of the largest logit.
    """
    with tempfile.TemporaryDirectory() as folder:
        history = _History(load, head_of, Path(folder), seed)
        for what, number, drafts in rounds:
            if drafts and history.can_draft():
                first_logits(history.head, history.cache, history.tokens, depth)
            history.run(what, number)
        tokens = history.tokens
        can_draft = history.can_draft()
        drafted = first_logits(history.head, history.cache, tokens, depth) if can_draft else np.zeros(0)
        history.close()
    assume(can_draft)
    fresh_target = load()
    fresh = head_of(fresh_target)
    fresh_target.prefill(tokens[:-1])
    expected = first_logits(fresh, HeadCache(fresh), tokens, depth)
    fresh.close()
    fresh_target.close()
    known = np.isfinite(expected)
    assert (known == np.isfinite(drafted)).all()
    largest = max(5.0, np.abs(expected[known]).max())
    assert np.abs(drafted[known] - expected[known]).max() < tolerance * largest


# Positions of bytes, and their new values.
BYTE_CHANGES = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4)


def check_same_replies(
    target: Path, method: str, head: Path, temperatures: Sequence[float] = (0.0, 0.8), **options: Any
) -> None:
    """Check that replies with a head are those of plain decoding."""
    with (
        always_draft(),
        edgespec.load(str(target), "none", method="none", context=256) as plain,
        edgespec.load(str(target), "none", method=method, head=head, context=256, **options) as drafting,
    ):
        for temperature in temperatures:
            asked: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3}
            reply = drafting.generate("the file", **asked)
            assert reply.stats.drafted_tokens
            assert reply.tokens == plain.generate("the file", **asked).tokens


def check_changed_bytes(
    target: Path, method: str, head: Path, changes: list[tuple[int, int]], header_bytes: int
) -> None:
    """Check that a head with a damaged header is either rejected or changes no reply.

    Damaged files may crash llama.cpp, but only in the child process that tests them first.
    """
    data = bytearray(head.read_bytes())
    for position, value in changes:
        data[position % header_bytes] = value
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "head.gguf"
        path.write_bytes(data)
        options: dict[str, Any] = {"methods": ["none", method], "head": path, "context": 256}
        try:
            with always_draft(), edgespec.load(str(target), "none", **options) as runtime:
                reply = runtime.generate("the file", method=method, **asked)
                assert reply.tokens == runtime.generate("the file", method="none", **asked).tokens
        except EdgespecError:
            pass


def overwritten(path: Path, name: str, value: float | np.generic) -> Path:
    """Set all values of the first tensor of a GGUF file whose name contains `name`."""
    reader = gguf.GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if name in tensor.name).data[:] = value
    reader.data.flush()
    return path
