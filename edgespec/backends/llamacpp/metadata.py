"""Read the metadata and the vocabulary of a loaded GGUF model."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from itertools import repeat
from typing import Any

from edgespec.backends.llamacpp.native import library
from edgespec.errors import BackendError, ClosedError
from edgespec.model.base import Vocabulary
from edgespec.model.base_model import MAX_CACHED_PIECES
from edgespec.model.token_list import longest_piece_bytes

__all__ = [
    "LlamaVocabulary",
    "all_metadata",
    "architecture_metadata",
    "has_compressed_keys",
    "has_state",
    "metadata",
    "sliding_window",
    "vocabulary_size",
]

# Maximum length of a metadata value in bytes. Longer values are truncated, which is acceptable because only
# numbers and short names are needed.
_MAX_VALUE_BYTES = 4096
# A buffer that is large enough for most pieces. The type is created only once, because `create_string_buffer`
# is too slow for reading all pieces of a vocabulary.
_PieceBuffer = ctypes.c_char * 64


def metadata(weights: Any, key: str) -> str | None:
    """Return a value from a model's GGUF metadata as a string, or None if the key does not exist."""
    buffer = ctypes.create_string_buffer(_MAX_VALUE_BYTES)
    count = library().llama_model_meta_val_str(weights, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if count >= 0 else None


def architecture_metadata(weights: Any, key: str) -> str | None:
    """Return the value of a key prefixed with the architecture, such as `llama.block_count`, or None."""
    return metadata(weights, f"{metadata(weights, 'general.architecture')}.{key}")


def all_metadata(weights: Any) -> dict[str, str]:
    """Return a model's GGUF metadata, except arrays, as a dict of strings."""
    lib = library()
    buffer = ctypes.create_string_buffer(_MAX_VALUE_BYTES)

    def text(count: int) -> str:
        return buffer.value.decode("utf-8", "replace") if count >= 0 else ""

    return {
        text(lib.llama_model_meta_key_by_index(weights, i, buffer, len(buffer))): text(
            lib.llama_model_meta_val_str_by_index(weights, i, buffer, len(buffer))
        )
        for i in range(lib.llama_model_meta_count(weights))
    }


def has_state(weights: Any) -> bool:
    """Return whether the model has recurrent layers."""
    return bool(library().llama_model_is_recurrent(weights) or library().llama_model_is_hybrid(weights))


def has_compressed_keys(weights: Any) -> bool:
    """Return whether attention combines a sliding window with compressed keys of earlier tokens.

    llama.cpp stores the sequences of such a model separately, and can copy only whole sequences.
    """
    return metadata(weights, "general.architecture") == "deepseek4"


def sliding_window(weights: Any) -> int:
    """Return the size of the sliding attention window in tokens, or 0 if all layers use full attention."""
    if has_compressed_keys(weights):
        # `llama_model_n_swa` returns 0 for these models, because their cache cannot be rolled back within the
        # window.
        return int(architecture_metadata(weights, "attention.sliding_window") or 0)
    return int(library().llama_model_n_swa(weights))


def vocabulary_size(weights: Any) -> int:
    """Return the number of tokens in the model's vocabulary."""
    lib = library()
    return int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(weights)))


