"""Read models' tokens from their files, compare vocabularies, and find the longest token."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ModelFileError
from edgespec.model.base import MAX_VOCAB_PADDING
from edgespec.model.formats.gguf_header import GgufHeader, StringArray
from edgespec.model.formats.mlx_files import MAX_JSON_BYTES
from edgespec.system.files import read_regular_file

# Kinds of tokenizers that store bytes as other characters.
_BYTE_LEVEL, _SENTENCEPIECE = "byte-level", "sentencepiece"
_KINDS = {"gpt2": _BYTE_LEVEL, "llama": _SENTENCEPIECE, "t5": _SENTENCEPIECE}
# Names of the padding tokens that model converters append to a vocabulary.
_PADDING = re.compile(rb"\[PAD\d+\]")
_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_MAX_TOKENS = 1 << 22
# Exceptions that parsing an invalid tokenizer.json can raise.
_PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
# Vocabulary entries for all bytes that UTF-8 uses, in GPT-2's format.
_BYTE_LEVEL_ENTRIES = frozenset(map(chr, [*range(33, 127), *range(161, 173), *range(174, 324)])) - frozenset(
    map(chr, [0xC0, 0xC1, *range(0xF5, 0x100)])
)
_BYTE_FALLBACK_ENTRIES = frozenset(
    f"<0x{byte:02X}>" for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5
)


@dataclass(frozen=True, slots=True)
class TokenList:
    """The tokens of a vocabulary.

    Attributes:
        kind: Kind of tokenizer, which determines how bytes are encoded in tokens.
        tokens: The text of each token as stored in the file, indexed by token id.
    """

    kind: str
    tokens: Sequence[bytes]

    def digest(self) -> str:
        """Return a hash of the tokens, excluding the padding at the end."""
        tokens, count = self.tokens, len(self.tokens)
        while count and _PADDING.fullmatch(tokens[count - 1]):
            count -= 1
        digest = hashlib.sha256(f"{self.kind} {count}\n".encode())
        digest.update(np.fromiter(map(len, tokens[:count]), "<u4", count).tobytes())
        digest.update(b"".join(tokens[:count]))
        return digest.hexdigest()

    def same_ids(self, other: TokenList) -> bool:
        """Return whether two models use the same token IDs, ignoring padding tokens at the end."""
        count = min(len(self.tokens), len(other.tokens))
        alike = self.kind == other.kind and self.tokens[:count] == other.tokens[:count]
        return alike and abs(len(self.tokens) - len(other.tokens)) <= MAX_VOCAB_PADDING

    def shared_token_fraction(self, draft: TokenList) -> float:
        """Return the fraction of this list's tokens that `draft` also has, possibly under other ids."""
        own, others = set(self._bytes()), set(draft._bytes())
        return len(own & others) / max(1, len(own))

    def _bytes(self) -> Iterable[bytes]:
        """Yield the bytes that each token adds to text, skipping padding tokens."""
        stored = (token for token in self.tokens if not _PADDING.fullmatch(token))
        if self.kind == _BYTE_LEVEL:
            return map(_from_byte_level, stored)
        return map(_from_sentencepiece, stored) if self.kind == _SENTENCEPIECE else stored


def _byte_level_table() -> dict[int, int]:
    """Map each character code in GPT-2's byte-level encoding to the byte that it represents."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_TABLE = _byte_level_table()


def _from_byte_level(token: bytes) -> bytes:
    try:
        return bytes([_TABLE[ord(character)] for character in token.decode()])
    except (KeyError, UnicodeDecodeError):
        return token  # Control tokens are stored as plain text, so do not decode them.


def _from_sentencepiece(token: bytes) -> bytes:
    if match := _BYTE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁".encode(), b" ")


def tokens_of_header(header: GgufHeader) -> TokenList | None:
    """Return the tokens of a GGUF model, or None if the file contains none."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not tokens:
        return None
    kind = str(header.metadata.get("tokenizer.ggml.model", ""))
    return TokenList(_KINDS.get(kind, kind), list(tokens))


def tokens_of_folder(folder: Path) -> TokenList | None:
    """Return the tokens of an MLX model, or None if it has no tokenizer.json.

    Raises:
        ModelFileError: The file is unreadable or invalid.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = json.loads(read_regular_file(path, MAX_JSON_BYTES))
        ids = dict(_ids(tokenizer))
        count = max(ids, default=-1) + 1
        if not 0 < count <= _MAX_TOKENS or min(ids) < 0:
            raise ValueError(f"the highest token id must be from 0 to {_MAX_TOKENS - 1}, but is {count - 1}")
    except FileNotFoundError:
        return None
    except (OSError, *_PARSE_ERRORS) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise ModelFileError(
            f"the tokenizer file {path} is damaged or unreadable ({why})", "download the model again"
        ) from error
    tokens = [ids[i].encode("utf-8", "surrogatepass") if i in ids else b"[PAD%d]" % i for i in range(count)]
    return TokenList(_kind_of(tokenizer), tokens)


def _ids(tokenizer: Mapping[str, Any]) -> Iterable[tuple[int, str]]:
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, Mapping):
        yield from ((int(token), text) for text, token in vocabulary.items())
    else:
        yield from ((i, str(piece[0])) for i, piece in enumerate(vocabulary))
    yield from ((int(added["id"]), str(added["content"])) for added in tokenizer.get("added_tokens") or ())


def _kind_of(tokenizer: Mapping[str, Any]) -> str:
    if "ByteLevel" in json.dumps(tokenizer.get("decoder")):
        return _BYTE_LEVEL
    model = tokenizer["model"]
    if model.get("byte_fallback") or model.get("type") == "Unigram":
        return _SENTENCEPIECE
    return str(model.get("type", ""))


def longest_piece_bytes(entries: Mapping[str, int], raw_piece: Callable[[int], bytes]) -> int:
    """Return the length of the longest token in bytes, or 0 if tokens can represent text of any length.

    Args:
        entries: The token id of each vocabulary entry. No token may be longer than its entry.
        raw_piece: Returns the bytes of a token.
    """
    if not (entries.keys() >= _BYTE_LEVEL_ENTRIES or entries.keys() >= _BYTE_FALLBACK_ENTRIES):
        return 0
    longest = 0
    for entry in sorted(entries, key=lambda entry: len(entry.encode()), reverse=True):
        if len(entry.encode()) <= longest:
            break
        longest = max(longest, len(raw_piece(entries[entry])))
    return longest
