"""Text to tokens and back, by the tokenizer of a checkpoint, with llama.cpp's view of what each token is.

A model on MLX and one on llama.cpp may draft for each other, so the bytes, the control tokens and the ends
of replies are those that llama.cpp would give a GGUF made from the same files.
"""

from __future__ import annotations

import json
import re
import threading
from functools import cache
from typing import Any

from edgespec.backends.base_model import MAX_CACHED_PIECES
from edgespec.errors import BackendError, ClosedError, ModelFileError

__all__ = ["MlxVocabulary"]

# The tokens that llama.cpp takes for the end of a reply, by their text (llama-vocab.cpp, `special_eog_ids`).
_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    )
)
# Of each group the first that the vocabulary has also ends a reply: they pad or separate files of code.
_CODE_ENDS = (
    ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)
_HARMONY_MARKS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
_LOOKS_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused.*>", re.DOTALL)
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class MlxVocabulary:
    """The vocabulary of a checkpoint.

    tokenizer: mlx_lm's TokenizerWrapper. vocab_size: how many logits the model gives, which may be more
    than the tokenizer has tokens; the rest are padding without a text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.size = vocab_size
        # The tokenizer holds the switch for control tokens as state, and texts come from several threads.
        self._using = threading.Lock()
        vocab: dict[str, int] = tokenizer.get_vocab()
        if not vocab:
            raise ModelFileError("the tokenizer has no tokens", "download its files again")
        self._known = max(vocab.values()) + 1
        self._added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._control = _control_tokens(self._added, vocab)
        self._tokenizer: Any = _with_control_tokens(tokenizer, self._added, self._control)
        self._byte_level = _is_byte_level(tokenizer)
        self._ends = _ends(tokenizer, vocab)
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        self.chat_template: str | None = template if isinstance(template, str) else None
        self.bos_text: str = tokenizer.bos_token or ""
        self.eos_text: str = tokenizer.eos_token or ""
        begin: list[int] = tokenizer.encode("a", add_special_tokens=True)[:1]
        self._start = begin if self.bos_text and begin == [tokenizer.bos_token_id] else []
        self._pieces: dict[int, bytes] = {}

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        """Text to tokens; see the Protocol. Raises BackendError for a token the model has no row for."""
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        tokens = self._encode(text, special)
        if special and any(token >= self.size for token in tokens):
            # A control token that only a sibling of this model knows is plain text here.
            tokens = self._encode(text, special=False)
        beyond = [token for token in tokens if token >= self.size]
        if beyond:
            raise BackendError(
                f"the tokenizer gives token {beyond[0]}, and the model has {self.size}",
                "check that tokenizer and weights are of the same model",
            )
        return [*self._start, *tokens] if start else tokens

    def _encode(self, text: str, special: bool) -> list[int]:
        with self._using:
            tokens: list[int] = self._open().encode(
                text, add_special_tokens=False, split_special_tokens=not special
            )
        return tokens

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; control tokens add none."""
        self._open()
        piece = self._pieces.get(token)
        if piece is None:
            if len(self._pieces) >= MAX_CACHED_PIECES:
                self._pieces.clear()
            raw = self.raw_piece(token)
            piece = self._pieces[token] = raw if token not in self._control else b""
        return piece

    def raw_piece(self, token: int) -> bytes:
        """The token as it stands in the vocabulary, control tokens included."""
        tokenizer = self._open()
        if not 0 <= token < self.size:
            raise BackendError(f"there is no token {token} among {self.size}")
        known: str | None = tokenizer.convert_ids_to_tokens(token) if token < self._known else None
        if known is None:
            return b""
        if token in self._control:
            return known.encode()
        if token in self._added:
            return known.replace("▁", " ").encode()
        return _bytes_of(known) if self._byte_level else _spaced(known)

    def is_end(self, token: int) -> bool:
        """True for tokens that end a reply."""
        self._open()
        return token in self._ends

    def _open(self) -> Any:
        """The tokenizer. Raises ClosedError when it is gone."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ClosedError("the model is closed", "load it again")
        return tokenizer

    def close(self) -> None:
        """The model is about to be freed."""
        with self._using:
            self._tokenizer = None


def _control_tokens(added: dict[int, Any], vocab: dict[str, int]) -> frozenset[int]:
    control = {
        token for token, about in added.items() if about.special or _LOOKS_SPECIAL.fullmatch(about.content)
    }
    control |= {vocab[text] for text in _ENDS.union(*_CODE_ENDS) if text in vocab}
    control -= {vocab[text] for text in _HARMONY_MARKS if text in vocab}
    return frozenset(control - _not_ends(vocab))


def _with_control_tokens(tokenizer: Any, added: dict[int, Any], control: frozenset[int]) -> Any:
    """A tokenizer for which exactly these of its added tokens are control tokens."""
    if not tokenizer.is_fast or all(about.special == (token in control) for token, about in added.items()):
        return tokenizer
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    for entry in parts["added_tokens"]:
        entry["special"] = entry["id"] in control
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=Tokenizer.from_str(json.dumps(parts)))


def _ends(tokenizer: Any, vocab: dict[str, int]) -> frozenset[int]:
    ends = {token for text, token in vocab.items() if text in _ENDS}
    for group in _CODE_ENDS:
        ends |= {vocab[text] for text in group if text in vocab}
    return frozenset((ends | set(tokenizer.eos_token_ids)) - _not_ends(vocab))


def _not_ends(vocab: dict[str, int]) -> set[int]:
    """Texts that end replies of other families only."""
    harmony = {"<|return|>", "<|call|>"} <= vocab.keys() or {"<|calls|>", "<|flush|>"} <= vocab.keys()
    normal = "<|tool_response>" in vocab or "<|plamo:eos|>" in vocab
    texts = (["<|end|>"] if harmony else []) + (["</s>"] if normal else [])
    return {vocab[text] for text in texts if text in vocab}


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether its tokens are written in GPT-2's alphabet of bytes."""
    if not tokenizer.is_fast:
        return False
    backend = tokenizer.backend_tokenizer
    return "ByteLevel(" in f"{backend.decoder} {backend.pre_tokenizer}"


def _spaced(text: str) -> bytes:
    """A token of a sentencepiece vocabulary."""
    byte = _BYTE.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()


def _bytes_of(text: str) -> bytes:
    """A token in GPT-2's alphabet of bytes; what is not of that alphabet as llama.cpp writes it."""
    alphabet = _alphabet()
    parts = []
    for character in text:
        byte = alphabet.get(character)
        parts.append(byte if byte is not None else f"[UNK_BYTE_0x{character.encode().hex()}{text}]".encode())
    return b"".join(parts)


@cache
def _alphabet() -> dict[str, bytes]:
    """Printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}
