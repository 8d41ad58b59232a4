"""Options shared by `bench`, `verify` and `tune`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from edgespec.cli.options import KindType
from edgespec.errors import OptionError
from edgespec.option_kinds import Integer, ListOf, MethodName, Number
from edgespec.options import MAX_DRAFT_LENGTH

__all__ = [
    "draft_lengths_option",
    "max_tokens_option",
    "methods_option",
    "prompts_option",
    "reject_remember",
    "seed_option",
    "temperatures_option",
]

_MAX_SEED = (1 << 63) - 1
_shown = partial(click.option, show_default=True)

methods_option = partial(click.option, "--methods", type=KindType(ListOf(MethodName())), metavar="A,B")
prompts_option = partial(click.option, "--prompts", type=click.Path(path_type=Path), metavar="FILE")
temperatures_option = partial(
    _shown, "--temperatures", type=KindType(ListOf(Number(0.0, 100.0))), metavar="T,T"
)
draft_lengths_option = partial(
    _shown, "--draft-lengths", type=KindType(ListOf(Integer(1, MAX_DRAFT_LENGTH))), metavar="K,K"
)
max_tokens_option = partial(_shown, "-n", "--max-tokens", type=KindType(Integer(1)), metavar="N")
# The default seed is fixed, so that measurements are reproducible.
seed_option = partial(_shown, "--seed", type=KindType(Integer(0, _MAX_SEED)), metavar="N", default=1)


def reject_remember(options: dict[str, Any]) -> None:
    """Raise OptionError if `--remember` is given on the command line."""
    if options["remember"]:
        raise OptionError(
            "--remember cannot be used for measurements, because the suffix method would draft from earlier"
            " replies to the same prompts",
            "remove --remember",
        )
