"""Save the measured acceptance rates of model pairs across runs.

Only token counts are saved, keyed by a hash of both models' files. No prompts or replies are saved.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from edgespec.errors import ModelFileError
from edgespec.store.catalogue import ModelFormat
from edgespec.store.constants import MAX_DRAFTED, MIN_DRAFTED, SAVE_EVERY_DRAFTED
from edgespec.store.metadata_cache import files_fingerprint
from edgespec.system.facts import Facts

__all__ = ["AcceptanceRecorder", "LocalModel", "add_acceptance", "measured_acceptance_rate"]

_KIND = "acceptance"

LocalModel: TypeAlias = tuple[Path, ModelFormat]


def measured_acceptance_rate(target: LocalModel, draft: LocalModel) -> float | None:
    """Return a model pair's acceptance rate from 0 to 1, or None if too few tokens were drafted."""
    try:
        drafted, accepted = _counts(_key(target, draft))
    except ModelFileError:
        return None
    return accepted / drafted if drafted >= MIN_DRAFTED else None


def add_acceptance(target: LocalModel, draft: LocalModel, drafted: int, accepted: int) -> None:
    """Add one reply's drafted and accepted token counts to a model pair's saved counts.

    Raises:
        ModelFileError: A model file no longer exists.
    """
    key = _key(target, draft)
    before = _counts(key)
    drafted, accepted = before[0] + drafted, before[1] + accepted
    if drafted > MAX_DRAFTED:
        drafted, accepted = drafted // 2, accepted // 2
    Facts().put(_KIND, {key: [drafted, accepted]})


def _counts(key: str) -> tuple[int, int]:
    """Return the saved numbers of drafted and accepted tokens."""
    match Facts().get(_KIND, key):
        case [int(drafted), int(accepted)] if 0 <= accepted <= drafted:
            return drafted, accepted
    return 0, 0


class AcceptanceRecorder:
    """Counts and saves a loaded model pair's drafted and accepted tokens. Never raises.

    Only the first token of each draft is counted, because the acceptance of later tokens depends on the draft
    length.
    """

    def __init__(self, target: LocalModel, draft: LocalModel) -> None:
        self._pair = target, draft
        self._drafted = self._accepted = 0

    def count(self, drafted: int, accepted: int) -> None:
        """Add the number of drafts in a reply, and how many had their first token accepted."""
        self._drafted, self._accepted = self._drafted + drafted, self._accepted + accepted
        if self._drafted >= SAVE_EVERY_DRAFTED:
            self.save()

    def save(self) -> None:
        """Save the token counts collected since the last save."""
        if self._drafted:
            with suppress(ModelFileError):
                add_acceptance(*self._pair, self._drafted, self._accepted)
        self._drafted = self._accepted = 0


def _key(target: LocalModel, draft: LocalModel) -> str:
    """Return a hash that changes when a file of either model changes. Raises ModelFileError."""
    fingerprints = [(str(path), files_fingerprint(path, form)) for path, form in (target, draft)]
    return hashlib.sha256(repr(fingerprints).encode()).hexdigest()[:32]
