"""The logits processor that makes a reply satisfy a constraint.

`AnswerStart` finds where the answer starts. Constraints do not apply to any reasoning before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.chat.reasoning import REASONING_MARKERS, piece_with_markers
from edgespec.constraints.matcher import readable
from edgespec.constraints.tokenizer import ConstraintTokenizer
from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.errors import OptionError
from edgespec.model.base import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["AnswerStart", "ConstraintProcessor"]

# Number of tokens at the end of a prompt to search for a marker that closes the reasoning.
_PROMPT_END_TOKENS = 40
# Maximum number of cached masks. Masks are cached because each round visits the states of a draft tree
# several times.
_MAX_MASKS = 128


@dataclass(frozen=True, slots=True)
class Opening:
    """The phase before any reasoning or answer. `tokens` holds the tokens of the opening marker so far."""

    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning phase, which ends with the marker `close`. `tail` holds the most recent bytes."""

    close: bytes
    tail: bytes = b""


@dataclass(frozen=True, slots=True)
class Gap:
    """The phase between the reasoning and the answer. `allows_space` is true if whitespace may come next."""

    allows_space: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer phase, to which the constraint applies."""


@dataclass(frozen=True, slots=True)
class Unconstrained:
    """The phase after the reply has ended, or after a drafted token that the target can never choose."""


AnswerPhase: TypeAlias = Opening | Reasoning | Gap | Answer | Unconstrained


class AnswerStart:
    """Tracks whether a reply is in its reasoning or its answer.

    Only a marker at the start of the reply opens reasoning (see `ReasoningSplitter`). The model may use
    any marker from its chat template, unless the prompt already ends with a closing marker, or an answer
    could start with the opening marker's first token.

    Args:
        tokenizer: The vocabulary, with the tables that constraints need.
        vocabulary: The target's tokenizer.
        prompt: The prompt's tokens.
        reply_start: Text at the end of the prompt that already belongs to the reply.
        answer_tokens: Mask of the tokens that an answer can start with.

    Attributes:
        phase: The phase before the first generated token.
        text: The part of the answer that `reply_start` contains.
    """

    def __init__(
        self,
        tokenizer: ConstraintTokenizer,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        reply_start: str,
        answer_tokens: NDArray[np.bool_],
    ) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._openings: dict[tuple[int, ...], bytes] = {}
        self.phase, self.text = _phase_after(reply_start)
        if isinstance(self.phase, Opening):
            ending = b"".join(piece_with_markers(vocabulary, token) for token in prompt[-_PROMPT_END_TOKENS:])
            for tokens, close in _openings(vocabulary, ending.decode("utf-8", "replace")).items():
                if not answer_tokens[tokens[0]]:
                    self._openings[tokens] = close
            if not self._openings:
                self.phase = Answer()

    def after(self, phase: AnswerPhase, token: int) -> AnswerPhase:
        """Return the phase after a token. A token that belongs to the answer leads to `Answer`."""
        if isinstance(phase, Unconstrained) or self._tokenizer.end_mask[token]:
            return Unconstrained()
        if isinstance(phase, Opening):
            return self._after_opening((*phase.tokens, token))
        if isinstance(phase, Reasoning):
            return self._after_reasoning(phase, token)
        if isinstance(phase, Gap) and phase.allows_space and self._tokenizer.space_mask[token]:
            return Gap(allows_space=False)
        return Answer()

    def _after_opening(self, tokens: tuple[int, ...]) -> AnswerPhase:
        if tokens in self._openings:
            close = self._openings[tokens]
            return Reasoning(close) if close else Gap()
        if any(marker[: len(tokens)] == tokens for marker in self._openings):
            return Opening(tokens)
        return Answer() if len(tokens) == 1 else Unconstrained()

    def _after_reasoning(self, phase: Reasoning, token: int) -> AnswerPhase:
        text = phase.tail + piece_with_markers(self._vocabulary, token)
        _, found, rest = text.partition(phase.close)
        if not found:
            return Reasoning(phase.close, text[1 - len(phase.close) :])
        return Unconstrained() if rest.strip() else Gap(allows_space=not rest)

    def allowed(self, phase: AnswerPhase) -> NDArray[np.bool_]:
        """Return a mask of the tokens that a phase allows in addition to those that the constraint allows.

        A reply must not end during its reasoning, because it would have no answer.
        """
        if isinstance(phase, Opening):
            done = len(phase.tokens)
            openings = [tokens for tokens in self._openings if tokens[:done] == phase.tokens]
            return self._tokenizer.mask([tokens[done] for tokens in openings])
        if isinstance(phase, Gap) and phase.allows_space:
            return self._tokenizer.space_mask
        if isinstance(phase, Reasoning):
            allowed = ~self._tokenizer.end_mask
            # Exclude tokens that contain both the end of the marker and the start of the answer.
            for done in range(1, len(phase.close)):
                if phase.tail.endswith(phase.close[:done]):
                    allowed &= ~self._tokenizer.longer_than(phase.close[done:])
            return allowed
        return self._tokenizer.mask([])


def _phase_after(reply_start: str) -> tuple[AnswerPhase, str]:
    """Return the phase after `reply_start`, and the answer text that it contains."""
    text = reply_start.lstrip()
    if not text:
        return Opening(), reply_start
    opening = next((marker for marker in REASONING_MARKERS if text.startswith(marker)), None)
    if opening is None:
        return Answer(), reply_start
    close, text = REASONING_MARKERS[opening], text[len(opening) :]
    _, found, answer = text.partition(close) if close else ("", "", text)
    if close and not found:
        return Reasoning(close.encode(), text.encode()[1 - len(close.encode()) :]), ""
    return (Answer(), answer.lstrip()) if answer.strip() else (Gap(allows_space=not answer), "")


def _openings(vocabulary: Vocabulary, prompt: str) -> dict[tuple[int, ...], bytes]:
    closes = tuple(close for close in REASONING_MARKERS.values() if close)
    if prompt.rstrip().endswith(closes):
        return {}
    return {
        tuple(vocabulary.tokenize(marker, special=True, start=False)): close.encode()
        for marker, close in REASONING_MARKERS.items()
        if marker in (vocabulary.chat_template or "")
    }


class _State:
    """A node in the tree of all token sequences visited by the reply and its drafts.

    Attributes:
        parent: The state before the token, or None at the start of the reply.
        token: The token, or -1 at the start.
        phase: The phase that the reply is in.
        in_answer: Whether the token is part of the answer, so that the matcher consumes it.
        depth: Number of tokens since the start of the reply.
        children: The next states, keyed by token.
        mask: The tokens allowed next, bool [vocabulary]. None if not yet computed, or evicted.
    """

    __slots__ = ("children", "depth", "in_answer", "mask", "parent", "phase", "token")

    def __init__(self, parent: _State | None, token: int, phase: AnswerPhase) -> None:
        self.parent, self.token, self.phase = parent, token, phase
        self.in_answer = parent is not None and isinstance(phase, Answer)
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[int, _State] = {}
        self.mask: NDArray[np.bool_] | None = None


class ConstraintProcessor(LogitsProcessor):
    """Masks the tokens that violate a constraint. Each instance serves one reply.

    `push` and `pop` only move between states. When a mask is needed, the matcher rolls back to the last
    token shared with the current state, and consumes the tokens after it. Drafts are not masked, so they can
    contain forbidden tokens. States after a forbidden token have no mask, because the target never chooses
    that token.

    Args:
        tokenizer: The vocabulary.
        matcher: A new llguidance matcher for the constraint, used only for this reply.
        start: Where the answer starts.
    """

    def __init__(self, tokenizer: ConstraintTokenizer, matcher: LLMatcher, start: AnswerStart) -> None:
        self._tokenizer, self._matcher, self._start = tokenizer, matcher, start
        # The current state, and the state whose tokens the matcher has consumed.
        self._state = self._matched = _State(None, -1, start.phase)
        self._masked: deque[_State] = deque()
        # `_checked` is the answer last passed to `may_end`. `_checker` has consumed it, or is None if the
        # constraint does not allow that answer.
        self._checker: LLMatcher | None = matcher.deep_copy()
        self._initial, self._checked = matcher.deep_copy(), ""

    def may_end(self, answer: str) -> bool:
        """Return whether the reply could end after `answer`, because it satisfies the constraint.

        Args:
            answer: The generated text of the answer, excluding any part that the prompt already contains. It
                usually extends the answer of the previous call.
        """
        if not answer.startswith(self._checked):
            self._checker, self._checked = self._initial.deep_copy(), ""
        tokens = self._tokenizer.for_llguidance.tokenize_str(answer[len(self._checked) :])
        if self._checker and self._checker.try_consume_tokens(tokens) < len(tokens):
            self._checker = None
        self._checked = answer
        return self._checker is not None and self._checker.is_accepting()

    def push(self, token: int) -> None:
        state = self._state
        child = state.children.get(token)
        if child is None:
            child = state.children[token] = _State(state, token, self._start.after(state.phase, token))
        self._state = child

    def pop(self, count: int) -> None:
        for _ in range(count):
            assert self._state.parent is not None
            self._state = self._state.parent

    def apply(self, candidates: Candidates) -> Candidates:
        mask = self._mask()
        if mask is None:
            return candidates
        tokens, logits = candidates
        keep = np.flatnonzero(mask if len(tokens) == len(mask) else mask[tokens])
        return tokens[keep], logits[keep]

    def forced_tokens(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that must come next, including an end token if the reply must end."""
        if not (isinstance(self._state.phase, Answer) and self._follow()):
            return []
        forced = self._matcher.compute_ff_tokens()[:limit]
        for token in forced:
            self.push(token)
        while len(forced) < limit and (only := self._only_token()) is not None:
            forced.append(only)
            self.push(only)
        self.pop(len(forced))
        return forced

    def _only_token(self) -> int | None:
        mask = self._mask()
        if mask is None:
            return None
        allowed = np.flatnonzero(mask)
        if len(allowed) == 1:
            return int(allowed[0])
        return self._tokenizer.usual_end_token if self._tokenizer.end_mask[allowed].all() else None

    def _mask(self) -> NDArray[np.bool_] | None:
        """Return the mask of the tokens allowed in the current state, or None if all are allowed."""
        state = self._state
        if state.mask is None:
            state.mask = self._new_mask()
            if state.mask is not None:
                self._masked.append(state)
            if len(self._masked) > _MAX_MASKS:
                # Also evict this state's descendants, most of which belong to rejected drafts.
                oldest = self._masked.popleft()
                oldest.mask = None
                oldest.children = {}
        return state.mask

    def _new_mask(self) -> NDArray[np.bool_] | None:
        phase = self._state.phase
        if isinstance(phase, Unconstrained):
            return None
        others = self._start.allowed(phase)
        if not isinstance(phase, Answer | Gap) and phase != Opening():
            return others
        if not self._follow():
            return None
        mask = self._tokenizer.unpacked(self._matcher.compute_bitmask()) | others
        self._check()
        return mask

    def _follow(self) -> bool:
        """Move the matcher to the current state. Return False if that state is unconstrained."""
        state, matched = self._state, self._matched
        ahead: list[_State] = []
        rollback = 0
        while state is not matched:
            if state.depth >= matched.depth:
                ahead.append(state)
                assert state.parent is not None
                state = state.parent
            else:
                rollback += matched.in_answer
                assert matched.parent is not None
                matched = matched.parent
        if rollback:
            self._matcher.rollback(rollback)
        self._matched = matched
        for state in reversed(ahead):
            if isinstance(state.phase, Unconstrained) or not self._consume(state):
                state.phase = self._state.phase = Unconstrained()
                return False
            self._matched = state
        return True

    def _consume(self, state: _State) -> bool:
        consumed = not state.in_answer or self._matcher.try_consume_tokens([state.token]) == 1
        self._check()
        return consumed

    def _check(self) -> None:
        """Raise OptionError if the matcher has hit one of its limits and can no longer be used."""
        if self._matcher.is_error():
            message = readable(self._matcher.get_error())
            raise OptionError(
                f"the constraint became too complex while the reply was being generated ({message})",
                "use a simpler schema, regular expression or grammar",
                code="constraint_not_supported",
            )
