"""How often the guesses of a draft model came true for a target, kept from one run to the next.

Counts only, of the first guess of each round, under a hash of both models' files: nothing of what was said.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from edgespec.catalog.catalogue import ModelFormat
from edgespec.catalog.metadata_cache import files_fingerprint
from edgespec.errors import ModelFileError
from edgespec.files import (
    data_folder,
    make_private_folder,
    read_regular_file,
    regular_file_bytes,
    write_private_file,
)

__all__ = ["AcceptanceHistory", "AcceptanceRecorder", "Counted"]

_VERSION = 1
_MOST_PAIRS, _MOST_BYTES = 500, 2**20
# Fewer guesses tell too little: of so many, an acceptance is known to about 0.03.
_LEAST_GUESSES = 200
# What came long ago counts less: of more guesses than this, half are forgotten.
_MOST_GUESSES = 20_000
# What is new is written at the end, and whenever it is so much.
_SAVED_GUESSES = 2_000

Counted: TypeAlias = tuple[int, int]
"""Guesses, and those that came true."""
Model: TypeAlias = tuple[Path, ModelFormat]


class AcceptanceHistory:
    """What was counted of every pair. Nothing here raises because of the file it is kept in."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or data_folder() / "learnt" / "acceptances.json"

    def of(self, target: Model, draft: Model) -> float | None:
        """The share of guesses that came true, in [0, 1]; None where these very files have made too few."""
        try:
            guesses, true = self._read().get(_key(target, draft), (0, 0))
        except ModelFileError:
            return None  # one of them is gone
        return true / guesses if guesses >= _LEAST_GUESSES else None

    def add(self, target: Model, draft: Model, guesses: int, true: int) -> None:
        """Count these, too. What cannot be kept is lost. Raises ModelFileError where a model is gone."""
        pairs, key = self._read(), _key(target, draft)
        before = pairs.pop(key, (0, 0))
        counted = before[0] + guesses, before[1] + true
        pairs[key] = counted if counted[0] <= _MOST_GUESSES else (counted[0] // 2, counted[1] // 2)
        value = {"version": _VERSION, "pairs": dict(list(pairs.items())[-_MOST_PAIRS:])}
        with suppress(OSError):
            make_private_folder(self._path.parent)
            write_private_file(self._path, json.dumps(value).encode())

    def _read(self) -> dict[str, Counted]:
        try:
            if regular_file_bytes(self._path) > _MOST_BYTES:
                return {}
            value = json.loads(read_regular_file(self._path))
            if value["version"] != _VERSION:
                return {}
            pairs = {str(key): (int(one[0]), int(one[1])) for key, one in value["pairs"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return {}
        return {key: (guesses, true) for key, (guesses, true) in pairs.items() if 0 <= true <= guesses}


class AcceptanceRecorder:
    """Counts what a loaded pair guesses, and keeps it. Raises nothing."""

    def __init__(self, target: Model, draft: Model, kept: AcceptanceHistory | None = None) -> None:
        self._pair = target, draft
        self._kept = kept or AcceptanceHistory()
        self._guesses = self._true = 0

    def count(self, guesses: int, true: int) -> None:
        """The first guesses of the rounds of one reply, and those that came true."""
        self._guesses, self._true = self._guesses + guesses, self._true + true
        if self._guesses >= _SAVED_GUESSES:
            self.keep()

    def keep(self) -> None:
        """Write what is new."""
        if self._guesses:
            with suppress(ModelFileError):
                self._kept.add(*self._pair, self._guesses, self._true)
        self._guesses = self._true = 0


def _key(target: Model, draft: Model) -> str:
    """Another one when a file changed. Raises ModelFileError."""
    told = [(str(path), files_fingerprint(path, form)) for path, form in (target, draft)]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]
