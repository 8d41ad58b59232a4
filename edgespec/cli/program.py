"""The program: its commands, found when asked for, and what every way of ending looks like."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import click

from edgespec import __version__
from edgespec.cli.failures import DONE, INTERRUPTED, describe, exit_status
from edgespec.cli.help import HelpfulGroup
from edgespec.cli.screen import printable
from edgespec.errors import EdgespecError

__all__ = ["COMMANDS", "Program", "program"]

COMMANDS = (
    "chat",
    "generate",
    "plan",
    "verify",
    "tune",
    "bench",
    "prepare",
    "doctor",
    "models",
    "config",
    "delete-data",
    "completion",
)


class Program(HelpfulGroup):
    """Imports a command's file when the command is used, so that starting stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The commands, most used first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        """The command of that name, or None."""
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f"edgespec.cli.{name.replace('-', '_')}").command
        return command

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Read the command line; --help and --version print and end here."""
        try:
            return super().make_context(*args, **extra)
        except BrokenPipeError:
            raise click.exceptions.Exit(_reader_left()) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A reader that leaves early (`| head -1`) has got what it wanted."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return _reader_left()
        except EdgespecError as error:
            if not ctx.meta:
                raise
            from edgespec.cli.settings import traced

            raise traced(error, ctx) from error

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run one command and end the process with the exit status of the contract."""
        if sys.stdout is None:
            # Started with it closed: what is printed goes where the person sent it, nowhere.
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        with suppress(AttributeError):
            # A character the terminal does not have must not end a reply.
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
            sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
        extra |= {"prog_name": "edgespec", "standalone_mode": False}
        try:
            status = super().main(*args, **extra)
            sys.stdout.flush()
        except BrokenPipeError:
            status = _reader_left()
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)
        except Exception as error:
            with suppress(BrokenPipeError):
                click.echo(printable(describe(error)), err=True)
            sys.exit(exit_status(error))
        sys.exit(status if isinstance(status, int) else DONE)


def _reader_left() -> int:
    """Send what is still buffered nowhere, so that nothing complains about it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    examples=(
        "edgespec chat",
        "edgespec chat --target 8b-q4",
        'edgespec generate "How do I list files by size?"',
        "edgespec models list",
    ),
)
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
def program() -> None:
    """Talk to the largest language model this machine can hold, faster, and in its very own words.

    A small draft model guesses ahead and the target model checks the guesses in one pass. The reply is
    token for token what the target would have written alone. Without --target a small embedded demo runs.
    """
