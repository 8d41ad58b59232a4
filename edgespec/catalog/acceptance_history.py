"""Save the measured acceptance rates of model pairs across runs.

The file stores token counts, keyed by a hash of both models' files. It contains no prompts or replies.
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

__all__ = ["AcceptanceHistory", "AcceptanceRecorder", "LocalModel"]

_VERSION = 1
# Limits on the number of model pairs in the history file and on its size. Real files are far smaller.
_MAX_PAIRS, _MAX_FILE_BYTES = 500, 2**20
# Minimum number of drafted tokens for a usable acceptance rate. At 200, its standard error is about 0.03.
_MIN_DRAFTED = 200
# Counts of drafted tokens are halved above this number, so that recent replies have more weight.
_MAX_DRAFTED = 20_000
# Save the acceptance counts to disk after this many drafted tokens.
_SAVE_EVERY_DRAFTED = 2_000

Counts: TypeAlias = tuple[int, int]
"""(drafted tokens, accepted tokens)."""
LocalModel: TypeAlias = tuple[Path, ModelFormat]


class AcceptanceHistory:
    """Stores drafted and accepted tokens per model pair. Ignores a missing, damaged or read-only file."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or data_folder() / "learnt" / "acceptances.json"

    def rate(self, target: LocalModel, draft: LocalModel) -> float | None:
        """Return a model pair's acceptance rate from 0 to 1, or None if too few tokens were drafted."""
        try:
            drafted, accepted = self._read().get(_key(target, draft), (0, 0))
        except ModelFileError:
            return None
        return accepted / drafted if drafted >= _MIN_DRAFTED else None

    def add(self, target: LocalModel, draft: LocalModel, drafted: int, accepted: int) -> None:
        """Add the token counts of one reply, and save them if the file is writable.

        Raises:
            ModelFileError: A model file no longer exists.
        """
        pairs, key = self._read(), _key(target, draft)
        before = pairs.pop(key, (0, 0))
        counts = before[0] + drafted, before[1] + accepted
        pairs[key] = counts if counts[0] <= _MAX_DRAFTED else (counts[0] // 2, counts[1] // 2)
        value = {"version": _VERSION, "pairs": dict(list(pairs.items())[-_MAX_PAIRS:])}
        with suppress(OSError):
            make_private_folder(self._path.parent)
            write_private_file(self._path, json.dumps(value).encode())

    def _read(self) -> dict[str, Counts]:
        try:
            if regular_file_bytes(self._path) > _MAX_FILE_BYTES:
                return {}
            value = json.loads(read_regular_file(self._path))
            if value["version"] != _VERSION:
                return {}
            pairs = {str(key): (int(one[0]), int(one[1])) for key, one in value["pairs"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return {}
        return {
            key: (drafted, accepted) for key, (drafted, accepted) in pairs.items() if 0 <= accepted <= drafted
        }


class AcceptanceRecorder:
    """Counts a loaded model pair's drafted and accepted tokens and saves the counts. Never raises.

    Counts only the first token of each draft, because the acceptance of later tokens depends on the draft
    length.
    """

    def __init__(
        self, target: LocalModel, draft: LocalModel, history: AcceptanceHistory | None = None
    ) -> None:
        self._pair = target, draft
        self._history = history or AcceptanceHistory()
        self._drafted = self._accepted = 0

    def count(self, drafted: int, accepted: int) -> None:
        """Add a reply's number of drafts, and the number of drafts whose first token was accepted."""
        self._drafted, self._accepted = self._drafted + drafted, self._accepted + accepted
        if self._drafted >= _SAVE_EVERY_DRAFTED:
            self.save()

    def save(self) -> None:
        """Save the token counts collected since the last save."""
        if self._drafted:
            with suppress(ModelFileError):
                self._history.add(*self._pair, self._drafted, self._accepted)
        self._drafted = self._accepted = 0


def _key(target: LocalModel, draft: LocalModel) -> str:
    """Return a hash that changes when a file of either model changes. Raises ModelFileError."""
    fingerprints = [(str(path), files_fingerprint(path, form)) for path, form in (target, draft)]
    return hashlib.sha256(repr(fingerprints).encode()).hexdigest()[:32]
