"""Which vocabulary tokens are of."""

from __future__ import annotations

import hashlib

from edgespec.backends.base import Vocabulary

__all__ = ["vocabulary_fingerprint"]


def vocabulary_fingerprint(vocabulary: Vocabulary) -> str:
    """A hash of all tokens in their order, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for token in range(vocabulary.size):
        piece = vocabulary.raw_piece(token)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()
