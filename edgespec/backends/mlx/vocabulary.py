"""MLX vocabularies with the same token bytes, control tokens and end-of-sequence tokens as llama.cpp's.

MLX and GGUF models can draft for each other only if their vocabularies match. This module therefore
reproduces the vocabulary that llama.cpp would use if the MLX model were converted to GGUF.
"""

from __future__ import annotations

import json
import re
import threading
from functools import cache, cached_property
from typing import Any

from edgespec.errors import BackendError, ClosedError, ModelFileError
from edgespec.model.base import Vocabulary
from edgespec.model.base_model import MAX_CACHED_PIECES
from edgespec.model.token_list import longest_piece_bytes

__all__ = ["MlxVocabulary"]

# Space-separated tokens that end a reply in llama.cpp (llama-vocab.cpp, `special_eog_ids`). The last two
# lines are padding and file-separator tokens from code models.
_END_TEXTS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s>
<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>
<｜end▁of▁sentence｜> [e~[
<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>
<|file_sep|>
"""
_HARMONY_MARKS = "<|channel|> <|message|> <|start|> <|constrain|>"
_LOOKS_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused.*>", re.DOTALL)
# Pre-tokenizers that remove whitespace or other characters.
_REMOVES_TEXT = re.compile("Removed|Whitespace|CharDelimiterSplit|BertPreTokenizer")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class MlxVocabulary:
    """Thread-safe `Vocabulary` implementation for MLX models."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Create the vocabulary.

        Args:
            tokenizer: mlx_lm's TokenizerWrapper.
            vocab_size: Number of logits per token. IDs missing from the tokenizer are padding.

        Raises:
            ModelFileError: The tokenizer has no tokens.
        """
        self.size = vocab_size
        # Guards the tokenizer, because encoding temporarily changes one of its settings.
        self._lock = threading.Lock()
        vocab: dict[str, int] = tokenizer.get_vocab()
        if not vocab:
            raise ModelFileError("the tokenizer has no tokens", "download its files again")
        self._token_count = max(vocab.values()) + 1
        self._added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._control = _control_tokens(self._added, vocab)
        self._tokenizer: Any = _with_control_tokens(tokenizer, self._added, self._control)
        self._byte_level = _is_byte_level(tokenizer)
        self._end_tokens = _end_tokens(tokenizer, vocab)
        template: Any = tokenizer.chat_template
        template = template.get("default") if isinstance(template, dict) else template
        self.chat_template: str | None = template if isinstance(template, str) else None
        self.bos_text: str = tokenizer.bos_token or ""
        self.eos_text: str = tokenizer.eos_token or ""
        begin: list[int] = tokenizer.encode("a", add_special_tokens=True)[:1]
        self._start = begin if self.bos_text and begin == [tokenizer.bos_token_id] else []
        self._pieces: dict[int, bytes] = {}

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        """Convert text to token IDs. Raises BackendError if the model has no logit for one of them."""
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        tokens = self._encode(text, special)
        if special and any(token >= self.size for token in tokens):
            # The model has no logit for one of the control tokens, so treat all of them as plain text.
            tokens = self._encode(text, special=False)
        beyond = [token for token in tokens if token >= self.size]
        if beyond:
            raise BackendError(
                f"the tokenizer returned the token ID {beyond[0]}, but the model has only {self.size} tokens",
                "check that the tokenizer and the weights belong to the same model",
                code="vocabulary_mismatch",
            )
        return [*self._start, *tokens] if start else tokens

    def _encode(self, text: str, special: bool) -> list[int]:
        with self._lock:
            tokenizer = self._check_open()
            tokens: list[int] = tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=not special
            )
        return tokens

    def min_tokens(self, text: str) -> int:
        longest = self._longest_piece_bytes
        if not longest:
            return 0
        normalizer = self._check_open().backend_tokenizer.normalizer
        text = text.encode("utf-8", "replace").decode()
        if normalizer:
            text = normalizer.normalize_str(text).replace("▁", " ")
        return -(-len(text.strip().encode()) // longest)

    @cached_property
    def _longest_piece_bytes(self) -> int:
        tokenizer = self._check_open()
        if not tokenizer.is_fast or _REMOVES_TEXT.search(str(tokenizer.backend_tokenizer.pre_tokenizer)):
            return 0
        return longest_piece_bytes(tokenizer.get_vocab(), self._known_piece)

    def _known_piece(self, token: int) -> bytes:
        return self.raw_piece(token) if token < self.size else b""

    def piece(self, token: int) -> bytes:
        self._check_open()
        piece = self._pieces.get(token)
        if piece is None:
            if len(self._pieces) >= MAX_CACHED_PIECES:
                self._pieces.clear()
            piece = self._pieces[token] = b"" if token in self._control else self.raw_piece(token)
        return piece

    def same_entries(self, other: Vocabulary) -> bool:  # noqa: ARG002
        return False

    def raw_piece(self, token: int) -> bytes:
        tokenizer = self._check_open()
        if not 0 <= token < self.size:
            raise BackendError(
                f"token ID {token} is not in the vocabulary of {self.size:,} tokens", code="token_unknown"
            )
        known: str | None = tokenizer.convert_ids_to_tokens(token) if token < self._token_count else None
        if known is None:
            return b""
        if token in self._control:
            return known.encode()
        if token in self._added:
            return known.replace("▁", " ").encode()
        return _byte_level_bytes(known) if self._byte_level else _sentencepiece_bytes(known)

    def is_end(self, token: int) -> bool:
        self._check_open()
        return token in self._end_tokens

    def _check_open(self) -> Any:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ClosedError("the model is closed", "load the model again")
        return tokenizer

    def close(self) -> None:
        """Free the tokenizer once no thread is using it. Does not block."""
        self._tokenizer = None


def _control_tokens(added: dict[int, Any], vocab: dict[str, int]) -> frozenset[int]:
    control = {
        token for token, entry in added.items() if entry.special or _LOOKS_SPECIAL.fullmatch(entry.content)
    }
    control |= _ids(_END_TEXTS, vocab)
    return frozenset(control - _ids(_HARMONY_MARKS, vocab) - _other_family_ends(vocab))


def _ids(texts: str, vocab: dict[str, int]) -> set[int]:
    return {vocab[text] for text in texts.split() if text in vocab}


def _with_control_tokens(tokenizer: Any, added: dict[int, Any], control: frozenset[int]) -> Any:
    if not tokenizer.is_fast or all(entry.special == (token in control) for token, entry in added.items()):
        return tokenizer
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    for entry in parts["added_tokens"]:
        entry["special"] = entry["id"] in control
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=Tokenizer.from_str(json.dumps(parts)))


def _end_tokens(tokenizer: Any, vocab: dict[str, int]) -> frozenset[int]:
    ends = _ids(_END_TEXTS, vocab) | set(tokenizer.eos_token_ids)
    return frozenset(ends - _other_family_ends(vocab))


def _other_family_ends(vocab: dict[str, int]) -> set[int]:
    """Return the tokens that end a reply in other model families, but not in this one."""
    texts = ""
    if {"<|return|>", "<|call|>"} <= vocab.keys() or {"<|calls|>", "<|flush|>"} <= vocab.keys():
        texts += "<|end|> "
    if "<|tool_response>" in vocab or "<|plamo:eos|>" in vocab:
        texts += "</s>"
    return _ids(texts, vocab)


def _is_byte_level(tokenizer: Any) -> bool:
    """Return whether the vocabulary represents bytes as characters, as GPT-2 does."""
    if not tokenizer.is_fast:
        return False
    backend = tokenizer.backend_tokenizer
    return "ByteLevel(" in f"{backend.decoder} {backend.pre_tokenizer}"


def _sentencepiece_bytes(text: str) -> bytes:
    byte = _BYTE.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()


def _byte_level_bytes(text: str) -> bytes:
    """Decode a token from GPT-2's byte alphabet. Characters outside it are handled as in llama.cpp."""
    alphabet = _byte_alphabet()
    return b"".join(
        alphabet[character]
        if character in alphabet
        else f"[UNK_BYTE_0x{character.encode().hex()}{text}]".encode()
        for character in text
    )


@cache
def _byte_alphabet() -> dict[str, bytes]:
    """Return a map from each character in GPT-2's byte alphabet to the byte it represents."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: bytes([byte]) for byte, character in bytes_to_unicode().items()}
