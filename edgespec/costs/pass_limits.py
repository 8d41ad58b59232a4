"""Size limits of a verify pass."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.base import Capabilities

__all__ = ["PassLimits"]


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Size limits of the token tree in a verify pass.

    Attributes:
        max_width: Tokens of the tree, with its root.
        max_branches: Leaves of the tree; 1 for chains only.
    """

    max_width: int = 64
    max_branches: int = 8

    @classmethod
    def of(cls, target: Capabilities, draft: Capabilities | None = None) -> PassLimits:
        """Return the limits that a target, and a draft model if given, can both handle."""
        models = [target, draft] if draft else [target]
        can_branch = all(model.tree for model in models)
        return cls(
            min(model.max_width for model in models),
            min(model.max_branches for model in models) if can_branch else 1,
        )
