"""The logits processor that makes a reply satisfy a constraint."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.constraints.answer_start import Answer, AnswerPhase, AnswerStart, Gap, Opening, Unconstrained
from edgespec.constraints.matcher import readable
from edgespec.constraints.tokenizer import ConstraintTokenizer
from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.errors import OptionError

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["ConstraintProcessor"]

# Maximum number of cached masks. Masks are cached because each round visits the states of a draft tree
# several times.
_MAX_MASKS = 128


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
