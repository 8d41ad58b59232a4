"""Resize the target's and draft model's KV caches on demand, starting small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter as now

from edgespec.errors import ContextFullError, MemoryBudgetError
from edgespec.memory.constants import MIN_DRAFT_TOKENS, MIN_ROOM_TOKENS
from edgespec.memory.plan import MemoryPlan
from edgespec.model.base import LanguageModel
from edgespec.model.memory_estimate import round_up_to_block

__all__ = ["ResizableContext", "has_room_to_resize"]


def has_room_to_resize(plan: MemoryPlan) -> bool:
    """Return whether a memory plan leaves room to copy the KV cache, which resizing requires.

    If it does not, the full context is allocated when the models are loaded.
    """
    caches: Counter[str] = Counter()
    for item in plan.items:
        if item.kind == "cache":
            caches[item.role] += item.bytes
    return max(caches.values(), default=0) / 2 <= plan.free_bytes("memory") - plan.prefix_cache_bytes


class ResizableContext:
    """Grows the contexts of a target and its draft model during replies, and shrinks them in between.

    Use only on the thread that runs the models, and not between `verify` and `commit`. A resize preserves the
    contents of the caches. To limit copying, contexts at least double in size when they grow.

    Attributes:
        limit_tokens: Maximum context size. Reduced if there is not enough memory to grow.
        notice: User-facing message about a failed resize, or an empty string.
    """

    def __init__(self, target: LanguageModel, draft: LanguageModel | None = None) -> None:
        self.limit_tokens = target.facts.max_context_tokens
        self.notice = ""
        self._target = target
        self._draft = draft
        self._draft_follows = draft is not None
        # Initial size of each context, below which it never shrinks.
        self._first_tokens = {
            id(model): model.facts.context_tokens for model in (target, draft) if model is not None
        }
        self._failure = ""

    def watch_memory(self, spare_bytes: Callable[[], int]) -> None:
        """Let the target use less memory while memory is low. See `LanguageModel.watch_memory`."""
        self._target.watch_memory(spare_bytes)

    @property
    def needs_room(self) -> bool:
        """Whether the context is nearly full and can still grow."""
        return (
            self._target.free_tokens < MIN_ROOM_TOKENS
            and self._target.facts.context_tokens < self.limit_tokens
        )

    def make_room(self) -> float:
        """Grow the context if it is nearly full. Return the time taken in seconds."""
        return self.grow_to(self._target.length + MIN_ROOM_TOKENS)

    def grow_to(self, tokens: int) -> float:
        """Grow the context to at least `tokens`, if its limit and the available memory allow.

        If there is not enough memory, the context keeps its size, and `limit_tokens` is reduced to that size.

        Returns:
            The time taken in seconds.
        """
        size = self._target.facts.context_tokens
        least = min(tokens, self.limit_tokens)
        if least <= size:
            return 0.0
        started = now()
        generous = max(least, 2 * size)
        if 2 * generous > self.limit_tokens:
            generous = self.limit_tokens
        if not self._grow_target(generous, least):
            # The size is 0 if the target has lost its KV cache. A limit of 0 would keep it from allocating a
            # new one.
            size = self._target.facts.context_tokens
            self.limit_tokens = size or self.limit_tokens
            self.notice = f"the context cannot grow beyond {size} tokens: {self._failure}"
        self._grow_draft()
        return now() - started

    @property
    def can_shrink(self) -> bool:
        """Whether the contexts can shrink to free memory."""
        return self._smaller_size(self._target, self._target.length + MIN_ROOM_TOKENS) is not None

    def shrink(self) -> int:
        """Shrink each context to the size that its tokens need, if that frees at least half of it.

        The target keeps all its tokens. The draft model drops tokens beyond its new size and reprocesses them
        later.

        Returns:
            The number of bytes freed.
        """
        before = self.kv_bytes
        self._shrink_model(self._target, self._target.length + MIN_ROOM_TOKENS)
        if self._draft and self._draft_follows:
            self._shrink_model(self._draft, self._target.facts.context_tokens)
        return max(0, before - self.kv_bytes)

    @property
    def kv_bytes(self) -> int:
        """Total size of the KV caches of the target and the draft model, in bytes."""
        return self._target.facts.kv_bytes + (self._draft.facts.kv_bytes if self._draft else 0)

    def _smaller_size(self, model: LanguageModel, tokens: int) -> int | None:
        size = max(self._first_tokens[id(model)], round_up_to_block(tokens))
        return size if 2 * size <= model.facts.context_tokens else None

    def _shrink_model(self, model: LanguageModel, tokens: int) -> None:
        size = self._smaller_size(model, tokens)
        if size is None:
            return
        if model.length > size:
            model.truncate(size)
        # Ignore a failed resize, because the next prompt resizes the context again if necessary. A draft
        # model with another vocabulary can hold more tokens than its length suggests.
        with suppress(MemoryBudgetError, ContextFullError):
            model.resize(size)

    def check_fits(self, tokens: int) -> None:
        """Raise ContextFullError if the context cannot grow enough for a prompt of this length."""
        size = self._target.facts.context_tokens
        if tokens > size:
            raise ContextFullError(
                f"the prompt has {tokens:,} tokens, but there is only enough memory for a context of"
                f" {size:,}",
                "shorten the prompt, close other programs, or choose a smaller model",
                code="out_of_memory",
            )

    def _grow_target(self, generous: int, least: int) -> bool:
        for size in dict.fromkeys((generous, least)):
            if self._resize_target(size):
                return True
        return self._drop_draft_cache() and self._resize_target(least)

    def _resize_target(self, size: int) -> bool:
        try:
            self._target.resize(size)
        except MemoryBudgetError as error:
            self._failure = error.what
            return False
        return True

    def _drop_draft_cache(self) -> bool:
        draft, self._draft, self._draft_follows = self._draft, None, False
        if draft is None:
            return False
        before = draft.facts.kv_bytes
        draft.truncate(0)
        with suppress(MemoryBudgetError):
            draft.resize(MIN_DRAFT_TOKENS)
        if freed := draft.facts.kv_bytes < before:
            self.notice = (
                f"turned off the draft model {draft.facts.name}, because the context needs its memory"
            )
        return freed

    def _grow_draft(self) -> None:
        draft = self._draft
        if draft is None or not self._draft_follows:
            return
        size = min(self._target.facts.context_tokens, draft.facts.max_context_tokens)
        if size <= draft.facts.context_tokens:
            return
        try:
            draft.resize(size)
        except MemoryBudgetError as error:
            self._draft_follows = False
            self.notice = (
                f"the draft model {draft.facts.name} cannot draft beyond {draft.facts.context_tokens} tokens:"
                f" {error.what}"
            )
