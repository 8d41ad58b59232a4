"""Whether a file holds the same model as another, at other bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.backends.llamacpp.metadata import all_metadata
from edgespec.backends.llamacpp.native import library
from edgespec.errors import CapabilityError

__all__ = ["check_same_model"]


# Metadata that counts layers: what a whole model has, its halves have together.
_OF_LAYERS = ("block_count", "leading_dense_block_count")


def check_same_model(weights: Sequence[Any], copy: Any, path: str) -> None:
    """Raises CapabilityError when the copy at `path` has another shape or other tokens.

    weights: of the model, or of each of its halves. Their values are not compared: those of another training
    would draft badly, and change no reply.
    """
    first, second = _shape(weights), _shape([copy])
    for key in [*first, *(second.keys() - first.keys())]:
        if first.get(key) != second.get(key):
            raise _other(path, f"its {key} is {second.get(key)}, the target's is {first.get(key)}")
    lib = library()
    one, other = lib.llama_model_get_vocab(weights[0]), lib.llama_model_get_vocab(copy)
    sizes = lib.llama_vocab_n_tokens(one), lib.llama_vocab_n_tokens(other)
    if sizes[0] != sizes[1]:
        raise _other(path, f"it has {sizes[1]} tokens, the target has {sizes[0]}")
    text = lib.llama_vocab_get_text
    for token in range(sizes[0]):
        if text(one, token) != text(other, token):
            raise _other(path, f"its token {token} is another one")


def _shape(weights: Sequence[Any]) -> Mapping[str, str]:
    """What the files say of the model's shape, and nothing of how it is stored."""
    parts = [all_metadata(part) for part in weights]
    architecture = parts[0].get("general.architecture", "")
    shape = {key: value for key, value in parts[0].items() if key.startswith(f"{architecture}.")}
    for key in (f"{architecture}.{name}" for name in _OF_LAYERS):
        if key in shape:
            shape[key] = str(sum(int(part[key]) for part in parts))
    return {"general.architecture": architecture, **shape}


def _other(path: str, why: str) -> CapabilityError:
    return CapabilityError(
        f"{path} is no copy of the target: {why}", "make one from the target: edgespec prepare lowbit"
    )
