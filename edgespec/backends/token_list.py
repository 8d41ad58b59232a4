"""The tokens of a model that is not loaded: are they those of another, and if not, how many do they share?"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.base import MAX_VOCAB_PADDING
from edgespec.backends.gguf_header import GgufHeader, StringArray
from edgespec.errors import ModelFileError

__all__ = ["TokenList", "tokens_of_folder", "tokens_of_header"]

# What both forms call the kinds of tokenizers that spell bytes in their own way.
_BYTE_LEVEL, _SENTENCEPIECE = "byte-level", "sentencepiece"
_KINDS = {"gpt2": _BYTE_LEVEL, "llama": _SENTENCEPIECE, "t5": _SENTENCEPIECE}
# What converters fill the end of an embedding table with.
_PADDING = re.compile(rb"\[PAD\d+\]")
_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_MOST_TOKENS = 1 << 22
# What comes of a tokenizer.json that says something else than it is asked.
_MISREAD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class TokenList:
    """Tokens by id, as the file spells them. kind: how it spells bytes."""

    kind: str
    tokens: Sequence[bytes]

    def digest(self) -> str:
        """Equal where every id means the same bytes; padding at the end is no difference."""
        tokens = self.tokens
        count = len(tokens)
        while count and _PADDING.fullmatch(tokens[count - 1]):
            count -= 1
        digest = hashlib.sha256(f"{self.kind} {count}\n".encode())
        digest.update(np.fromiter(map(len, tokens[:count]), "<u4", count).tobytes())
        digest.update(b"".join(tokens[:count]))
        return digest.hexdigest()

    def same_ids(self, other: TokenList) -> bool:
        """Whether an id means the same in both; one may have up to `MAX_VOCAB_PADDING` more at its end."""
        count = min(len(self.tokens), len(other.tokens))
        alike = self.kind == other.kind and self.tokens[:count] == other.tokens[:count]
        return alike and abs(len(self.tokens) - len(other.tokens)) <= MAX_VOCAB_PADDING

    def shared_token_fraction(self, draft: TokenList) -> float:
        """Of these tokens, the share that `draft` has too, under whatever id; see `Translation`."""
        mine, its = set(self._bytes()), set(draft._bytes())
        return len(mine & its) / max(1, len(mine))

    def _bytes(self) -> Iterable[bytes]:
        """What each token stands for, padding left out."""
        spelled = (token for token in self.tokens if not _PADDING.fullmatch(token))
        if self.kind == _BYTE_LEVEL:
            return map(_from_byte_level, spelled)
        return map(_from_sentencepiece, spelled) if self.kind == _SENTENCEPIECE else spelled


def _byte_level_table() -> dict[int, int]:
    """From the characters GPT-2's tokenizers write bytes as to those bytes."""
    themselves = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = [byte for byte in range(256) if byte not in themselves]
    return {byte: byte for byte in themselves} | {256 + i: byte for i, byte in enumerate(others)}


_TABLE = _byte_level_table()


def _from_byte_level(token: bytes) -> bytes:
    try:
        return bytes([_TABLE[ord(character)] for character in token.decode()])
    except (KeyError, UnicodeDecodeError):
        return token  # a control token, which is written as it is


def _from_sentencepiece(token: bytes) -> bytes:
    if match := _BYTE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁".encode(), b" ")


def tokens_of_header(header: GgufHeader) -> TokenList | None:
    """The tokens of a GGUF model; None where the file has none."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not tokens:
        return None
    kind = str(header.metadata.get("tokenizer.ggml.model", ""))
    return TokenList(_KINDS.get(kind, kind), list(tokens))


def tokens_of_folder(folder: Path) -> TokenList | None:
    """The tokens of a model in MLX's form; None where they are not in a tokenizer.json.

    Raises ModelFileError where that cannot be understood.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        ids = dict(_ids(tokenizer))
        count = max(ids, default=-1) + 1
        if not 0 < count <= _MOST_TOKENS or min(ids) < 0:
            raise ValueError(f"{count} tokens")
    except FileNotFoundError:
        return None
    except (OSError, *_MISREAD) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise ModelFileError(f"{path} is no tokenizer: {why}", "download the model again") from error
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
    """How a tokenizer.json spells bytes, by the step that turns tokens into text again."""
    if "ByteLevel" in json.dumps(tokenizer.get("decoder")):
        return _BYTE_LEVEL
    model = tokenizer["model"]
    if model.get("byte_fallback") or model.get("type") == "Unigram":
        return _SENTENCEPIECE
    return str(model.get("type", ""))
