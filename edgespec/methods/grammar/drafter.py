"""Draft the tokens that a constraint determines, such as property names in JSON."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.methods.base import Drafter
from edgespec.methods.constants import MAX_FORCED_TOKENS

__all__ = ["GrammarDrafter"]


class GrammarDrafter(Drafter):
    """Drafts while the reply's schema, regular expression or grammar leaves the model no choice.

    The target accepts nearly all of these tokens, so they are not limited by the draft length. Without a
    constraint, nothing is drafted.
    """

    name = "grammar"
    is_lookup = True

    def __init__(self) -> None:
        self._last_token = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._last_token = tokens[-1]

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        return TokenTree.chain(self._last_token, sampler.forced_tokens(MAX_FORCED_TOKENS))

    def commit(self, tokens: tuple[int, ...]) -> None:
        if tokens:
            self._last_token = tokens[-1]
