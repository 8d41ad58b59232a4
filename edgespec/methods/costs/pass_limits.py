"""Limits on the size of a verify pass, and on the number of draft model passes before it."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.methods.constants import DEFAULT_MAX_BRANCHES, DEFAULT_MAX_WIDTH
from edgespec.model.model_facts import Capabilities

__all__ = ["PassLimits"]


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Maximum size of the token tree in a verify pass, and of the draft model passes to build it.

    Attributes:
        max_width: The maximum number of tokens in the tree, including the root token.
        max_branches: The maximum number of leaves in the tree. With 1, the tree must be a chain.
        max_draft_passes: The number of tree levels that take one draft model pass each. Deeper levels need no
            further passes.
    """

    max_width: int = DEFAULT_MAX_WIDTH
    max_branches: int = DEFAULT_MAX_BRANCHES
    max_draft_passes: int = 1 << 20

    @property
    def can_branch(self) -> bool:
        """Whether the tree can have branches."""
        return self.max_branches > 1

    @classmethod
    def of(cls, target: Capabilities, draft: Capabilities | None = None) -> PassLimits:
        """Return the limits that the target and the draft model, if any, both support."""
        models = [target, draft] if draft else [target]
        can_branch = all(model.tree for model in models)
        return cls(
            min(model.max_width for model in models),
            min(model.max_branches for model in models) if can_branch else 1,
            1 if draft and draft.drafts_in_one_pass else 1 << 20,
        )
