"""Identify heads from their files, and check whether a head was made for a target."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import ModelFileError, shorten
from edgespec.model.base import Head
from edgespec.model.formats.mlx_metadata import read_head_info
from edgespec.model.heads.residual_layout import residual_head_method
from edgespec.model.model_facts import ModelInfo
from edgespec.model.registry import format_at
from edgespec.options.methods import Method, head_kinds

# Maps head architectures that work with only one target architecture to that architecture.
_TARGETS = {"gemma4-assistant": "gemma4"}


def method_of(kind: str) -> str:
    """Return the drafting method for a kind of head, such as "eagle" for "EAGLE-3", or "" if unknown."""
    found = _record(kind)
    return found.name if found else ""


def drafts_in_one_pass(kind: str) -> bool:
    """Return whether heads of this kind draft several tokens per pass, rather than one."""
    found = _record(kind)
    return bool(found and found.head and found.head.drafts_in_one_pass)


def _record(kind: str) -> Method | None:
    return {_first_word(known): each for known, each in head_kinds().values()}.get(_first_word(kind))


def _first_word(kind: str) -> str:
    return kind.replace("-", " ").replace(",", " ").split()[0]


def head_info(path: Path) -> ModelInfo:
    """Return the metadata of a head in a GGUF file, or in a folder in the Hugging Face layout.

    Raises ModelFileError if the files are missing or damaged.
    """
    return read_head_info(path) if path.is_dir() else format_at(path).read_info(path)


def head_at(path: Path) -> Head:
    """Return the head at a path. Raises ModelFileError if there is none or it is damaged."""
    if method := residual_head_method(path):
        return Head(method, path)
    info = head_info(path)
    for name in info.heads:
        if method := method_of(name):
            return Head(method, path)
    if info.heads:
        raise unknown_head(str(path), info)
    raise ModelFileError(
        f"{path} contains a model with architecture {shorten(info.architecture)!r}, not a draft head",
        "use --head only for draft heads, and --draft for draft models",
        code="wrong_file",
    )


def unknown_head(name: str, info: ModelInfo) -> ModelFileError:
    """Return the error to raise for a kind of head that edgespec cannot run."""
    return ModelFileError(
        f"{name} is a draft head of type {info.heads[0]}, which edgespec does not support",
        "choose another draft head",
        code="model_file_not_supported",
    )


def why_not_made_for(head: ModelInfo, target: ModelInfo) -> str:
    """Explain why a head was not made for a target, or return an empty string if their metadata match.

    Sizes that are missing from the metadata are not compared.
    """
    architecture = _TARGETS.get(head.architecture, target.architecture)
    if architecture != target.architecture:
        return f"it needs a model with architecture {architecture!r}, not {shorten(target.architecture)!r}"
    for what, needed, own in (
        ("hidden states", head.hidden_size, target.hidden_size),
        ("a vocabulary", head.vocab_size, target.vocab_size),
    ):
        if needed and own and needed != own:
            return f"it needs {what} of size {needed:,}, not {own:,} as in this model"
    if head.read_layers and target.layers and max(head.read_layers) > target.layers:
        return f"it reads the layers {[*head.read_layers]}, but this model has only {target.layers} layers"
    return ""
