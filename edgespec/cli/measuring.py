"""Define the command line options that `bench`, `verify` and `tune` share."""

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


def methods_option(help_text: str) -> Decorator:
    """Return the option `--methods`. Its default is None."""
    return click.option("--methods", type=listed(str), metavar="A,B", help=help_text)


def prompts_option(help_text: str) -> Decorator:
    """Return the option `--prompts`, a file for `losslessness.read_prompts`."""
    return click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help=help_text)


def temperatures_option(default: str, help_text: str) -> Decorator:
    """Return the option `--temperatures`, a list of numbers."""
    return click.option(
        "--temperatures",
        type=listed(float),
        metavar="T,T",
        default=default,
        show_default=True,
        help=help_text,
    )


def draft_lengths_option(default: str | None, help_text: str) -> Decorator:
    """Return the option `--draft-lengths`. If its default is None, each method chooses its own length."""
    return click.option(
        "--draft-lengths",
        type=listed(whole(1, 64)),
        metavar="K,K",
        default=default,
        show_default=True,
        help=help_text,
    )


def max_tokens_option(default: int, help_text: str = "Maximum reply length in tokens.") -> Decorator:
    """Return the option `--max-tokens`."""
    return click.option(
        "-n", "--max-tokens", type=whole(1), metavar="N", default=default, show_default=True, help=help_text
    )


def seed_option(help_text: str) -> Decorator:
    """Return the option `--seed`. Its default is fixed, so that measurements are reproducible."""
    return click.option(
        "--seed", type=whole(0, MAX_SEED), metavar="N", default=1, show_default=True, help=help_text
    )
