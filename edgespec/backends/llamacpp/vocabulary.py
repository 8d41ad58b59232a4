"""Implement `Vocabulary` with llama.cpp's tokenizer."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

from edgespec.backends.base_model import MAX_CACHED_PIECES
from edgespec.backends.llamacpp.native import library
from edgespec.errors import BackendError, ClosedError

__all__ = ["LlamaVocabulary"]


class LlamaVocabulary:
    """The vocabulary of a loaded llama.cpp model.

    Any thread may use it. Its methods raise ClosedError after the model has been closed.

    Args:
        model: The llama_model handle, which must not be freed before `close` is called.
    """

    def __init__(self, model: Any) -> None:
        self._lib = library()
        self._closed = False
        # Prevents the model from being freed while another thread is tokenizing. Reentrant, because garbage
        # collection during a call can end an abandoned reply, which looks up its tokens.
        self._lock = threading.RLock()
        self._vocab = self._lib.llama_model_get_vocab(model)
        self.size: int = self._lib.llama_vocab_n_tokens(self._vocab)
        template = self._lib.llama_model_chat_template(model, None)
        self.chat_template = template.decode("utf-8", "replace") if template else None
        self.bos_text = self._special_text(self._lib.llama_vocab_bos(self._vocab))
        self.eos_text = self._special_text(self._lib.llama_vocab_eos(self._vocab))
        self._adds_start: bool = self._lib.llama_vocab_get_add_bos(self._vocab)
        self._cached_piece = lru_cache(MAX_CACHED_PIECES)(partial(self._text, special=False))

    def _special_text(self, token: int) -> str:
        return self.raw_piece(token).decode("utf-8", "replace") if 0 <= token < self.size else ""

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        """See `Vocabulary`. Raises BackendError if the text cannot be tokenized."""
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
                    f"a text of {len(data):,} bytes cannot be tokenized",
                    "use a shorter text or another model",
                )
            room = -count

    def piece(self, token: int) -> bytes:
        """See `Vocabulary`."""
        return self._cached_piece(token)

    def raw_piece(self, token: int) -> bytes:
        """See `Vocabulary`."""
        return self._text(token, special=True)

    def _text(self, token: int, special: bool) -> bytes:
        if not 0 <= token < self.size:
            raise BackendError(
                f"token {token} is not in the vocabulary of {self.size:,} tokens",
                f"use a token id from 0 to {self.size - 1}",
            )
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            with self._open():
                count = self._lib.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def is_end(self, token: int) -> bool:
        """See `Vocabulary`."""
        with self._open():
            return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Prevent the model from being closed during the `with` block. Raises ClosedError."""
        with self._lock:
            if self._closed:
                raise ClosedError("the model is closed", "load it again")
            yield

    def close(self) -> None:
        """Make further calls raise ClosedError. This must be called before the model is freed."""
        with self._lock:
            self._closed = True
