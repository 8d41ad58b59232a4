"""The text in a target's cache: brought to a prompt, and kept before it makes room for another."""

from __future__ import annotations

from time import perf_counter as now

from edgespec.backends.base import LanguageModel, Progress
from edgespec.backends.base_model import scaled_progress
from edgespec.engine.prefix import common_prefix_length
from edgespec.engine.stats import Stats
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.prefix_cache import REUSE_BLOCK_TOKENS, PrefixCache, reusable_tokens
from edgespec.memory.pressure import MemoryPressure

__all__ = ["TargetCache"]


class TargetCache:
    """The tokens that a target has read. Belongs to the thread that runs the model.

    At every moment the target holds a beginning of them, or more than them: an interrupt may come between any
    two steps.
    """

    def __init__(
        self,
        target: LanguageModel,
        kept: PrefixCache | None,
        context: ResizableContext,
        giving: MemoryPressure,
    ) -> None:
        self._target = target
        self._kept = kept
        self._context = context
        self._giving = giving
        self._tokens: list[int] = []
        self._continues = target.facts.capabilities.prefix_reuse_exact
        # So many of them were read, the others written.
        self._read_tokens = 0

    @property
    def saved(self) -> bool:
        """Whether `keep` keeps it on disk, too."""
        return self._kept is not None and self._kept.saves

    def settle(self) -> None:
        """Nothing runs: it is as long as what the target holds of it."""
        self._tokens = self._tokens[: self._target.length]

    def distrust(self) -> None:
        """Who knows what the target holds: the next prompt is read from its beginning."""
        self._tokens = []

    def keep(self) -> None:
        """Keep it among the other texts, where they are kept on disk."""
        if self._kept and self._kept.saves:
            self.settle()
            self._drop_unsure()
            self._kept.keep(self._tokens)

    def give_way(self) -> None:
        """Give back what other programs need; the text may lose its end by that."""
        self.settle()
        self._giving.between_replies()
        self.settle()

    def become(self, tokens: list[int], beyond: int, stats: Stats, progress: Progress | None) -> int:
        """Bring the target's cache to all tokens but the last; how many of them it held already.

        tokens: what is appended to them later belongs to the text. beyond: so many more should find room.
        """
        target, kept = self._target, self._kept
        self._drop_unsure()
        shared = self._sure(min(common_prefix_length(self._tokens, tokens), len(tokens) - 1))
        if kept and shared < len(self._tokens):
            kept.keep(self._tokens, shared)
        self._tokens = self._tokens[:shared]
        target.truncate(shared)
        stats.growth_seconds += self._giving.between_replies(len(tokens) + beyond)
        self._giving.begin_reply()
        self.settle()
        stats.growth_seconds += self._context.hold(len(tokens) + beyond)
        self._context.check_holds(len(tokens))
        if kept and (found := kept.find(tokens, target.length)):
            self._tokens = []
            kept.restore(found, tokens, target.length)
        held = self._begun()
        self._tokens = tokens
        self._read_tokens = held
        last, done = len(tokens) - 1, 0.0
        if kept and (parting := self._sure(kept.parting(tokens, held))) > held:
            done = (parting - held) / (last - held)
            self._read(parting, progress and scaled_progress(progress, 0.0, done))
            kept.keep_parting(tokens[:parting])
        self._read(last, progress and scaled_progress(progress, done, 1.0 - done))
        return held

    def _sure(self, length: int) -> int:
        return reusable_tokens(self._target.facts.capabilities, length)

    def _drop_unsure(self) -> None:
        """Drop what a reading of all would not have left as it is: what was written, and the last piece."""
        if not self._continues:
            sure = self._sure(min(self._read_tokens, len(self._tokens)))
            self._tokens = self._tokens[:sure]
            self._target.truncate(sure)
            self.settle()

    def _begun(self) -> int:
        """Cut the cache to whole pieces, where that matters; how many tokens are left."""
        length = self._target.length
        if (whole := self._sure(length)) < length:
            self._target.truncate(whole)
            if self._target.length < whole:  # it cannot go back to there
                self._target.truncate(0)
        return self._target.length

    def _read(self, end: int, progress: Progress | None) -> None:
        """Read on, to the first `end` tokens."""
        begin, started = self._target.length, now()
        size = end - begin if self._continues else REUSE_BLOCK_TOKENS
        for start in range(begin, end, max(1, size)):
            stop = min(end, start + size)
            told = progress and scaled_progress(
                progress, (start - begin) / (end - begin), (stop - start) / (end - begin)
            )
            self._target.prefill(self._tokens[start:stop], told)
            self._read_tokens = stop
        if self._kept:
            self._kept.worth.note_read(end - begin, now() - started)
