"""From the tokens of one vocabulary to those of another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgespec.backends.base import Vocabulary

__all__ = ["ByteTokenizer", "TokenTranslation"]

# A token the draft lacks is read to it as no more than its last so many tokens.
MAX_SPELLING_TOKENS = 16


class _TokenTable:
    """What every token of a vocabulary is: the first id by bytes, text and control tokens apart; the ends.

    alike: all ids of a text that several tokens have.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.text: dict[bytes, int] = {}
        self.control: dict[bytes, int] = {}
        self.alike: dict[bytes, list[int]] = {}
        self.ends: list[int] = []
        for token in range(vocabulary.size):
            raw = vocabulary.raw_piece(token)
            if raw:
                is_text = bool(vocabulary.piece(token))
                first = (self.text if is_text else self.control).setdefault(raw, token)
                if is_text and first != token:
                    self.alike.setdefault(raw, [first]).append(token)
            if vocabulary.is_end(token):
                self.ends.append(token)

    @property
    def count(self) -> int:
        """Different tokens that are not padding."""
        return len(self.text) + len(self.control)

    def named(self, text: str) -> int | None:
        """The control token of that text."""
        return self.control.get(text.encode())


class ByteTokenizer:
    """Writes bytes in the tokens of a vocabulary, as they would be in the middle of a text."""

    def __init__(self, vocabulary: Vocabulary, ids: Mapping[bytes, int]) -> None:
        self._vocabulary = vocabulary
        self._ids = ids
        self._longest = max(map(len, ids), default=0)

    def spell(self, data: bytes) -> list[int]:
        """Tokens whose bytes are `data`; bytes that no token has are left out."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self._longest_first(data)
        # At the very beginning of a text some tokenizers put a space: then not there.
        for before in ("", "\n", "a"):
            tokens = self._vocabulary.tokenize(before + text, special=False, start=False)
            found = self._ending(tokens, data)
            if found is not None:
                return found
        return self._longest_first(data)

    def _ending(self, tokens: list[int], data: bytes) -> list[int] | None:
        """The last tokens, if their bytes are `data`."""
        left = data
        for i in range(len(tokens), -1, -1):
            if not left:
                return tokens[i:]
            if not i:
                break
            raw = self._vocabulary.raw_piece(tokens[i - 1])
            if not left.endswith(raw):
                break
            left = left[: len(left) - len(raw)]
        return None

    def _longest_first(self, data: bytes) -> list[int]:
        tokens = []
        at = 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + size])
                if token is not None:
                    tokens.append(token)
                    break
            else:
                size = 1
            at += size
        return tokens


class TokenTranslation:
    """The tokens that two vocabularies share, by their bytes, and how the others are read to the draft.

    Text is matched with text, control tokens with control tokens, and the token that ends a reply in one
    with that of the other. targets, drafts: int64 [n] ids of the shared tokens, ascending by target.
    draft_of, target_of: int64, the id in the other vocabulary by id; -1 where it is not shared.
    target_tokens: how many different tokens the target has. target_end: what ends a reply of it.
    target_text, draft_text: write bytes in tokens of either. draft_start: what the draft wants a text to
    begin with; empty where it wants nothing.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self._target = target
        self._draft = draft
        mine, its = _TokenTable(target), _TokenTable(draft)
        self.target_tokens = mine.count
        self.target_text = ByteTokenizer(target, mine.text)
        self.draft_text = ByteTokenizer(draft, its.text)
        pairs = dict(_pairs(mine.control, its.control))
        pairs |= dict(self._text_pairs(mine, its))
        self._instead: dict[int, int] = {}
        self._join_ends(pairs, mine, its)
        self.draft_start = tuple(draft.tokenize("", special=True, start=True))
        self._join_starts(mine, its)
        self.targets = np.array(sorted(pairs), np.int64)
        self.drafts = np.array([pairs[token] for token in sorted(pairs)], np.int64)
        self.draft_of = np.full(target.size, -1, np.int64)
        self.draft_of[self.targets] = self.drafts
        self.target_of = np.full(draft.size, -1, np.int64)
        self.target_of[self.drafts] = self.targets
        self._spelled: dict[int, tuple[int, ...]] = {}

    def _text_pairs(self, mine: _TokenTable, its: _TokenTable) -> list[tuple[int, int]]:
        """Where several tokens have the same bytes, the ones that the tokenizers use."""
        pairs = []
        for raw, token in mine.text.items():
            other = its.text.get(raw)
            if other is not None:
                ids, others = mine.alike.get(raw, [token]), its.alike.get(raw, [other])
                pairs.append((_used(self._target, raw, ids), _used(self._draft, raw, others)))
        return pairs

    def _join_ends(self, pairs: dict[int, int], mine: _TokenTable, its: _TokenTable) -> None:
        """What ends a reply of one ends one of the other."""
        self.target_end = _reply_end(self._target, mine.ends)
        end = _reply_end(self._draft, its.ends)
        if end is None or self.target_end is None:
            return
        if self.target_end not in pairs and end not in pairs.values():
            pairs[self.target_end] = end
        self._instead |= {token: end for token in mine.ends if token not in pairs}

    def _join_starts(self, mine: _TokenTable, its: _TokenTable) -> None:
        """A text begins with the draft's start, whatever the target begins it with."""
        start = mine.named(self._target.bos_text)
        its_start = its.named(self._draft.bos_text)
        if start is not None and its_start is not None:
            self._instead.setdefault(start, its_start)

    def spell(self, token: int, first: bool) -> tuple[int, ...]:
        """What the draft reads for a token of the target, at least one token of its own.

        first: the text begins with it.
        """
        spelled = self._spelled.get(token)
        if spelled is None:
            spelled = self._spelled[token] = self._spell(token)
        if first and self.draft_start and spelled[:1] != self.draft_start[:1]:
            return (*self.draft_start, *spelled)
        return spelled

    def draft_bytes(self, token: int) -> bytes:
        """A token of the draft as it stands in its vocabulary."""
        return self._draft.raw_piece(token)

    def _spell(self, token: int) -> tuple[int, ...]:
        if not 0 <= token < len(self.draft_of):
            return (0,)
        if self.draft_of[token] >= 0:
            return (int(self.draft_of[token]),)
        if token in self._instead:
            return (self._instead[token],)
        return tuple(self.draft_text.spell(self._target.raw_piece(token))[-MAX_SPELLING_TOKENS:]) or (0,)


def _pairs(mine: Mapping[bytes, int], its: Mapping[bytes, int]) -> list[tuple[int, int]]:
    return [(token, its[raw]) for raw, token in mine.items() if raw in its]


def _used(vocabulary: Vocabulary, raw: bytes, ids: list[int]) -> int:
    """Of tokens with the same bytes the one that the tokenizer uses, as far as it can be asked."""
    if len(ids) == 1:
        return ids[0]
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return ids[0]
    for before in ("", "a", "\n"):
        tokens = vocabulary.tokenize(before + text, special=False, start=False)
        if tokens and tokens[-1] in ids:
            return tokens[-1]
    return ids[0]


def _reply_end(vocabulary: Vocabulary, ends: list[int]) -> int | None:
    """The token a reply in a chat ends with: the last one that the template writes."""
    template = vocabulary.chat_template or ""
    places = {token: template.rfind(vocabulary.raw_piece(token).decode("utf-8", "replace")) for token in ends}
    written = [token for token in ends if places[token] >= 0]
    if written:
        return max(written, key=places.__getitem__)
    named = [token for token in ends if vocabulary.raw_piece(token) == vocabulary.eos_text.encode()]
    return next(iter([*named, *ends]), None)
