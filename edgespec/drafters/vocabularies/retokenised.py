"""A draft model of another vocabulary, heard through its text (arXiv 2502.05202, section 4).

The text so far is read to the draft in its own tokens; what it goes on with is put into the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.backends.base import LanguageModel, Vocabulary
from edgespec.drafters.base import BudgetedDrafter, MemoryUse, check_rollback
from edgespec.drafters.draft_cache import is_confident
from edgespec.drafters.vocabularies.incremental import IncrementalRetokeniser
from edgespec.drafters.vocabularies.translation import TokenTranslation
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.prefix import common_prefix_length
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["RetokenisedDrafter"]

# So many of the last tokens are tokenized again together with what follows them.
_CONTEXT_TOKENS = 8
# So few of the draft's tokens are run as a part of the next guess.
_WITH_A_GUESS = 16


class RetokenisedDrafter(BudgetedDrafter):
    """Drafts chains for certain: the draft's best text, in the target's tokens.

    Of each proposal the draft runs as many of its own tokens as were asked for. The cache of the draft
    model holds the beginning of `_run`, its tokens of an earlier moment, of which the first `_read` were the
    reading's. The reading begins with the text, or with its end where that is all there is time to read.
    min_confidence: stop after a token of the draft of less probability.
    """

    name = "model"

    def __init__(
        self,
        model: LanguageModel,
        vocabulary: Vocabulary,
        translation: TokenTranslation,
        *,
        min_confidence: float = 0.0,
    ) -> None:
        check_rollback(model)
        self._model = model
        self._vocabulary = vocabulary
        self._translation = translation
        self._min_confidence = min_confidence
        self._tokens: list[int] = []
        self._begin_reading()
        self._run: list[int] = []
        self._read = 0
        # Of the reading's tokens so many are not run, the last one not counted.
        self._behind = 0

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse.of(self._model.facts)

    def begin(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        if not self._whole or self._tokens != list(tokens[:known]):
            self._begin_reading()
            known = 0
        self._reading.add(tokens[known:])
        self._tokens = list(tokens)
        self._behind = len(self._lag())

    def _begin_reading(self) -> None:
        self._reading, self._whole = IncrementalRetokeniser(self._vocabulary, self._translation), True

    @property
    def pending_tokens(self) -> int:
        return self._behind if self._behind > _WITH_A_GUESS else 0

    @property
    def full_pending_tokens(self) -> int:
        return self.pending_tokens if self._whole else len(self._tokens)

    def prefill(self, max_tokens: int) -> None:
        if not self._whole and max_tokens >= self.full_pending_tokens:
            self._begin_reading()
            self._reading.add(self._tokens)
        elif self.pending_tokens > max_tokens:
            share = max_tokens / len(self._reading.tokens)
            self._begin_reading()
            self._reading.add(self._tokens[-max(1, int(share * len(self._tokens))) :])
            self._whole = False
        self._catch_up()

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._reading.add(tokens)
        self._tokens += tokens
        self._behind = len(self._lag())

    def _lag(self) -> list[int]:
        """What the draft has to run of its reading but the last token; what it holds of that is kept."""
        wanted = self._reading.tokens
        if not wanted:
            return []
        # Only what was said or read since is compared: a text may be long.
        self._read = min(self._read, self._reading.take_unchanged())
        same = min(self._read, self._model.length)
        same += common_prefix_length(self._run[same : self._model.length], wanted[same:])
        self._model.truncate(min(same, len(wanted) - 1))
        self._read = held = self._model.length
        del self._run[held:]
        return wanted[held:-1]

    def _catch_up(self) -> bool:
        """Bring the draft's cache to its reading of the text but the last token; False when it cannot."""
        lag = self._lag()
        if not self._reading.tokens or len(lag) >= self._model.free_tokens:
            return False
        if lag:
            self._model.prefill(lag)
            self._run += lag
            self._read = len(self._run)
        self._behind = 0
        return True

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        last = self._tokens[-1]
        if not self._catch_up():
            return TokenTree.chain(last)
        said, ends = self._say(draft_length)
        return TokenTree.chain(last, self._heard(said, ends)[:draft_length])

    def _say(self, count: int) -> tuple[bytes, bool]:
        """What the draft goes on with for up to `count` of its tokens, and whether it ended its reply."""
        said, ended = b"", False
        chain = [self._reading.tokens[-1]]
        most = min(count, self._model.free_tokens, self._model.facts.capabilities.max_width)
        for done in range(most):
            self._model.run_ahead(done + 1 < most)
            logits = self._model.verify(TokenTree.chain(chain[0], chain[1:]), done)
            token = logits.best(0, 1)[0][0]
            piece = self._model.vocabulary.piece(token)
            ended = self._model.vocabulary.is_end(token)
            if ended or not piece:
                break
            said += piece
            chain.append(token)
            if not is_confident(logits, 0, token, self._min_confidence):
                break
        if most:
            self._model.commit(tuple(range(1, done + 1)))
            self._run += chain[: done + 1]
        return said, ended

    def _heard(self, said: bytes, ended: bool) -> list[int]:
        """What the draft said, in tokens of the target that go on from its last ones."""
        begun = self._reading.unread
        if not said.startswith(begun):
            return []  # not how the character goes on that the target is in the middle of
        said = _whole(said[len(begun) :], begun)
        tokens = self._in_context(said) if said else []
        if ended and self._translation.target_end is not None:
            tokens.append(self._translation.target_end)
        return tokens

    def _in_context(self, said: bytes) -> list[int]:
        """Tokenized together with the last tokens, where those come out as they were."""
        spell = self._translation.target_text.spell
        before: list[int] = []
        for token in reversed(self._tokens[-_CONTEXT_TOKENS:]):
            if not self._vocabulary.piece(token):
                break
            before.insert(0, token)
        whole = spell(b"".join(map(self._vocabulary.raw_piece, before)) + said)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return spell(said)

    def reset(self) -> None:
        self._model.truncate(0)
        self._tokens, self._run, self._read = [], [], 0
        self._begin_reading()

    def interrupt(self, enabled: bool) -> None:
        self._model.interrupt(enabled)

    def close(self) -> None:
        self._model.close()


def _whole(said: bytes, begun: bytes) -> bytes:
    """`said` up to the last character that is there as a whole; `begun` is the start of its first one."""
    for cut in range(4):
        kept = said[: len(said) - cut]
        try:
            (begun + kept).decode()
        except UnicodeDecodeError:
            continue
        return kept
    return said
