"""Facts of models, looked up once for each state of their files and kept in the cache folder."""

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

_VERSION = 1
_MOST_MODELS, _MOST_SHARES = 2000, 20_000
_MOST_BYTES = 16 * 2**20

# A path, its form and the `vocabulary` of its facts.
Model: TypeAlias = tuple[Path, ModelFormat, str]


class MetadataCache:
    """What was found out about models. Nothing here raises because of the file it is kept in."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_folder() / "models.json"
        self._models, self._shares = self._read()
        self._changed = False

    def info(self, path: Path, form: ModelFormat) -> ModelInfo:
        """The facts of a model in one of its forms. Raises ModelFileError where it is none."""
        state = files_fingerprint(path, form)
        key = str(path)
        entry = self._models.get(key)
        if entry is not None and entry[0] == state:
            return entry[1]
        info = format_of(form).read_info(path)
        self._models.pop(key, None)
        self._models[key] = (state, info)
        self._changed = True
        return info

    def same_ids(self, mine: Model, its: Model) -> bool:
        """Whether ids mean the same in both models, or either's tokens are not known."""
        if not mine[2] or not its[2] or mine[2] == its[2]:
            return True
        one, other = self._both_tokens(mine, its)
        return one is None or other is None or one.same_ids(other)

    def shared_token_fraction(self, mine: Model, its: Model) -> float | None:
        """Of the first model's tokens, the share that the second has too; None where they are not known."""
        if not mine[2] or not its[2]:
            return None
        if mine[2] == its[2]:
            return 1.0
        key = f"{mine[2]} {its[2]}"
        if key not in self._shares:
            one, other = self._both_tokens(mine, its)
            if one is None or other is None:
                return None
            self._shares[key] = one.shared_token_fraction(other)
            self._changed = True
        return self._shares[key]

    def _both_tokens(self, mine: Model, its: Model) -> tuple[TokenList | None, TokenList | None]:
        try:
            return format_of(mine[1]).read_tokens(mine[0]), format_of(its[1]).read_tokens(its[0])
        except ModelFileError:
            return None, None

    def keep(self) -> None:
        """Write what is new; where that is not possible it is found out again next time."""
        if not self._changed:
            return
        # Headers of models that are still on the hub lie in a folder of one plan only (remote_header.py).
        there = {path: found for path, found in self._models.items() if os.path.exists(path)}
        models = dict(list(there.items())[-_MOST_MODELS:])
        value = {
            "version": _VERSION,
            "models": {path: [state, asdict(info)] for path, (state, info) in models.items()},
            "shares": dict(list(self._shares.items())[-_MOST_SHARES:]),
        }
        with suppress(OSError, UnicodeEncodeError):
            write_private_file(self._path, json.dumps(value).encode())
            self._changed = False

    def _read(self) -> tuple[dict[str, tuple[str, ModelInfo]], dict[str, float]]:
        try:
            if self._path.stat().st_size > _MOST_BYTES:
                return {}, {}
            value = json.loads(read_regular_file(self._path))
            if value["version"] != _VERSION:
                return {}, {}
            models = {str(path): (str(e[0]), _info(e[1])) for path, e in value["models"].items()}
            return models, {str(key): float(share) for key, share in value["shares"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return {}, {}


def _info(value: Mapping[str, Any]) -> ModelInfo:
    """The facts in a JSON object. Raises TypeError or ValueError where it is of another form."""
    info = ModelInfo(**{**value, "heads": tuple(value["heads"])})
    for one in fields(info):
        if one.name not in ("kind", "heads") and type(getattr(info, one.name)).__name__ != one.type:
            raise ValueError(f"{one.name} is {getattr(info, one.name)!r}")
    return info


def files_fingerprint(path: Path, form: ModelFormat) -> str:
    """Sizes and times of a model's files: another text when one of them changed. Raises ModelFileError."""
    try:
        files = format_of(form).files(path)
        told = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}", "check the path") from error
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]
