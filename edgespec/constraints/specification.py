"""The constraint that the options of a reply describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from edgespec.errors import OptionError

__all__ = ["CONSTRAINT_OPTIONS", "Constraint", "constraint_from"]

CONSTRAINT_OPTIONS = ("schema", "regex", "grammar", "choice")


class Constraint(NamedTuple):
    """A constraint on a reply, with the name and the checked value of the option that describes it."""

    option: str
    value: Any


def constraint_from(values: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint that the options `CONSTRAINT_OPTIONS` of a reply describe, or None.

    Raises:
        OptionError: They describe several constraints.
    """
    given = [Constraint(name, value) for name, value in values.items() if value not in (None, ())]
    if len(given) > 1:
        names = " and ".join(constraint.option for constraint in given)
        raise OptionError(f"{names} cannot be used together", "choose one of them for each reply")
    return given[0] if given else None
