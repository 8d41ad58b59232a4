"""The contexts of a target and its draft model: small at first, made larger when a text needs it."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from time import perf_counter as now

from edgespec.backends.base import LanguageModel
from edgespec.backends.memory_check import round_up_to_block
from edgespec.errors import ContextFullError, MemoryBudgetError
from edgespec.memory.plan import MemoryPlan

__all__ = ["INITIAL_CONTEXT_TOKENS", "MIN_ROOM_TOKENS", "ResizableContext", "has_room_to_resize"]

# A context begins with so many tokens, which most replies never fill.
INITIAL_CONTEXT_TOKENS = 2048
# It is made larger before a round has less than this: as wide as a pass may be, so that none is cut short.
MIN_ROOM_TOKENS = 256
# What is left of a draft model's context where its memory is needed for the text itself.
_LEAST_TOKENS = 256


def has_room_to_resize(plan: MemoryPlan) -> bool:
    """Whether memory is left for the copy of a cache that is made larger: one at a time, half of it at most.

    Where a plan fills what was given, the context is better taken at once.
    """
    caches: Counter[str] = Counter()
    for item in plan.items:
        if item.kind == "cache":
            caches[item.role] += item.bytes
    return max(caches.values(), default=0) / 2 <= plan.free_bytes("memory")


class ResizableContext:
    """Makes both contexts larger between rounds, each time twice as large at least; smaller between replies.

    What is copied meanwhile is no more than half of what the largest context takes.
    limit_tokens: what the context may become; where memory ran out, what it is. notice: then says so.
    Caches keep what is in them: nothing is read again.
    """

    def __init__(self, target: LanguageModel, draft: LanguageModel | None = None) -> None:
        self.limit_tokens = target.facts.max_context_tokens
        self.notice = ""
        self._target = target
        self._draft = draft
        self._draft_follows = draft is not None
        # A context is made no smaller than it began; one that was taken whole at once stays so.
        self._first_tokens = {
            id(model): model.facts.context_tokens for model in (target, draft) if model is not None
        }
        # The size that the draft's context had before its memory was given away; whether that frees any.
        self._suspended_tokens = 0
        self._draft_gives = True

    @property
    def short(self) -> bool:
        """Whether the next round might have too little room, and may have more."""
        return (
            self._target.free_tokens < MIN_ROOM_TOKENS
            and self._target.facts.context_tokens < self.limit_tokens
        )

    def make_room(self) -> float:
        """Make room for the next rounds, if there may be more. Returns the seconds that took."""
        return self.hold(self._target.length + MIN_ROOM_TOKENS)

    def hold(self, tokens: int) -> float:
        """Let the context hold so many tokens, as far as it may. Returns the seconds that took.

        No round is open. Where there is no memory for it, the context stays as it is, and is no longer asked
        to grow.
        """
        size = self._target.facts.context_tokens
        if min(tokens, self.limit_tokens) <= size:
            return 0.0
        started = now()
        least = min(tokens, self.limit_tokens)
        generous = max(least, 2 * size)
        if 2 * generous > self.limit_tokens:
            generous = self.limit_tokens
        if not self._grown(generous, least):
            size = self._target.facts.context_tokens
            # Where not even the former size was to be had again, the next prompt may find memory.
            self.limit_tokens = size or self.limit_tokens
            self.notice = f"the context stays at {size} tokens: {self._why}"
        self._let_draft_follow()
        return now() - started

    @property
    def gives(self) -> bool:
        """Whether there may be memory to give back, see `shrink` and `suspend_draft`."""
        draft = self._draft if not self._suspended_tokens else None
        target = self._smaller(self._target, self._target.length + MIN_ROOM_TOKENS)
        return target is not None or (draft is not None and self._draft_gives)

    def shrink(self, tokens: int = 0) -> int:
        """Make the contexts as small as holds the text, or so many tokens, where that frees half of one.

        No round is open. Returns the bytes that are free now. The cache is as it was; of the draft's, what is
        beyond its new size goes.
        """
        before = self.kv_bytes
        self._make_smaller(self._target, max(tokens, self._target.length + MIN_ROOM_TOKENS))
        if self._draft and self._draft_follows and not self._suspended_tokens:
            self._make_smaller(self._draft, self._target.facts.context_tokens)
        return max(0, before - self.kv_bytes)

    @property
    def kv_bytes(self) -> int:
        """What the caches of both take now."""
        return self._target.facts.kv_bytes + (self._draft.facts.kv_bytes if self._draft else 0)

    def _smaller(self, model: LanguageModel, tokens: int) -> int | None:
        """The size to hold so many tokens; None where that is more than half of what there is.

        So much at most is copied meanwhile, while memory is short.
        """
        size = max(self._first_tokens[id(model)], round_up_to_block(tokens))
        return size if 2 * size <= model.facts.context_tokens else None

    def _make_smaller(self, model: LanguageModel, tokens: int) -> None:
        size = self._smaller(model, tokens)
        if size is None:
            return
        if model.length > size:  # a draft's: it may remember more of another text
            model.truncate(size)
        # Where it fails the context is what it was, or lost, and made again for the next prompt.
        with suppress(MemoryBudgetError):
            model.resize(size)

    def suspend_draft(self) -> int:
        """Give the draft's cache away until `resume_draft`: it guesses no more. Returns the freed bytes."""
        draft = self._draft
        if draft is None or self._suspended_tokens:
            return 0
        size, held = draft.facts.context_tokens, draft.facts.kv_bytes
        if size <= _LEAST_TOKENS or not self._draft_gives:
            return 0
        draft.truncate(0)
        with suppress(MemoryBudgetError):
            draft.resize(_LEAST_TOKENS)
        self._suspended_tokens = size
        if (freed := held - draft.facts.kv_bytes) <= 0:
            self._draft_gives = False  # a window's cache, for one, is no larger than it must be
            self.resume_draft()
        return max(0, freed)

    @property
    def suspended(self) -> bool:
        """Whether the draft waits for its cache."""
        return self._suspended_tokens > 0

    def resume_draft(self) -> None:
        """Give the draft its context back, if there is memory for that; it reads the text again."""
        draft, size = self._draft, self._suspended_tokens
        if draft is None or not size:
            return
        with suppress(MemoryBudgetError):
            draft.resize(size)
            self._suspended_tokens = 0
            self._let_draft_follow()

    def check_holds(self, tokens: int) -> None:
        """Raises ContextFullError for a prompt of so many tokens that found no memory."""
        size = self._target.facts.context_tokens
        if tokens > size:
            raise ContextFullError(
                f"the prompt is {tokens} tokens long and there is memory for {size}",
                "shorten it, close other programs, or choose a smaller model",
            )

    def _grown(self, generous: int, least: int) -> bool:
        for size in dict.fromkeys((generous, least)):
            if self._resized(size):
                return True
        return self._gave_up_draft() and self._resized(least)

    def _resized(self, size: int) -> bool:
        try:
            self._target.resize(size)
        except MemoryBudgetError as error:
            self._why = error.what
            return False
        return True

    def _gave_up_draft(self) -> bool:
        """Give the draft's cache up: without room it guesses no more. False where that frees nothing."""
        draft, self._draft, self._draft_follows = self._draft, None, False
        if draft is None:
            return False
        held = draft.facts.kv_bytes
        draft.truncate(0)
        with suppress(MemoryBudgetError):
            draft.resize(_LEAST_TOKENS)
        if freed := draft.facts.kv_bytes < held:
            self.notice = f"{draft.facts.name} guesses no more: its memory is needed for the text"
        return freed

    def _let_draft_follow(self) -> None:
        """Let the draft see as much, as long as there is memory for that; it guesses no more beyond."""
        draft = self._draft
        if draft is None or not self._draft_follows or self._suspended_tokens:
            return
        size = min(self._target.facts.context_tokens, draft.facts.max_context_tokens)
        if size <= draft.facts.context_tokens:
            return
        try:
            draft.resize(size)
        except MemoryBudgetError as error:
            self._draft_follows = False
            self.notice = f"{draft.facts.name} sees {draft.facts.context_tokens} tokens at most: {error.what}"
