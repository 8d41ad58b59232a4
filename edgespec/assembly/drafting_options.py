"""How drafters are to draft: the arguments of `load`, and what the memory plan decided about them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from edgespec.method_names import parse_method
from edgespec.options import LoadArguments, check_load_arguments

__all__ = ["DraftingOptions"]

# Leaves of a token tree that a verify pass of the target takes: by default, and for methods that branch.
_DEFAULT_BRANCHES, _TREE_BRANCHES = 8, 16


@dataclass(frozen=True)
class DraftingOptions:
    """The drafting options of one load.

    Attributes:
        arguments: The checked arguments of `load`.
        window_tokens: Last tokens that the draft sees; 0 for the whole text, None to see only a window of
            texts longer than the draft model was trained for. The planner may shorten it.
        has_room_for_copy: Whether `auto` may draft with a prepared low-bit copy. False if the plan found no
            memory for one.
        draft_kv_type: Number format of the draft model's KV cache; empty for the target's.
    """

    arguments: LoadArguments
    window_tokens: int | None = None
    has_room_for_copy: bool = True
    draft_kv_type: str = ""

    @classmethod
    def of(cls, **given: object) -> DraftingOptions:
        """Return the options for some arguments of `load`, with defaults for the others.

        Raises:
            OptionError: An argument is wrong.
        """
        arguments = check_load_arguments(given)
        return cls(arguments, arguments["draft_window"])

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that replies may use. Costly drafters are made for these only."""
        return (self.arguments["method"], *self.arguments["methods"])

    @cached_property
    def named_drafters(self) -> frozenset[str]:
        """The drafters that a method names. `auto` names none: it uses what is there."""
        return frozenset(name for names in self._named for name in names)

    @property
    def combines_drafters(self) -> bool:
        """Whether a method names several drafters, whose drafts are then merged."""
        return any(len(names) > 1 for names in self._named)

    @property
    def max_branches(self) -> int:
        """How many leaves the target's verify passes must take."""
        branches = self.arguments["draft_branches"]
        leaves = 1 if isinstance(branches, str) else math.prod(branches)
        grows_trees = branches == "auto" or "lookahead" in self.named_drafters
        return max(_TREE_BRANCHES if grows_trees else _DEFAULT_BRANCHES, leaves + 1)

    @cached_property
    def _named(self) -> tuple[tuple[str, ...], ...]:
        return tuple(parse_method(method) for method in self.methods if method != "auto")
