"""Limit a draft model's attention to the first and last tokens of the sequence.

This bounds the draft model's time and memory for long sequences, and keeps token positions within its trained
context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, OptionError
from edgespec.methods.constants import SINK_TOKENS, WINDOW_TOKENS, WINDOW_TREE_TOKENS
from edgespec.model.base import LanguageModel, Progress
from edgespec.model.base_model import WrappedModel, wrapped_capabilities

__all__ = ["AttentionWindow", "WindowedModel", "choose_draft_window"]


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Limits a draft model's attention to the first and the last tokens of a sequence.

    Tokens are evicted in bulk once the window has grown by `slack_tokens`.

    Attributes:
        sink_tokens: Number of tokens to keep from the beginning of the sequence, called attention sinks in
            StreamingLLM (arXiv 2309.17453).
        window_tokens: Minimum number of tokens to keep from the end of the sequence.
    """

    sink_tokens: int = SINK_TOKENS
    window_tokens: int = WINDOW_TOKENS

    @property
    def slack_tokens(self) -> int:
        """Number of tokens by which the attention window can grow before tokens are evicted."""
        return max(1, self.window_tokens // 4)

    @property
    def context_tokens(self) -> int:
        """Context size to load the draft model with, in tokens."""
        return self.sink_tokens + self.window_tokens + self.slack_tokens + WINDOW_TREE_TOKENS

    @property
    def description(self) -> str:
        """User-facing description of the draft model's attention window."""
        return f"the first {self.sink_tokens:,} and the last {self.window_tokens:,} tokens"

    def limited_to(self, trained_tokens: int) -> AttentionWindow:
        """Return this window, shrunk to fit a trained context of `trained_tokens` (0 if unknown)."""
        excess = self.context_tokens - trained_tokens
        if not trained_tokens or excess <= 0:
            return self
        return replace(self, window_tokens=max(1, self.window_tokens - excess * 4 // 5 - 1))


def choose_draft_window(
    context_tokens: int, trained_tokens: int, window_tokens: int | None = None, sink_tokens: int = SINK_TOKENS
) -> AttentionWindow | None:
    """Choose the attention window for a draft model.

    Args:
        context_tokens: Context size of the target.
        trained_tokens: Context size that the draft model was trained for. 0 if unknown.
        window_tokens: The window size requested by the user, or 0 for no window. If None, a window is used
            only if the sequence can exceed the trained context, because predictions are best with the whole
            sequence.
        sink_tokens: Number of tokens to keep from the beginning of the sequence.

    Returns:
        The window, or None if the draft model should attend to the whole sequence.
    """
    if window_tokens is None:
        if not 0 < trained_tokens < context_tokens:
            return None
        return AttentionWindow(sink_tokens).limited_to(trained_tokens)
    window = AttentionWindow(sink_tokens, window_tokens)
    return window if window_tokens and window.context_tokens < context_tokens else None


class WindowedModel(WrappedModel):
    """Wraps a model to handle sequences longer than its context.

    Implements StreamingLLM (arXiv 2309.17453) for draft models, as in MagicDec (arXiv 2408.11049). The KV
    cache of the wrapped (inner) model contains only the first and last tokens of the sequence. Token
    positions are positions in this cache.

    Args:
        model: The model to wrap.
        window: The sizes of the attention window.
        context_tokens: Maximum length of the sequence.

    Raises:
        OptionError: The window does not fit the inner model's context.
    """

    def __init__(self, model: LanguageModel, window: AttentionWindow, context_tokens: int) -> None:
        super().__init__(model, model.vocabulary)
        inner = model.facts
        # Maximum number of tokens in the draft model's KV cache when a pass begins.
        self._max_cached_tokens = window.sink_tokens + window.window_tokens + window.slack_tokens
        spare = inner.context_tokens - self._max_cached_tokens
        if spare < 1:
            raise OptionError(
                f"--draft-window {window.window_tokens} does not fit in {inner.name}'s context of"
                f" {inner.context_tokens} tokens",
                f"use --draft-window {max(1, inner.context_tokens // 2)} or less",
                option="draft_window",
                code="option_not_supported",
            )
        self._window = window
        self._start = window.sink_tokens
        max_width = min(inner.capabilities.max_width, spare)
        self.facts = replace(
            inner,
            context_tokens=context_tokens,
            requested_context_tokens=context_tokens,
            capabilities=wrapped_capabilities(inner.capabilities, max_width),
        )

    @property
    def _end(self) -> int:
        cached, sinks = self._model.length, self._window.sink_tokens
        return cached if cached < sinks else cached - sinks + self._start

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._round = ()
        before = len(self._tokens)
        self._tokens += tokens
        try:
            self._update_inner_cache(progress)
        except BaseException:
            del self._tokens[max(before, self._end) :]
            raise

    def _update_inner_cache(self, progress: Progress | None = None) -> None:
        sinks, length = self._window.sink_tokens, len(self._tokens)
        cached = self._model.length
        if cached < sinks:
            self._start = sinks
        needed = cached + length - self._end
        # Recompute the attention window if truncating the sequence has left too few tokens in it.
        too_small = self._start > sinks and needed < sinks + self._window.slack_tokens
        if needed > self._max_cached_tokens or too_small:
            self._evict()
        if self._model.length < sinks:
            self._model.prefill(self._tokens[self._model.length : sinks])
        if self._end < length:
            self._model.prefill(self._tokens[self._end : length], progress)

    def _evict(self) -> None:
        sinks, window_tokens = self._window.sink_tokens, self._window.window_tokens
        start = max(sinks, len(self._tokens) - window_tokens)
        if self._start < start < self._end:
            try:
                self._model.remove_range(sinks, sinks + start - self._start)
                self._start = start
                return
            except CapabilityError:  # Recompute half of the window, so that it has room to grow.
                start = max(sinks, len(self._tokens) - max(1, window_tokens // 2))
        self._model.truncate(min(sinks, self._model.length))
        self._start = start

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        try:
            self._check(tree.width)
            if tree.width > self.facts.capabilities.max_width:
                raise CapabilityError(
                    f"a draft of {tree.width} tokens exceeds the maximum of"
                    f" {self.facts.capabilities.max_width} tokens",
                    code="draft_too_wide",
                )
            if first == 0:
                self._update_inner_cache()
            logits = self._model.verify(tree, first)
        except BaseException:
            self._end_round()
            raise
        self._round = tree.tokens
        return logits

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self._model.commit(path)
        self._tokens += (self._round[node] for node in (0, *path))
        self._round = ()

    def truncate(self, length: int) -> None:
        """See `LanguageModel.truncate`. Evicted tokens are recomputed when needed."""
        self._check(0)
        self._round = ()
        del self._tokens[length:]
        length = min(length, self._end)
        sinks = self._window.sink_tokens
        self._model.truncate(length if length <= sinks else sinks + max(0, length - self._start))
        if self._model.length <= sinks:
            self._start = sinks

    def resize(self, context_tokens: int) -> None:
        """See `LanguageModel.resize`. Changes the maximum sequence length but not the attention window."""
        self._check_size(context_tokens)
        self._end_round()
        self._now_sized(context_tokens, self.facts.kv_bytes)

    def run_ahead(self, enabled: bool) -> None:
        self._model.run_ahead(enabled)
