"""Token arrays and limits that all parts of the suffix drafter share."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_CONTINUATION_TOKENS", "MAX_MATCH_TOKENS", "SEPARATOR", "TokenArray"]

TokenArray: TypeAlias = NDArray[np.int32]

# Separates texts in an index. No token has this id, so matches and continuations never cross a separator.
SEPARATOR = -1
# Maximum length of a match, in tokens.
MAX_MATCH_TOKENS = 32
# Maximum length of the continuation to draft after a match, in tokens.
MAX_CONTINUATION_TOKENS = 32
