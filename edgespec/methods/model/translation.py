"""Compare the vocabularies of a target and a draft model, and translate tokens between them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from edgespec.errors import VocabularyMismatchError
from edgespec.methods.constants import MIN_GOOD_FRACTION, MIN_TRANSLATED_FRACTION
from edgespec.model.base import MAX_VOCAB_PADDING, Vocabulary

__all__ = ["TokenTranslation", "VocabularyComparison", "compare_vocabularies"]

# Maximum number of draft model tokens used to spell a target token that the draft model lacks. If more are
# needed, only the last ones are used.
MAX_SPELLING_TOKENS = 16
MappingKind = Literal["same", "translated", "retokenised"]


class _TokenTable:
    """Maps text tokens and control tokens to their ids in one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.text: dict[bytes, int] = {}
        self.control: dict[bytes, int] = {}
        self.duplicates: dict[bytes, list[int]] = {}
        self.ends: list[int] = []
        for token in range(vocabulary.size):
            raw = vocabulary.raw_piece(token)
            if raw:
                is_text = bool(vocabulary.piece(token))
                first = (self.text if is_text else self.control).setdefault(raw, token)
                if is_text and first != token:
                    self.duplicates.setdefault(raw, [first]).append(token)
            if vocabulary.is_end(token):
                self.ends.append(token)

    @property
    def count(self) -> int:
        return len(self.text) + len(self.control)


class ByteTokenizer:
    """Tokenizes bytes in the middle of a string, without adding start tokens or a leading space."""

    def __init__(self, vocabulary: Vocabulary, ids: Mapping[bytes, int]) -> None:
        self._vocabulary = vocabulary
        self._ids = ids
        self._max_token_bytes = max(map(len, ids), default=0)

    def tokenize(self, data: bytes) -> list[int]:
        """Return the tokens for `data`, skipping bytes that no token can represent."""
        if not data:
            return []
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self._longest_match(data)
        # Also try tokenizing the text after another character, because some tokenizers add a leading space.
        for prefix in ("", "\n", "a"):
            tokens = self._vocabulary.tokenize(prefix + text, special=False, start=False)
            suffix = self._suffix_with_bytes(tokens, data)
            if suffix is not None:
                return suffix
        return self._longest_match(data)

    def _suffix_with_bytes(self, tokens: list[int], data: bytes) -> list[int] | None:
        remaining = data
        for i in reversed(range(len(tokens))):
            raw = self._vocabulary.raw_piece(tokens[i])
            if not remaining.endswith(raw):
                return None
            remaining = remaining.removesuffix(raw)
            if not remaining:
                return tokens[i:]
        return None

    def _longest_match(self, data: bytes) -> list[int]:
        tokens: list[int] = []
        position = 0
        while position < len(data):
            sizes = range(min(self._max_token_bytes, len(data) - position), 0, -1)
            size = next((size for size in sizes if data[position : position + size] in self._ids), 0)
            if size:
                tokens.append(self._ids[data[position : position + size]])
            position += size or 1
        return tokens


