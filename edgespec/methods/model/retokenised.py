"""Draft with a model that has a different vocabulary, by retokenizing its output for the target."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree, common_prefix_length
from edgespec.methods.base import Drafter, DrafterMemory, check_rollback
from edgespec.methods.draft_cache import is_confident
from edgespec.methods.model.translation import TokenTranslation
from edgespec.model.base import LanguageModel, Vocabulary

__all__ = ["IncrementalRetokeniser", "RetokenisedDrafter"]

# Number of preceding tokens to retokenize together with the drafted text, because tokens can merge across the
# boundary.
_CONTEXT_TOKENS = 8
# If at most this many tokens are missing from the draft model's KV cache, process them as part of drafting.
# Otherwise, prefill them separately.
_MAX_TOKENS_WITH_PROPOSAL = 16
# When text is appended, the last 64 to about 256 bytes before it are retokenized, because their tokens can
# change.
_MIN_OPEN_BYTES, _MAX_OPEN_BYTES = 64, 256


class RetokenisedDrafter(Drafter):
    """Drafts chains of target tokens by retokenizing the text that a draft model generates.

    Implements drafting with disjoint vocabularies (Timor et al. 2025, arXiv 2502.05202, section 4). The
    sequence is tokenized for the draft model, which continues it greedily. The generated text is then
    tokenized for the target. Drafts have no draft probabilities.

    If there is no time to prefill the whole sequence, the draft model sees only its end.

    Args:
        model: The draft model.
        vocabulary: The target's vocabulary.
        translation: Translates tokens between the two vocabularies.
        min_confidence: Drafting stops once the draft model chooses a token with a lower probability.

    Raises:
        CapabilityError: The model does not support rollback.
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
        self._new_input()
        self._cached: list[int] = []
        # Number of tokens that are missing from the draft model's KV cache.
        self._lag = 0

    def _new_input(self) -> None:
        # The emitted tokens, converted to tokens of the draft model.
        self._input = IncrementalRetokeniser(self._vocabulary, self._translation)
        self._is_complete = True
        # Number of tokens in the draft model's KV cache that are known to match the sequence.
        self._matching = 0

    @property
    def memory_use(self) -> DrafterMemory:
        return DrafterMemory.of(self._model.facts)

    def begin(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        if not self._is_complete or self._tokens != list(tokens[:known]):
            self._new_input()
            known = 0
        self._input.add(tokens[known:])
        self._tokens = list(tokens)
        self._lag = len(self._missing_tokens())

    @property
    def pending_tokens(self) -> int:
        return self._lag if self._lag > _MAX_TOKENS_WITH_PROPOSAL else 0

    @property
    def full_pending_tokens(self) -> int:
        return self.pending_tokens if self._is_complete else len(self._tokens)

    def prefill(self, max_tokens: int) -> None:
        if not self._is_complete and max_tokens >= self.full_pending_tokens:
            self._new_input()
            self._input.add(self._tokens)
        elif self.pending_tokens > max_tokens:
            share = max_tokens / len(self._input.tokens)
            self._new_input()
            self._input.add(self._tokens[-max(1, int(share * len(self._tokens))) :])
            self._is_complete = False
        self._catch_up()

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._input.add(tokens)
        self._tokens += tokens
        self._lag = len(self._missing_tokens())

    def _missing_tokens(self) -> list[int]:
        """Drop cached tokens that no longer match the sequence, and return the tokens to prefill."""
        tokens = self._input.tokens
        if not tokens:
            return []
        same = min(self._matching, self._model.length)
        same += common_prefix_length(self._cached[same : self._model.length], tokens[same:])
        self._model.truncate(min(same, len(tokens) - 1))
        del self._cached[self._model.length :]
        self._matching = min(len(self._cached), self._input.final_tokens)
        return tokens[len(self._cached) : -1]

    def _catch_up(self) -> bool:
        """Prefill the missing tokens. Return False if the draft model's context is too small."""
        missing = self._missing_tokens()
        if not self._input.tokens or len(missing) >= self._model.free_tokens:
            return False
        if missing:
            self._model.prefill(missing)
            self._cached += missing
            self._matching = min(len(self._cached), self._input.final_tokens)
        self._lag = 0
        return True

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        last = self._tokens[-1]
        if not self._catch_up():
            return TokenTree.chain(last)
        text, ended = self._generate(draft_length)
        return TokenTree.chain(last, self._target_tokens(text, ended)[:draft_length])

    def _generate(self, max_tokens: int) -> tuple[bytes, bool]:
        """Generate up to `max_tokens` draft model tokens. Return their text and whether it ends the reply."""
        text, ended = b"", False
        chain = [self._input.tokens[-1]]
        count = min(max_tokens, self._model.free_tokens, self._model.facts.capabilities.max_width)
        for done in range(count):
            self._model.run_ahead(done + 1 < count)
            logits = self._model.verify(TokenTree.chain(chain[0], chain[1:]), done)
            token = logits.best(0, 1)[0][0]
            piece = self._model.vocabulary.piece(token)
            ended = self._model.vocabulary.is_end(token)
            if ended or not piece:
                break
            text += piece
            chain.append(token)
            if not is_confident(logits, 0, token, self._min_confidence):
                break
        if count:
            self._model.commit(tuple(range(1, done + 1)))
            self._cached += chain[: done + 1]
        return text, ended

    def _target_tokens(self, text: bytes, ended: bool) -> list[int]:
        incomplete = self._input.incomplete_bytes
        if not text.startswith(incomplete):
            return []  # The drafted text does not complete the target's last character.
        text = text[len(incomplete) : len(text) - _incomplete_byte_count(text)]
        tokens = self._tokenize_in_context(text) if text else []
        if ended and self._translation.target_end_token is not None:
            tokens.append(self._translation.target_end_token)
        return tokens

    def _tokenize_in_context(self, text: bytes) -> list[int]:
        tokenize = self._translation.target_tokenizer.tokenize
        context: list[int] = []
        for token in reversed(self._tokens[-_CONTEXT_TOKENS:]):
            if not self._vocabulary.piece(token):
                break
            context.insert(0, token)
        tokens = tokenize(b"".join(map(self._vocabulary.raw_piece, context)) + text)
        if tokens[: len(context)] == context:
            return tokens[len(context) :]
        return tokenize(text)

    def reset(self) -> None:
        self._model.truncate(0)
        self._tokens, self._cached = [], []
        self._new_input()

    def interrupt(self, enabled: bool) -> None:
        self._model.interrupt(enabled)

    def close(self) -> None:
        self._model.close()


class IncrementalRetokeniser:
    """Incrementally converts a growing sequence of target tokens to draft model tokens.

    Control tokens split the text into parts that are tokenized separately. The last few tokens are open,
    because they can change when text is appended. All earlier tokens are final.

    Attributes:
        tokens: All draft model tokens.
        final_tokens: Number of leading tokens that will never change.
        incomplete_bytes: Bytes of an incomplete character at the end, which are not tokenized yet.
    """

    def __init__(self, vocabulary: Vocabulary, translation: TokenTranslation) -> None:
        self._vocabulary = vocabulary
        self._translation = translation
        self.tokens: list[int] = list(translation.draft_start_tokens)
        self.incomplete_bytes = b""
        self.final_tokens = len(self.tokens)
        self._open_text = b""

    def add(self, tokens: Sequence[int]) -> None:
        """Append target tokens to the sequence and convert them to draft model tokens."""
        for token in tokens:
            piece = self._vocabulary.piece(token)
            if piece:
                self._open_text += piece
                continue
            self.tokens[self.final_tokens :] = self._translation.draft_tokenizer.tokenize(self._open_text)
            self._open_text = b""
            translated = self._translation.translate(token, first=False)
            only_start = self.tokens == list(self._translation.draft_start_tokens)
            if not only_start or list(translated) != self.tokens:
                self.tokens += translated
            self.final_tokens = len(self.tokens)
        self._tokenize()

    def _tokenize(self) -> None:
        incomplete = _incomplete_byte_count(self._open_text)
        complete = len(self._open_text) - incomplete
        text, self.incomplete_bytes = self._open_text[:complete], self._open_text[complete:]
        tokens = self._translation.draft_tokenizer.tokenize(text)
        self.tokens[self.final_tokens :] = tokens
        if len(text) > _MAX_OPEN_BYTES:
            self._finalize(tokens)

    def _finalize(self, open_tokens: list[int]) -> None:
        """Mark tokens as final if appending text is unlikely to change them."""
        position, boundaries = 0, [(0, 0)]
        for count, token in enumerate(open_tokens):
            raw = self._translation.draft_token_bytes(token)
            if raw[:1].isspace() or position + _MAX_OPEN_BYTES < len(self._open_text):
                boundaries.append((count, position))
            position += len(raw)
        last_position = len(self._open_text) - _MIN_OPEN_BYTES
        count, position = max((one for one in boundaries if one[1] <= last_position), default=(0, 0))
        self.final_tokens += count
        self._open_text = self._open_text[position:]


def _incomplete_byte_count(text: bytes) -> int:
    """Return the number of trailing bytes that belong to an incomplete UTF-8 character."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < size else 0
        if byte < 0x80:
            return 0
    return 0
