"""Drafting options, derived from the arguments of `load` and the memory plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from edgespec.errors import OptionError
from edgespec.methods.constants import DEFAULT_MAX_BRANCHES, TREE_BRANCHES
from edgespec.options.methods import head_names, method, parse_method
from edgespec.options.settings import LoadArguments, check_load_arguments


@dataclass(frozen=True)
class DraftingOptions:
    """Drafting options for loading one target.

    Attributes:
        arguments: The checked arguments of `load`.
        window_tokens: Number of most recent tokens that the draft model attends to, or 0 for all. If None,
            the limit is the context length that the draft model was trained for.
        has_room_for_copy: Whether the memory plan leaves room for a low-bit copy of the target for `auto` to
            draft with.
        substitutes: File of the low-bit copies that the memory plan includes of the blocks that the target
            streams. None if there are none.
        draft_kv_type: Data type of the draft model's KV cache. Empty means the target's data type.
    """

    arguments: LoadArguments
    window_tokens: int | None = None
    has_room_for_copy: bool = True
    substitutes: Path | None = None
    draft_kv_type: str = ""

    @classmethod
    def of(cls, **given: object) -> DraftingOptions:
        """Create drafting options from `load` arguments, with defaults for those not given.

        Raises:
            OptionError: An argument is invalid.
        """
        arguments = check_load_arguments(given)
        if arguments["exact"]:
            if arguments["exactness"] == "off":
                raise OptionError(
                    "--exact contradicts --exactness off",
                    "omit one of them",
                    option="exactness",
                    code="option_conflict",
                )
            arguments["exactness"] = "bits"
        return cls(arguments, arguments["draft_window"])

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the drafting methods that replies can use."""
        return (self.arguments["method"], *self.arguments["methods"])

    @cached_property
    def named_drafters(self) -> frozenset[str]:
        """Names of the drafters that the user selected explicitly, excluding those that `auto` chooses."""
        return frozenset(name for names in self._named for name in names)

    @property
    def head(self) -> str:
        """Reference to a head, `auto` to look for heads, or `none`."""
        return str(self.arguments["head"])

    @property
    def names_head(self) -> bool:
        """Whether the user named a head, or a method that needs one."""
        return self.head not in ("auto", "none") or not self.named_drafters.isdisjoint(head_names())

    @property
    def needs_draft_model(self) -> bool:
        """Whether the user named a method that needs a draft model."""
        return any(method(name).needs == "draft model" for name in self.named_drafters)

    @property
    def names_copy(self) -> bool:
        """Whether the user named a method that drafts with a copy of the target."""
        return any(method(name).needs == "copy" for name in self.named_drafters)

    @property
    def combines_drafters(self) -> bool:
        """Whether any selected method combines several drafters, such as `model+suffix`."""
        return any(len(names) > 1 for names in self._named)

    @property
    def max_branches(self) -> int:
        """Number of draft branches that the target must be able to verify in one pass."""
        branches = self.arguments["draft_branches"]
        leaves = 1 if isinstance(branches, str) else math.prod(branches)
        grows_trees = branches == "auto" or any(method(name).drafts_trees for name in self.named_drafters)
        return max(TREE_BRANCHES if grows_trees else DEFAULT_MAX_BRANCHES, leaves + 1)

    @cached_property
    def _named(self) -> tuple[tuple[str, ...], ...]:
        return tuple(parse_method(method) for method in self.methods if method != "auto")
