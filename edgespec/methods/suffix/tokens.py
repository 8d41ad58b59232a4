"""Token arrays and limits shared by all parts of the suffix drafter."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_CONTINUATION_TOKENS", "MAX_MATCH_TOKENS", "SEPARATOR", "TokenArray"]

TokenArray: TypeAlias = NDArray[np.int32]

# Marks the boundary between two texts in an index. It is not a token id, so no match contains it.
SEPARATOR = -1
# Maximum number of tokens at the end of the chat to match with earlier text.
MAX_MATCH_TOKENS = 32
# Maximum number of tokens to draft after a match.
MAX_CONTINUATION_TOKENS = 32
