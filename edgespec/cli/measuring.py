"""The options of commands that try methods on prompts, declared once; what each says of them is its own."""

from __future__ import annotations

from pathlib import Path

import click

from edgespec.cli.options import MAX_SEED, Decorator, listed, whole

__all__ = [
    "draft_lengths_option",
    "max_tokens_option",
    "methods_option",
    "prompts_option",
    "seed_option",
    "temperatures_option",
]


def methods_option(explained: str) -> Decorator:
    """Which methods; None where none is named."""
    return click.option("--methods", type=listed(str), metavar="A,B", help=explained)


def prompts_option(explained: str) -> Decorator:
    """A file of prompts; see `sameness.read_prompts`."""
    return click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help=explained)


def temperatures_option(usual: str, explained: str) -> Decorator:
    """At which temperatures, one after another."""
    return click.option(
        "--temperatures",
        type=listed(float),
        metavar="T,T",
        default=usual,
        show_default=True,
        help=explained,
    )


def draft_lengths_option(usual: str | None, explained: str) -> Decorator:
    """At which draft lengths, one after another; None leaves them to each method."""
    return click.option(
        "--draft-lengths",
        type=listed(whole(1, 64)),
        metavar="K,K",
        default=usual,
        show_default=True,
        help=explained,
    )


def max_tokens_option(usual: int, explained: str = "The longest reply, in tokens.") -> Decorator:
    """How long replies may get."""
    return click.option(
        "-n", "--max-tokens", type=whole(1), metavar="N", default=usual, show_default=True, help=explained
    )


def seed_option(explained: str) -> Decorator:
    """A seed that is the same each time: what is measured can be measured again."""
    return click.option(
        "--seed", type=whole(0, MAX_SEED), metavar="N", default=1, show_default=True, help=explained
    )
