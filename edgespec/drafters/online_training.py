"""What a draft learns between replies from what it guessed wrong, and whether that is used.

Source: online speculative decoding (OSD, arXiv 2310.07177): where the draft was wrong, what the target said
there is kept, and the draft is trained on that while nothing else is to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.optional_features import Trainer, TrainingExample
from edgespec.drafters.array_store import ArrayStore
from edgespec.drafters.draft_cache import DraftCache
from edgespec.drafters.draft_model import known
from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError

__all__ = ["OnlineTrainer"]

TARGET_TOKENS = 16
# A lesson holds so many tokens, of which the first ones are there to be looked back on.
LESSON_TOKENS = 96
_LOOK_BACK = 32
_MOST_LESSONS = 128
# Steps of one rest, for each new lesson and altogether.
_STEPS_A_LESSON = 4
_MOST_STEPS = 64
# What was learnt is judged by so many of the last tokens, and used from so many on.
_JUDGED_TOKENS = 1024
_FEWEST_JUDGED = 64
_NOTHING = np.zeros(0)


@dataclass(frozen=True, slots=True)
class _Mistake:
    """What the target said after the token at `position`, where the draft guessed wrong."""

    position: int
    best: NDArray[np.int64]
    probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Judged:
    """A stretch of a reply the draft had not learnt from yet: its tokens, and who would have guessed them."""

    tokens: int
    before: int
    after: int


class OnlineTrainer:
    """A draft model that is trained between replies. Its own weights stay as they are.

    memory: of the draft, which `trainer` adapts. notes: where what was learnt is kept.
    What was learnt is used only while the last texts, each judged before it was learnt from, say that it
    guesses better. After a change the draft's cache is computed again, in the rest or when a reply begins.
    """

    def __init__(self, memory: DraftCache, trainer: Trainer, *, notes: ArrayStore | None = None) -> None:
        self._memory = memory
        self._draft = memory.model
        self._trainer = trainer
        self._notes = notes
        self._tokens: list[int] = []
        self._prompt_tokens = 0
        # Whether there were guesses in this reply.
        self._guessed = False
        self._mistakes: list[_Mistake] = []
        self._pending: deque[tuple[TrainingExample, int]] = deque(maxlen=_MOST_LESSONS)
        self._lessons: deque[TrainingExample] = deque(maxlen=_MOST_LESSONS)
        self._due = 0
        self._judged: deque[_Judged] = deque()
        self._learnt_from = self._steps = 0
        self._random = np.random.default_rng(0)
        # The draft's cache was computed with other weights than it runs with now.
        self._stale = False
        if notes:
            self._take_over(notes)

    @property
    def size_bytes(self) -> int:
        """What learning takes in memory; a step's own part is known once there was one."""
        return self._trainer.state_bytes + self._trainer.peak_step_bytes

    def begin(self, tokens: Sequence[int]) -> None:
        """A reply begins, or is followed again, after `tokens`."""
        if self._stale:
            self._draft.truncate(0)
            self._stale = False
        self._collect()
        self._tokens, self._prompt_tokens = list(tokens), len(tokens)

    def extend(self, tokens: tuple[int, ...]) -> None:
        """The text goes on."""
        self._tokens.extend(tokens)

    def compare(
        self, proposed: TokenTree, verified: TokenTree, logits: Logits, tokens: tuple[int, ...]
    ) -> None:
        """What was proposed, what was verified, what the target said of that, and how the text goes on."""
        self._guessed |= proposed.drafted > 0
        guessed = proposed.walk(tokens)
        right = len(guessed) - 1
        rows = verified.walk(tokens[:right])
        if len(rows) <= right:  # the guess was right and cut off before it was verified
            return
        if right < len(tokens) and proposed.children(guessed[-1]):
            position = len(self._tokens) - 1 + right
            self._mistakes.append(self._mistake(position, logits, rows[-1]))

    def _mistake(self, position: int, logits: Logits, row: int) -> _Mistake:
        size = self._draft.facts.vocab_size
        tokens, values = logits.limit_vocab(size).top(row, TARGET_TOKENS)
        # Ties may bring more than were asked for, and a lesson's rows are of one length.
        order = np.argsort(-values, kind="stable")[:TARGET_TOKENS]
        weights = np.exp(values[order] - values.max())
        return _Mistake(
            position, tokens[order].astype(np.int64), (weights / weights.sum()).astype(np.float32)
        )

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Judge the last reply, then learn from it, one lesson a step."""
        try:
            self._collect()
            while self._pending and should_continue():
                lesson, first = self._pending.popleft()
                if self._steps:
                    self._judge(lesson.tokens, first)
                if lesson.rows:
                    self._lessons.append(lesson)
                    self._learnt_from += len(lesson.rows)
                    self._due = min(self._due + _STEPS_A_LESSON, _MOST_STEPS)
            changed = self._learn(should_continue)
            self._choose(changed)
            if self._stale and should_continue():
                self._compute_again(should_continue)
        finally:
            self._trainer.release_thread_state()

    def _collect(self) -> None:
        """Cut the reply into stretches, each after what is before it.

        One without a mistake is judged too: otherwise what was learnt well would never count.
        """
        stretch = LESSON_TOKENS - _LOOK_BACK
        begins = range(self._prompt_tokens, len(self._tokens), stretch) if self._guessed else ()
        for begin in begins:
            end = min(begin + stretch, len(self._tokens))
            start = max(0, begin - _LOOK_BACK)
            mine = [m for m in self._mistakes if begin - 1 <= m.position < end - 1]
            lesson = TrainingExample(
                tuple(known(self._draft, self._tokens[start:end])),
                tuple(m.position - start for m in mine),
                np.array([m.best for m in mine], np.int64),
                np.array([m.probs for m in mine], np.float32),
            )
            self._pending.append((lesson, begin - start))
        self._mistakes, self._guessed = [], False

    def _judge(self, tokens: Sequence[int], first: int) -> None:
        before = self._trainer.count_hits(tokens, first, adapted=False)
        after = self._trainer.count_hits(tokens, first, adapted=True)
        self._judged.append(_Judged(len(tokens) - first, before, after))
        while sum(one.tokens for one in self._judged) > _JUDGED_TOKENS + LESSON_TOKENS:
            self._judged.popleft()

    def _learn(self, wanted: Callable[[], bool]) -> bool:
        """Take the steps that are due, newer lessons more often. True when a weight has changed."""
        changed = False
        while self._due and self._lessons and wanted():
            newest = len(self._lessons)
            # The larger of two draws: new lessons come twice as often, old ones are not forgotten.
            pick = int(self._random.integers(newest, size=2).max())
            self._trainer.train_step(self._lessons[pick])
            self._due -= 1
            self._steps += 1
            changed = True
        return changed

    def _choose(self, changed: bool) -> None:
        """Use what was learnt, unless the last texts say that the original guesses better."""
        wanted = self._better
        if wanted != self._trainer.adapted:
            self._trainer.set_adapted(wanted)
            self._stale = True
        elif changed and wanted:
            self._stale = True
        if changed and self._notes:
            self._notes.save(self._to_keep())

    @property
    def _better(self) -> bool:
        before, after, tokens = self.judged
        return self._steps > 0 and (tokens < _FEWEST_JUDGED or after >= before)

    def _compute_again(self, wanted: Callable[[], bool]) -> None:
        """Bring the draft's cache to the end of the text as the weights are now, as far as time allows."""
        self._draft.truncate(0)
        self._stale = False
        self._memory.begin(self._tokens)
        with suppress(CancelledError):  # what is missing is read when a guess is wanted
            self._memory.read(progress=lambda *_: wanted())

    def _to_keep(self) -> dict[str, NDArray[Any]]:
        """What was learnt, from how much, and how it was judged."""
        judged = [(one.tokens, one.before, one.after) for one in self._judged]
        return {
            "learnt": np.array([self._steps, self._learnt_from], np.int64),
            "judged": np.array(judged, np.int64).reshape(-1, 3),
            **self._trainer.adapter_weights(),
        }

    def _take_over(self, notes: ArrayStore) -> None:
        kept = dict(notes.load())
        learnt, judged = kept.pop("learnt", _NOTHING), kept.pop("judged", _NOTHING)
        if learnt.shape != (2,) or judged.shape[1:] != (3,) or not self._trainer.load_adapter(kept):
            return
        self._steps, self._learnt_from = max(1, int(learnt[0])), int(learnt[1])
        self._judged.extend(_Judged(*one) for one in judged.tolist())
        self._trainer.set_adapted(self._better)

    @property
    def judged(self) -> tuple[int, int, int]:
        """Of the last tokens: how many the original draft would have guessed, the adapted one, and all."""
        return (
            sum(one.before for one in self._judged),
            sum(one.after for one in self._judged),
            sum(one.tokens for one in self._judged),
        )

    def note(self) -> str:
        """One line on what it has learnt."""
        return " · ".join(filter(None, (self._learnt(), self._notes.notice if self._notes else "")))

    def _learnt(self) -> str:
        if not self._steps:
            return "the draft has learnt nothing yet"
        before, after, tokens = self.judged
        used = "" if self._trainer.adapted else "; it is not used, the original guesses better"
        found = f"the draft took {self._steps} steps on {self._learnt_from} wrong guesses"
        if not tokens:
            return f"{found}{used}"
        return (
            f"{found}: of the last {tokens} tokens it guesses {after / tokens:.0%},"
            f" {before / tokens:.0%} as it was{used}"
        )
