"""Token arrays and limits shared by all parts of the suffix drafter."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["SEPARATOR", "TokenArray"]

TokenArray: TypeAlias = NDArray[np.int32]

# Marks the boundary between two texts in an index. It is not a token id, so no match contains it.
SEPARATOR = -1
