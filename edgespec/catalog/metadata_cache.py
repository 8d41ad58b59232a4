"""Cache model metadata on disk. An entry is valid until one of the model's files changes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeAlias

from edgespec.backends.model_info import ModelInfo
from edgespec.backends.registry import format_of
from edgespec.backends.token_list import TokenList
from edgespec.catalog.catalogue import ModelFormat
from edgespec.errors import ModelFileError
from edgespec.files import cache_folder, read_regular_file, write_private_file

__all__ = ["MetadataCache", "files_fingerprint"]

_VERSION = 3
# Limits on the number of models and model pairs in the cache file. No machine has that many.
_MAX_MODELS, _MAX_PAIRS = 2000, 20_000
_MAX_FILE_BYTES = 16 * 2**20
# Fields of `ModelInfo` that are sequences.
_SEQUENCES = ("heads", "read_layers")

# A model's path, file format and vocabulary hash.
ModelVocabulary: TypeAlias = tuple[Path, ModelFormat, str]


class MetadataCache:
    """Caches model metadata and the fraction of tokens shared by each pair of models.

    A missing, damaged or read-only cache file is ignored.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_folder() / "models.json"
        self._models, self._fractions = self._read()
        self._changed = False

    def model_info(self, path: Path, form: ModelFormat) -> ModelInfo:
        """Return the metadata of the model at `path`. Raises ModelFileError if it cannot be read."""
        fingerprint = files_fingerprint(path, form)
        key = str(path)
        entry = self._models.get(key)
        if entry is not None and entry[0] == fingerprint:
            return entry[1]
        info = format_of(form).read_info(path)
        self._models.pop(key, None)
        self._models[key] = (fingerprint, info)
        self._changed = True
        return info

    def same_token_ids(self, target: ModelVocabulary, draft: ModelVocabulary) -> bool:
        """Return False if the models are known to use different token IDs, otherwise True."""
        if not target[2] or not draft[2] or target[2] == draft[2]:
            return True
        target_tokens, draft_tokens = self._read_tokens(target, draft)
        return target_tokens is None or draft_tokens is None or target_tokens.same_ids(draft_tokens)

    def shared_token_fraction(self, target: ModelVocabulary, draft: ModelVocabulary) -> float | None:
        """Return the fraction of the target's tokens that the draft model also has, or None if unknown."""
        if not target[2] or not draft[2]:
            return None
        if target[2] == draft[2]:
            return 1.0
        key = f"{target[2]} {draft[2]}"
        if key not in self._fractions:
            target_tokens, draft_tokens = self._read_tokens(target, draft)
            if target_tokens is None or draft_tokens is None:
                return None
            self._fractions[key] = target_tokens.shared_token_fraction(draft_tokens)
            self._changed = True
        return self._fractions[key]

    def _read_tokens(
        self, target: ModelVocabulary, draft: ModelVocabulary
    ) -> tuple[TokenList | None, TokenList | None]:
        try:
            return format_of(target[1]).read_tokens(target[0]), format_of(draft[1]).read_tokens(draft[0])
        except ModelFileError:
            return None, None

    def save(self) -> None:
        """Write new entries to disk. If writing fails, the next run reads the metadata again."""
        if not self._changed:
            return
        existing = {path: entry for path, entry in self._models.items() if os.path.exists(path)}
        models = dict(list(existing.items())[-_MAX_MODELS:])
        value = {
            "version": _VERSION,
            "models": {path: [fingerprint, asdict(info)] for path, (fingerprint, info) in models.items()},
            "shares": dict(list(self._fractions.items())[-_MAX_PAIRS:]),
        }
        with suppress(OSError, UnicodeEncodeError):
            write_private_file(self._path, json.dumps(value).encode())
            self._changed = False

    def _read(self) -> tuple[dict[str, tuple[str, ModelInfo]], dict[str, float]]:
        try:
            if self._path.stat().st_size > _MAX_FILE_BYTES:
                return {}, {}
            value = json.loads(read_regular_file(self._path))
            if value["version"] != _VERSION:
                return {}, {}
            models = {str(path): (str(e[0]), _info(e[1])) for path, e in value["models"].items()}
            return models, {str(key): float(fraction) for key, fraction in value["shares"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return {}, {}


def _info(value: Mapping[str, Any]) -> ModelInfo:
    info = ModelInfo(**{**value, **{name: tuple(value[name]) for name in _SEQUENCES}})
    for one in fields(info):
        if one.name not in ("kind", *_SEQUENCES) and type(getattr(info, one.name)).__name__ != one.type:
            raise ValueError(
                f"the metadata field {one.name} has an invalid value: {getattr(info, one.name)!r}"
            )
    return info


def files_fingerprint(path: Path, form: ModelFormat) -> str:
    """Return a hash of the names, sizes and modification times of a model's files. Raises ModelFileError."""
    try:
        files = format_of(form).files(path)
        stamps = [
            (file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]
        ]
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}", "check the path") from error
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:32]