class LlamaVocabulary:
    """The vocabulary of a loaded llama.cpp model.

    Safe to use from any thread, even while another thread tokenizes a long text. Methods raise ClosedError
    after the model is closed.

    Args:
        model: The llama_model handle, which only `close` may free.
    """

    def __init__(self, model: Any) -> None:
        self._lib = library()
        # Reentrant, because a finaliser may look up tokens in a thread that already holds the lock.
        self._lock = threading.RLock()
        self._running_calls = 0
        self._free_model: Callable[[], None] | None = None
        self._vocab = self._lib.llama_model_get_vocab(model)
        self.size: int = self._lib.llama_vocab_n_tokens(self._vocab)
        template = self._lib.llama_model_chat_template(model, None)
        self.chat_template = template.decode("utf-8-sig", "replace") if template else None
        self.bos_text = self._special_text(self._lib.llama_vocab_bos(self._vocab))
        self.eos_text = self._special_text(self._lib.llama_vocab_eos(self._vocab))
        self._adds_start: bool = self._lib.llama_vocab_get_add_bos(self._vocab)
        self._cached_piece = lru_cache(MAX_CACHED_PIECES)(partial(self._text, special=False))

    def _special_text(self, token: int) -> str:
        return self.raw_piece(token).decode("utf-8", "replace") if 0 <= token < self.size else ""

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        """Convert text to token ids.

        Args:
            text: The text to tokenize.
            special: Whether to parse control tokens that appear in the text.
            start: Whether to prepend the BOS token if the model uses one.

        Raises:
            BackendError: The text cannot be tokenized.
        """
        data = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
        room = len(data) + 16
        while True:
            buffer = (ctypes.c_int32 * room)()
            with self._open():
                count = self._lib.llama_tokenize(
                    self._vocab, data, len(data), buffer, room, start and self._adds_start, special
                )
            if count >= 0:
                return list(buffer[:count])
            if count < -(1 << 30) or -count <= room:
                raise BackendError(
                    f"llama.cpp cannot tokenize {len(data):,} bytes of text",
                    "shorten the text, or choose another model",
                )
            room = -count

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens in text, without tokenizing it."""
        longest = self._longest_piece_bytes
        return -(-len(text.strip().encode("utf-8", "replace")) // longest) if longest else 0

    @cached_property
    def _longest_piece_bytes(self) -> int:
        lib, tokens = self._lib, range(self.size)
        with self._open():
            # Other vocabularies have no longest token, because any unknown word can be a single token.
            if lib.llama_vocab_type(self._vocab) not in (lib.LLAMA_VOCAB_TYPE_SPM, lib.LLAMA_VOCAB_TYPE_BPE):
                return 0
            entries = list(map(lib.llama_vocab_get_text, repeat(self._vocab), tokens))
        texts = (entry.decode("utf-8", "backslashreplace") for entry in entries)
        return longest_piece_bytes(dict(zip(texts, tokens, strict=True)), self.raw_piece)

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text. Control tokens add none."""
        return self._cached_piece(token)

    def raw_piece(self, token: int) -> bytes:
        """Return a token's vocabulary entry as bytes, even for control tokens."""
        return self._text(token, special=True)

    def same_entries(self, other: Vocabulary) -> bool:
        if not isinstance(other, LlamaVocabulary):
            return False
        count = min(self.size, other.size)
        return self._entries(count) == other._entries(count)

    def _entries(self, count: int) -> tuple[int, list[bytes], list[int]]:
        """Return the tokenizer's type, and the texts and attributes of the first `count` tokens."""
        lib, tokens = self._lib, range(count)
        with self._open():
            texts = list(map(lib.llama_vocab_get_text, repeat(self._vocab), tokens))
            attributes = list(map(lib.llama_vocab_get_attr, repeat(self._vocab), tokens))
            return lib.llama_vocab_type(self._vocab), texts, attributes

    def _text(self, token: int, special: bool) -> bytes:
        if not 0 <= token < self.size:
            raise BackendError(
                f"token ID {token} is not in the vocabulary of {self.size:,} tokens",
                f"use a token ID from 0 to {self.size - 1}",
                code="token_unknown",
            )
        buffer, room = _PieceBuffer(), ctypes.sizeof(_PieceBuffer)
        while True:
            with self._lock:
                self._check_open()
                count = self._lib.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count
            buffer = ctypes.create_string_buffer(room)

    def is_end(self, token: int) -> bool:
        """Return whether a token ends a reply."""
        with self._lock:
            self._check_open()
            return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Keep the model from being freed during the `with` block.

        Used for slow calls. Calls that take only microseconds hold the lock instead.

        Raises:
            ClosedError: The model is closed.
        """
        with self._lock:
            self._check_open()
            self._running_calls += 1
        try:
            yield
        finally:
            self._update(calls=-1)

    def _check_open(self) -> None:
        if self._free_model:
            raise ClosedError("the model is closed", "load the model again")

    def close(self, free_model: Callable[[], None]) -> None:
        """Make further calls raise ClosedError, and free the model once no call is running.

        Args:
            free_model: Frees the model. It may be called later and in another thread.
        """
        self._update(free_model=free_model)

    def _update(self, calls: int = 0, free_model: Callable[[], None] | None = None) -> None:
        with self._lock:
            self._running_calls += calls
            self._free_model = self._free_model or free_model
            free_now = None if self._running_calls else self._free_model
        if free_now:
            free_now()
