"""How large a draft may be."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.base import Capabilities

__all__ = ["PassLimits"]


@dataclass(frozen=True, slots=True)
class PassLimits:
    """What a pass takes: rows, and leaves of a tree."""

    max_width: int = 64
    max_branches: int = 8

    @classmethod
    def of(cls, target: Capabilities, draft: Capabilities) -> PassLimits:
        """What both the target and the draft model take."""
        trees = target.tree and draft.tree
        return cls(
            min(target.max_width, draft.max_width),
            min(target.max_branches, draft.max_branches) if trees else 1,
        )