class TokenTranslation:
    """Translates tokens between the vocabularies of a target and a draft model.

    Text tokens match if they have the same bytes, and control tokens if they have the same text. The tokens
    that end a reply also match.

    Attributes:
        target_ids: Target ids of the shared tokens, int64 [n], ascending.
        draft_ids: Draft ids of the same tokens, int64 [n].
        draft_id_of: Draft id of each target id, int64. -1 for tokens that are not shared.
        target_id_of: Target id of each draft id, int64. -1 for tokens that are not shared.
        target_token_count: Number of distinct tokens in the target's vocabulary.
        target_end_token: The token that ends a reply in the target's vocabulary.
        target_tokenizer: Tokenizes bytes for the target.
        draft_tokenizer: Tokenizes bytes for the draft model.
        draft_start_tokens: Tokens that the draft model expects at the beginning of a sequence. May be empty.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self._target = target
        self._draft = draft
        target_table, draft_table = _TokenTable(target), _TokenTable(draft)
        self.target_token_count = target_table.count
        self.target_tokenizer = ByteTokenizer(target, target_table.text)
        self.draft_tokenizer = ByteTokenizer(draft, draft_table.text)
        control = target_table.control.items()
        pairs = {token: draft_table.control[raw] for raw, token in control if raw in draft_table.control}
        pairs |= self._text_pairs(target_table, draft_table)
        # Draft model tokens that replace control tokens found only in the target, such as start tokens.
        self._substitutes: dict[int, int] = {}
        self._match_ends(pairs, target_table, draft_table)
        self.draft_start_tokens = tuple(draft.tokenize("", special=True, start=True))
        target_start = target_table.control.get(target.bos_text.encode())
        draft_start = draft_table.control.get(draft.bos_text.encode())
        if target_start is not None and draft_start is not None:
            self._substitutes.setdefault(target_start, draft_start)
        self.target_ids = np.array(sorted(pairs), np.int64)
        self.draft_ids = np.array([pairs[token] for token in sorted(pairs)], np.int64)
        self.draft_id_of = np.full(target.size, -1, np.int64)
        self.draft_id_of[self.target_ids] = self.draft_ids
        self.target_id_of = np.full(draft.size, -1, np.int64)
        self.target_id_of[self.draft_ids] = self.target_ids
        self._cached_translate = cache(self._translate)

    def _text_pairs(self, target_table: _TokenTable, draft_table: _TokenTable) -> dict[int, int]:
        return {
            _produced_id(self._target, raw, target_table): _produced_id(self._draft, raw, draft_table)
            for raw in target_table.text
            if raw in draft_table.text
        }

    def _match_ends(self, pairs: dict[int, int], target_table: _TokenTable, draft_table: _TokenTable) -> None:
        self.target_end_token = _reply_end(self._target, target_table.ends)
        draft_end = _reply_end(self._draft, draft_table.ends)
        if draft_end is None or self.target_end_token is None:
            return
        if self.target_end_token not in pairs and draft_end not in pairs.values():
            pairs[self.target_end_token] = draft_end
        self._substitutes |= {token: draft_end for token in target_table.ends if token not in pairs}

    def translate(self, token: int, first: bool) -> tuple[int, ...]:
        """Return one or more draft model tokens that represent a target token.

        Args:
            token: The target token to translate.
            first: Whether the token is the first in the sequence. If so, the draft model's start tokens are
                prepended.
        """
        translated = self._cached_translate(token)
        start = self.draft_start_tokens
        return (*start, *translated) if first and start and translated[:1] != start[:1] else translated

    def draft_token_bytes(self, token: int) -> bytes:
        """Return the bytes of a draft model token."""
        return self._draft.raw_piece(token)

    def _translate(self, token: int) -> tuple[int, ...]:
        if not 0 <= token < len(self.draft_id_of):
            return (0,)
        if self.draft_id_of[token] >= 0:
            return (int(self.draft_id_of[token]),)
        if token in self._substitutes:
            return (self._substitutes[token],)
        spelling = self.draft_tokenizer.tokenize(self._target.raw_piece(token))
        return tuple(spelling[-MAX_SPELLING_TOKENS:]) or (0,)


def _produced_id(vocabulary: Vocabulary, raw: bytes, table: _TokenTable) -> int:
    ids = table.duplicates.get(raw, ())
    with suppress(UnicodeDecodeError):
        for prefix in ("", "a", "\n") if ids else ():
            tokens = vocabulary.tokenize(prefix + raw.decode(), special=False, start=False)
            if tokens and tokens[-1] in ids:
                return tokens[-1]
    return table.text[raw]


def _reply_end(vocabulary: Vocabulary, ends: list[int]) -> int | None:
    """Return the token that ends a chat reply: the end token that occurs last in the chat template."""
    if not ends:
        return None
    template, eos = vocabulary.chat_template or "", vocabulary.eos_text

    def rank(token: int) -> tuple[int, bool]:
        text = vocabulary.raw_piece(token).decode("utf-8", "replace")
        return template.rfind(text), text == eos

    return max(ends, key=rank)


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """The result of comparing a draft model's vocabulary with the target's.

    Attributes:
        target_name: Name of the target.
        draft_name: Name of the draft model.
        shared_fraction: Fraction of the target's tokens that the draft model also has, under any id.
        translation: Translates token ids between the vocabularies. None if all token ids match.
    """

    target_name: str
    draft_name: str
    shared_fraction: float
    translation: TokenTranslation | None

    @property
    def mapping(self) -> MappingKind:
        """How to use the draft model's tokens: with the same ids, with translated ids, or by retokenizing."""
        if self.translation is None:
            return "same"
        return "translated" if self.shared_fraction >= MIN_TRANSLATED_FRACTION else "retokenised"

    @property
    def explanation(self) -> str:
        """User-facing explanation of how the vocabularies affect drafting. Empty if all token ids match."""
        if self.translation is None:
            return ""
        shared, total = len(self.translation.target_ids), self.translation.target_token_count
        share = f"{shared:,} of the {total:,} tokens in {self.target_name}'s vocabulary"
        than = "of its tokens will be accepted than with a draft model from the same family"
        if self.mapping == "retokenised":
            return f"{self.draft_name} has only {share}. Its text must be tokenized again, and fewer {than}"
        warning = f". Fewer {than}" if self.shared_fraction < MIN_GOOD_FRACTION else ""
        return f"{self.draft_name} has {share}, under different IDs, and can draft only those{warning}"


def compare_vocabularies(
    target: Vocabulary, draft: Vocabulary, target_name: str, draft_name: str
) -> VocabularyComparison:
    """Compare the vocabularies of a target and a draft model.

    Vocabulary sizes may differ by a few padding tokens. Ids that exist in only one vocabulary are never
    drafted.

    Raises:
        VocabularyMismatchError: The vocabularies have no tokens in common.
    """
    difference = _first_difference(target, draft, target_name, draft_name)
    if not difference:
        return VocabularyComparison(target_name, draft_name, 1.0, None)
    translation = TokenTranslation(target, draft)
    if not len(translation.target_ids):
        raise VocabularyMismatchError(
            f"{draft_name} cannot be the draft model of {target_name}: they have no tokens in common"
            f" ({difference})",
            "choose a draft model from the same family, or use --draft none",
        )
    fraction = len(translation.target_ids) / translation.target_token_count
    return VocabularyComparison(target_name, draft_name, fraction, translation)


def _first_difference(target: Vocabulary, draft: Vocabulary, target_name: str, draft_name: str) -> str:
    common = 0 if target.same_entries(draft) else min(target.size, draft.size)
    for token in range(common):
        target_piece, draft_piece = target.raw_piece(token), draft.raw_piece(token)
        if target_piece != draft_piece:
            return (
                f"token {token} is {target_piece.decode('utf-8', 'replace')!r} in {target_name}"
                f" and {draft_piece.decode('utf-8', 'replace')!r} in {draft_name}"
            )
    if abs(target.size - draft.size) > MAX_VOCAB_PADDING:
        return f"{target_name} has {target.size} tokens and {draft_name} has {draft.size}"
    return ""
