"""What llama.cpp takes for granted in a file, and ends the process over: looked at before it may."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from edgespec.backends.gguf_header import GgufHeader, read_header
from edgespec.errors import ModelFileError

__all__ = ["check_asserted"]

# LLAMA_MAX_LAYERS
_MOST_LAYERS = 512
# Sizes and counts that it divides by, or makes as much of as they say.
_COUNTS = {
    "embedding_length": 1 << 20,
    "attention.head_count": 1 << 14,
    "attention.head_count_kv": 1 << 14,
    "feed_forward_length": 1 << 24,
    "context_length": (1 << 31) - 1,
}


def check_asserted(path: Path) -> None:
    """Raises ModelFileError for a header that llama.cpp would abort on, and where there is no file."""
    try:
        found = path.stat()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}", "check the path") from error
    _check(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=32)
def _check(path: Path, _size_bytes: int, _changed_ns: int) -> None:
    """Once for each file as it is: a header with a large vocabulary takes a while."""
    try:
        header = read_header(path)
    except ModelFileError:
        return  # llama.cpp says better what is wrong with what cannot be read at all
    wrong = _wrong_count(header) or _wrong_vocabulary(header)
    if wrong:
        raise ModelFileError(f"{path} is damaged: {wrong}", "download it again, or choose another model")


def _wrong_count(header: GgufHeader) -> str:
    layers = header.of_architecture("block_count")
    if isinstance(layers, int) and not 0 < layers <= _MOST_LAYERS:
        return f"it says it has {layers:,} layers"
    more = header.of_architecture("nextn_predict_layers", 0)
    if isinstance(layers, int) and isinstance(more, int) and more > layers:
        return f"it says that {more:,} of {layers:,} layers predict further tokens"
    for key, most in _COUNTS.items():
        said = header.of_architecture(key)
        if isinstance(said, int) and said > most:
            return f"its {key} is {said:,}"
    return ""


def _wrong_vocabulary(header: GgufHeader) -> str:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return ""
    # It reads them up to a zero, and gives names to those without one.
    named = [text for token in tokens if (text := token.partition(b"\0")[0])]
    twice = len(named) - len(set(named))
    return f"{twice:,} tokens of its vocabulary are there twice" if twice else ""
