"""How drafters are to draft: options that are checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, TypeAlias

from edgespec.checks import check_boolean, check_integer, check_number
from edgespec.errors import OptionError
from edgespec.methods import parse_method

__all__ = ["Branches", "Drafting", "unread"]

Branches: TypeAlias = tuple[int, ...] | Literal["auto"]

_NO_LIMIT = (1 << 31) - 1
_MOST_BRANCHES = 64
# What an option is called when one loads, and the drafters that read it.
_READ_BY = {
    "branches": ("draft_branches", ("model", "layerskip", "lowbit")),
    "confidence": ("draft_confidence", ("model", "layerskip", "lowbit", "swift")),
    "window_tokens": ("draft_window", ("model", "lowbit")),
    "sink_tokens": ("draft_sinks", ("model", "lowbit")),
    "exit_layer": ("exit_layer", ("layerskip",)),
    "corpus": ("corpus", ("suffix",)),
    "learn": ("learn", ("model",)),
}


@dataclass(frozen=True)
class Drafting:
    """How drafters are to draft.

    methods: those that replies may ask for; what costs memory or time is made only for these.
    branches: children of a draft node at each depth, () for a chain; `auto` grows trees where they pay.
    confidence: stop drafting below this probability. window_tokens, sink_tokens: let a draft see the first
    few and the last tokens only; None lets a draft model do so beyond the length it was trained for, 0 is
    never. exit_layer: layers that draft in early exit on MLX; None measures. corpus: texts to look guesses
    up in. remember: keep replies, and what is new of their prompts, for later guesses. learn: train the
    draft between replies. max_loss: the most that a reply may lose by guessing, as a share of its time; None
    is 2 % for `auto` and no bound for drafters that are named. measure_costs: find out at load what passes
    cost where that is not known; otherwise replies do.
    room_for_copy: `auto` may take a prepared copy with fewer bits for want of a draft model; False where the
    plan found no memory for it. draft_kv_type: of the draft model's cache where the plan gave up more of it
    than of the target's; empty is as the target's.
    Raises OptionError for a wrong value, and for an option that none of these methods reads.
    """

    methods: tuple[str, ...] = ("auto",)
    branches: Branches = ()
    confidence: float = 0.0
    window_tokens: int | None = None
    sink_tokens: int = 4
    exit_layer: int | None = None
    corpus: str | None = None
    remember: bool = False
    learn: bool = False
    max_loss: float | None = None
    room_for_copy: bool = True
    draft_kv_type: str = ""
    measure_costs: bool = True

    def __post_init__(self) -> None:
        check_boolean("remember", self.remember)
        check_boolean("learn", self.learn)
        if not 0.0 <= check_number("draft_confidence", self.confidence, "from 0 to below 1") < 1.0:
            raise OptionError(f"draft_confidence is {self.confidence!r}", "give a number from 0 to below 1")
        if (
            self.max_loss is not None
            and not 0.0 <= check_number("max_loss", self.max_loss, "such as 0.02") <= 1.0
        ):
            raise OptionError(f"max_loss is {self.max_loss!r}", "give a share from 0 to 1, such as 0.02")
        check_integer("draft_sinks", self.sink_tokens, 0, _NO_LIMIT)
        if self.window_tokens is not None:
            check_integer("draft_window", self.window_tokens, 0, _NO_LIMIT)
        if self.exit_layer is not None:
            check_integer("exit_layer", self.exit_layer, 1, _NO_LIMIT)
        object.__setattr__(self, "branches", _checked(self.branches))
        self._check_read()

    def _check_read(self) -> None:
        """What nobody reads would be ignored without a word."""
        ignored = unread(self.methods)
        for field in fields(self):
            if field.name not in _READ_BY or getattr(self, field.name) == field.default:
                continue
            option, readers = _READ_BY[field.name]
            if option in ignored:
                asked = ", ".join(dict.fromkeys(self.methods))
                raise OptionError(
                    f"{option} is for {' and '.join(readers)}, and method {asked} asks for none of them",
                    f"leave it out, or add {readers[0]} to the method",
                )

    @cached_property
    def asked(self) -> frozenset[str]:
        """The drafters that were named; what `auto` takes is there without asking."""
        return frozenset(name for names in self._named for name in names)

    @property
    def together(self) -> bool:
        """Whether drafters that were named are to draft at once."""
        return any(len(names) > 1 for names in self._named)

    @property
    def most_branches(self) -> int:
        """How many leaves the target's passes must hold."""
        fixed = 1 if isinstance(self.branches, str) else math.prod(self.branches)
        return max(16 if self.branches == "auto" or "lookahead" in self.asked else 8, fixed + 1)

    @cached_property
    def _named(self) -> tuple[tuple[str, ...], ...]:
        return tuple(parse_method(method) for method in self.methods if method != "auto")


def unread(methods: Iterable[str]) -> list[str]:
    """The options of `edgespec.load` that no drafter of these methods reads. Raises OptionError."""
    drafters = {name for method in methods for name in parse_method(method)}
    return [option for option, readers in _READ_BY.values() if drafters.isdisjoint(readers)]


def _checked(branches: object) -> Branches:
    if branches == "auto":
        return "auto"
    if not isinstance(branches, tuple | list):
        raise OptionError(f"draft_branches is {branches!r}", "give auto, or numbers such as (3, 2)")
    for count in branches:
        check_integer("draft_branches", count, 1, _MOST_BRANCHES)
    if math.prod(branches) > _MOST_BRANCHES:
        raise OptionError(
            f"draft_branches {tuple(branches)!r} make {math.prod(branches)} branches",
            f"their product may be {_MOST_BRANCHES} at most",
        )
    return tuple(branches)
