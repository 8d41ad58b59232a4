"""Drafting options, derived from the arguments of `load` and the memory plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from edgespec.method_names import parse_method
from edgespec.options import LoadArguments, check_load_arguments

__all__ = ["DraftingOptions"]

# Maximum number of leaves in a verify pass's token tree, by default and for methods that branch.
_DEFAULT_BRANCHES, _TREE_BRANCHES = 8, 16


@dataclass(frozen=True)
class DraftingOptions:
    """Drafting options for loading one target.

    Attributes:
        arguments: The checked arguments of `load`.
        window_tokens: Number of most recent tokens that the draft model sees. 0 means all tokens. None uses
            a window only for sequences longer than its trained context. The planner can shrink the window.
        has_room_for_copy: Whether `auto` can draft with a prepared low-bit copy. False if the plan leaves no
            memory for one.
        draft_kv_type: Number format of the draft model's KV cache. Empty means the target's format.
    """

    arguments: LoadArguments
    window_tokens: int | None = None
    has_room_for_copy: bool = True
    draft_kv_type: str = ""

    @classmethod
    def of(cls, **given: object) -> DraftingOptions:
        """Create options from arguments of `load`, with defaults for those not given.

        Raises:
            OptionError: An argument is invalid.
        """
        arguments = check_load_arguments(given)
        return cls(arguments, arguments["draft_window"])

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that replies can use. Expensive drafters are created only for these."""
        return (self.arguments["method"], *self.arguments["methods"])

    @cached_property
    def named_drafters(self) -> frozenset[str]:
        """The drafters named by a method. `auto` names none, because it uses whichever are available."""
        return frozenset(name for names in self._named for name in names)

    @property
    def combines_drafters(self) -> bool:
        """Whether any method merges the drafts of several drafters."""
        return any(len(names) > 1 for names in self._named)

    @property
    def max_branches(self) -> int:
        """Number of token tree leaves that the target's verify passes must support."""
        branches = self.arguments["draft_branches"]
        leaves = 1 if isinstance(branches, str) else math.prod(branches)
        grows_trees = branches == "auto" or "lookahead" in self.named_drafters
        return max(_TREE_BRANCHES if grows_trees else _DEFAULT_BRANCHES, leaves + 1)

    @cached_property
    def _named(self) -> tuple[tuple[str, ...], ...]:
        return tuple(parse_method(method) for method in self.methods if method != "auto")
