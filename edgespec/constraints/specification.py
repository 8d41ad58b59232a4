"""The constraint that a reply's options set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from edgespec.errors import OptionError
from edgespec.options.reply_options import CONSTRAINT_NAMES

__all__ = ["Constraint", "constraint_from"]


class Constraint(NamedTuple):
    """A constraint on a reply: the name of the option that sets it, and the option's validated value."""

    option: str
    value: Any


def constraint_from(values: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint set by a reply's options, or None.

    Raises:
        OptionError: Several options set a constraint.
    """
    given = [Constraint(name, values[name]) for name in CONSTRAINT_NAMES if values[name] not in (None, ())]
    if len(given) > 1:
        names = " and ".join(constraint.option for constraint in given)
        raise OptionError(
            f"{names} cannot be used together", "choose one of them for each reply", code="option_conflict"
        )
    return given[0] if given else None
