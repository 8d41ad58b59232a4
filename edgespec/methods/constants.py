"""Draft lengths and widths that several drafters share.

All other constants are beside the code that uses them.
"""

from __future__ import annotations

__all__ = [
    "DEFAULT_MAX_BRANCHES",
    "DEFAULT_MAX_WIDTH",
    "FIXED_DRAFT_LENGTH",
    "MAX_DRAFT_LENGTH",
    "MAX_FORCED_TOKENS",
    "TREE_BRANCHES",
]

# Maximum draft length, in tokens, for drafters that choose the length themselves. It also limits the pass
# widths that are tested for exactness, and the draft lengths that `edgespec tune` recommends. It was chosen
# because longer drafts rarely help: even if each token is accepted with a probability of 0.9, only one
# 16-token draft in five is accepted in full.
MAX_DRAFT_LENGTH = 16
# Draft length, in tokens, for drafters that do not choose their own, chosen to be small so that a rejected
# draft costs little.
FIXED_DRAFT_LENGTH = 4
# Default maximum numbers of tokens and leaves in a verify pass. They were chosen to bound passes on targets
# that support larger ones.
DEFAULT_MAX_WIDTH, DEFAULT_MAX_BRANCHES = 64, 8
# Minimum number of leaves that a target must be able to verify for methods that draft trees. The number was
# chosen as twice `DEFAULT_MAX_BRANCHES`.
TREE_BRANCHES = 16
# Maximum number of consecutive constraint-determined tokens to draft. The number was chosen to match the
# maximum draft length of other drafters.
MAX_FORCED_TOKENS = 16
