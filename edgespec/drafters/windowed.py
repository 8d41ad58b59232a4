"""A draft model that sees the first tokens and the last ones only, so that no text is too long for it.

Its cost and its memory stop growing with the text, and it is never asked about more positions than it was
trained for. Sources: StreamingLLM (arXiv 2309.17453), MagicDec (arXiv 2408.11049).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.backends.base import LanguageModel, ModelFacts, Progress, Snapshot, Vocabulary
from edgespec.backends.base_model import BaseModel
from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError, OptionError

__all__ = ["AttentionWindow", "WindowedModel", "choose_draft_window"]

# A round's tree is drafted in this room, beside the window.
_DRAFT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """How much of a text a draft sees: the first `sink_tokens` and at least the last `window_tokens`.

    A quarter of the window more is let in before the oldest of it go, all at once.
    """

    sink_tokens: int = 4
    window_tokens: int = 1024

    @property
    def slack_tokens(self) -> int:
        return max(1, self.window_tokens // 4)

    @property
    def context_tokens(self) -> int:
        """The context the draft model is to be loaded with."""
        return self.sink_tokens + self.window_tokens + self.slack_tokens + _DRAFT_TOKENS

    @property
    def seen(self) -> str:
        """What a draft sees, in words."""
        return f"the first {self.sink_tokens:,} and the last {self.window_tokens:,} tokens"

    def within(self, trained_tokens: int) -> AttentionWindow:
        """This window, or the largest smaller one for a draft trained on so many tokens (0: unknown)."""
        over = self.context_tokens - trained_tokens
        if not trained_tokens or over <= 0:
            return self
        return replace(self, window_tokens=max(1, self.window_tokens - over * 4 // 5 - 1))


def choose_draft_window(
    context_tokens: int, trained_tokens: int, window_tokens: int | None = None, sink_tokens: int = 4
) -> AttentionWindow | None:
    """The window of a draft for a target with that context; None for a draft that sees all of the text.

    window_tokens: the window asked for, 0 for none. Left to us (None) a draft has a window only where the
    text may become longer than what it was trained on (0: unknown): before that it guesses best from all.
    """
    if window_tokens is None:
        if not 0 < trained_tokens < context_tokens:
            return None
        return AttentionWindow(sink_tokens).within(trained_tokens)
    window = AttentionWindow(sink_tokens, window_tokens)
    return window if window_tokens and window.context_tokens < context_tokens else None


class WindowedModel(BaseModel):
    """A LanguageModel of any length over one with a small context.

    The inner cache holds the first tokens of the text, up to the sinks, and then those from `_start` on. It
    may lag behind the text: the rest is run before the next pass. Positions are those of the inner cache,
    so that it follows no draft.
    Where tokens cannot be forgotten the window is computed again, half as long, when it is full.

    context_tokens: how long the text may become.
    """

    def __init__(self, model: LanguageModel, window: AttentionWindow, context_tokens: int) -> None:
        inner = model.facts
        able = inner.capabilities
        spare = inner.context_tokens - window.sink_tokens - window.window_tokens - window.slack_tokens
        if spare < 1 or window.window_tokens < 1 or window.sink_tokens < 0:
            raise OptionError(
                f"a window of {window.window_tokens} tokens does not fit the context of"
                f" {inner.context_tokens} that {inner.name} has",
                f"use --draft-window {max(1, inner.context_tokens // 2)} or less",
            )
        self._model = model
        self._window = window
        self.vocabulary: Vocabulary = model.vocabulary
        self.facts: ModelFacts = replace(
            inner,
            context_tokens=context_tokens,
            requested_context_tokens=context_tokens,
            capabilities=replace(
                able, max_width=min(able.max_width, spare), partial_truncate=False, trainable=False
            ),
        )
        # So many tokens the inner cache may hold when a round begins.
        self._most = window.sink_tokens + window.window_tokens + window.slack_tokens
        self._text: list[int] = []
        self._start = window.sink_tokens
        self._round: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self._text)

    @property
    def _end(self) -> int:
        """Up to here the text was run, or given up."""
        held, sinks = self._model.length, self._window.sink_tokens
        return held if held < sinks else held - sinks + self._start

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._round = ()
        before = len(self._text)
        self._text += tokens
        try:
            self._bring_up(progress)
        except BaseException:
            del self._text[max(before, self._end) :]
            raise

    def _bring_up(self, progress: Progress | None = None) -> None:
        """Run the end of the text, with what the inner cache has to give up for it."""
        sinks, wanted = self._window.sink_tokens, len(self._text)
        held = self._model.length
        if held < sinks:
            self._start = sinks
        shown = held + wanted - self._end
        if shown > self._most or (self._start > sinks and shown < sinks + self._window.slack_tokens):
            self._slide()
        if self._model.length < sinks:
            self._model.prefill(self._text[self._model.length : sinks])
        if self._end < wanted:
            self._model.prefill(self._text[self._end : wanted], progress)

    def _slide(self) -> None:
        """Let the window begin later, so that it ends with the text."""
        sinks, kept = self._window.sink_tokens, self._window.window_tokens
        start = max(sinks, len(self._text) - kept)
        if self._start < start < self._end:
            try:
                self._model.remove_range(sinks, sinks + start - self._start)
                self._start = start
                return
            except CapabilityError:  # computed again; half of it, or that would be due again soon
                start = max(sinks, len(self._text) - max(1, kept // 2))
        self._model.truncate(min(sinks, self._model.length))
        self._start = start

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        try:
            self._check(tree.width)
            if tree.width > self.facts.capabilities.max_width:
                raise CapabilityError(
                    f"a tree of {tree.width} tokens is wider than {self.facts.capabilities.max_width}"
                )
            if first == 0:
                self._bring_up()
            logits = self._model.verify(tree, first)
        except BaseException:
            self._end_round()
            raise
        self._round = tree.tokens
        return logits

    def _end_round(self) -> None:
        self._round = ()
        if not self._closed:
            self._model.truncate(self._model.length)

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self._model.commit(path)
        self._text += (self._round[node] for node in (0, *path))
        self._round = ()

    def truncate(self, length: int) -> None:
        """See the Protocol. What the window has left behind is computed again, at the next pass."""
        self._check(0)
        self._round = ()
        del self._text[length:]
        length = min(length, self._end)
        sinks = self._window.sink_tokens
        self._model.truncate(length if length <= sinks else sinks + max(0, length - self._start))
        if self._model.length <= sinks:
            self._start = sinks

    def remove_range(self, start: int, end: int) -> None:
        raise CapabilityError(f"{self.facts.name} forgets by itself, not tokens {start} to {end}")

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """The text: a window over it is soon computed."""
        self._check(0)
        self._end_round()
        return Snapshot(len(self._text), json.dumps(self._text).encode())

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self.truncate(0)
        try:
            text = json.loads(snapshot.data)
        except ValueError:
            text = None
        if not isinstance(text, list) or not len(text) == snapshot.length <= self.free_tokens:
            raise BackendError("the saved state does not fit this model and context", "compute it again")
        self._text = text

    def resize(self, context_tokens: int) -> None:
        """See the Protocol: how long the text may become; as much is seen of it."""
        self._check_size(context_tokens)
        self._end_round()
        self._now_sized(context_tokens, self.facts.kv_bytes)

    def run_ahead(self, enabled: bool) -> None:
        self._model.run_ahead(enabled)

    def interrupt(self, enabled: bool) -> None:
        self._model.interrupt(enabled)

    def close(self) -> None:
        self._closed = True
        self._model.close()
