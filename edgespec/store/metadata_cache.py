"""Cache model metadata across runs, until one of the model's files changes."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from edgespec.errors import ModelFileError
from edgespec.model.model_info import ModelInfo
from edgespec.model.registry import format_of
from edgespec.model.token_list import TokenList
from edgespec.store.catalogue import ModelFormat
from edgespec.system.facts import Facts

__all__ = ["files_fingerprint", "model_info", "same_token_ids", "shared_token_fraction"]

# Increment this when `read_info` returns different values for the same files, or when the type of a field
# changes.
_VERSION = 6
# Fields of `ModelInfo` that are sequences.
_SEQUENCES = ("heads", "read_layers")

# A model's path, file format and vocabulary hash.
ModelVocabulary: TypeAlias = tuple[Path, ModelFormat, str]


def model_info(path: Path, form: ModelFormat) -> ModelInfo:
    """Return the metadata of the model at `path`. Raises ModelFileError if it cannot be read."""
    state = f"{files_fingerprint(path, form)} {_VERSION}"
    match Facts().get("model", str(path)):
        case [str(saved_state), dict(value)] if saved_state == state:
            with suppress(TypeError, KeyError):
                return ModelInfo(**{**value, **{name: tuple(value[name]) for name in _SEQUENCES}})
    info = format_of(form).read_info(path)
    Facts().put("model", {str(path): [state, asdict(info)]})
    return info


def same_token_ids(target: ModelVocabulary, draft: ModelVocabulary) -> bool:
    """Return whether the models use the same token IDs. True if that is unknown."""
    if not target[2] or not draft[2] or target[2] == draft[2]:
        return True
    target_tokens, draft_tokens = _read_tokens(target, draft)
    return target_tokens is None or draft_tokens is None or target_tokens.same_ids(draft_tokens)


def shared_token_fraction(target: ModelVocabulary, draft: ModelVocabulary) -> float | None:
    """Return the fraction of the target's tokens that the draft model also has, or None if unknown."""
    if not target[2] or not draft[2]:
        return None
    if target[2] == draft[2]:
        return 1.0
    key = f"{target[2]} {draft[2]}"
    match Facts().get("shared tokens", key):
        case float(saved):
            return saved
    target_tokens, draft_tokens = _read_tokens(target, draft)
    if target_tokens is None or draft_tokens is None:
        return None
    fraction = float(target_tokens.shared_token_fraction(draft_tokens))
    Facts().put("shared tokens", {key: fraction})
    return fraction


def _read_tokens(
    target: ModelVocabulary, draft: ModelVocabulary
) -> tuple[TokenList | None, TokenList | None]:
    try:
        return format_of(target[1]).read_tokens(target[0]), format_of(draft[1]).read_tokens(draft[0])
    except ModelFileError:
        return None, None


def files_fingerprint(path: Path, form: ModelFormat) -> str:
    """Return a hash of the names, sizes and modification times of a model's files. Raises ModelFileError."""
    try:
        files = format_of(form).named_files(path)
        stamps = [
            (file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]
        ]
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be read: {error.strerror or error}",
            "check the path",
            code="model_file_unreadable",
        ) from error
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:32]
