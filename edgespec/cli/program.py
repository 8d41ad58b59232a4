"""The `edgespec` program, which finds and runs commands and sets the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NoReturn

import click

from edgespec import __version__
from edgespec.cli.failures import DONE, FAILED, INTERRUPTED, describe, error_json, exit_status
from edgespec.cli.help import COMMANDS, HelpfulGroup, load_command
from edgespec.cli.screen import print_json, printable
from edgespec.errors import EdgespecError
from edgespec.system.stdio import use_utf8

__all__ = ["ALIASES", "OLLAMA_COMMANDS", "Program", "program"]

# Aliases of commands. `run` is Ollama's name for its chat.
ALIASES = {"run": "chat"}

# Maps Ollama's commands to the edgespec commands to suggest instead. MODEL is replaced by the next argument.
OLLAMA_COMMANDS = {
    "list": "models list",
    "ls": "models list",
    "pull": "models pull MODEL",
    "show": "models show MODEL",
    "rm": "models remove MODEL",
    "cp": "models alias",
    "help": "--help",
}
# Maps Ollama commands without an edgespec equivalent to the hint to show for them.
_MISSING_COMMANDS = dict.fromkeys(
    ("ps", "stop"), "the server unloads unused models, and lists the loaded ones at /api/ps"
)


class Program(HelpfulGroup):
    """The top-level command group. Commands are imported lazily, so that edgespec starts quickly."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name == "run" and (answering := _answering_command(ctx, args[1:])) is not None:
            return name, answering, args[1:]
        _, command, rest = super().resolve_command(ctx, [ALIASES.get(name, name), *args[1:]])
        # Return the name that the user typed, such as `run`, so that the help shows it.
        return name, command, rest

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        return load_command(name)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the command line. For `--help` and `--version`, print the output and exit."""
        try:
            return super().make_context(*args, **extra)
        except BrokenPipeError:
            raise click.exceptions.Exit(_reader_left()) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A reader that closes the output pipe early, such as `head`, is not an error."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return _reader_left()
        except EdgespecError as error:
            if not ctx.meta:
                raise
            from edgespec.cli.settings import with_setting_source

            raise with_setting_source(error, ctx) from error

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run a command and exit with 0 (success), 1 (failure), 2 (usage error) or 130 (interrupted).

        Errors are reported on stderr. With `--json`, they are also printed to stdout, as JSON.
        """
        if sys.stdout is None:
            # stdout was already closed when the program started, so report the error on stderr.
            if sys.stderr is not None:
                sys.stderr.write("error: cannot write output because stdout is closed\n")
            sys.exit(FAILED)
        given = extra.get("args", sys.argv[1:])
        use_utf8(sys.stdout)
        if sys.stderr is None:
            # stderr was already closed when the program started, so discard anything written to it.
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        use_utf8(sys.stderr)
        extra |= {"prog_name": "edgespec", "standalone_mode": False}
        try:
            status = super().main(*args, **extra)
            sys.stdout.flush()
        except BrokenPipeError:
            status = _reader_left()
        except (click.Abort, KeyboardInterrupt) as error:
            _report("interrupted", error, given)
            sys.exit(INTERRUPTED)
        except Exception as error:
            _report(printable(describe(error)), error, given)
            sys.exit(exit_status(error))
        sys.exit(status if isinstance(status, int) else DONE)


def _answering_command(ctx: click.Context, args: Sequence[str]) -> click.Command | None:
    """Return the command for `edgespec run MODEL PROMPT`, which prints one reply as in Ollama.

    Args:
        ctx: The context of the program.
        args: The arguments after `run`.

    Returns:
        The command, or None if there is no prompt or an option belongs to the chat only. `run` then opens a
        chat.
    """
    if len([each for each in args if each == "-" or not each.startswith("-")]) < 2:
        return None
    from edgespec.cli.generate import with_model_argument

    command = with_model_argument()
    try:
        # The program itself parses no options after the name of a command.
        given, _, _ = command.make_parser(click.Context(command, ctx)).parse_args(list(args))
    except click.UsageError:
        return None
    return command if given.get("words") else None


def _report(line: str, error: BaseException, args: Sequence[str]) -> None:
    with suppress(BrokenPipeError):
        click.echo(line, err=True)
    # Search the raw arguments, because an error in an earlier argument can prevent `--json` from being
    # parsed.
    if "--json" in takewhile(lambda each: each != "--", args):
        with suppress(OSError):
            print_json(error_json(error))


def _reader_left() -> int:
    """Redirect output to the null device after the reader has closed the pipe. Return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE


@click.group(
    cls=Program,
    # `run` is not in the list of commands, because it is another name for `chat`.
    foreign_commands={**OLLAMA_COMMANDS, "run": "run MODEL"},
    missing_commands=_MISSING_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    examples=(
        "edgespec chat",
        "edgespec chat 8b-q4",
        'edgespec generate "How do I list files by size?"',
        "edgespec recommend",
        "edgespec models list",
    ),
)
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
def program() -> None:
    """Run large language models faster on this machine, without changing their replies.

    A small draft model proposes the next tokens, and your model checks several of them at once, keeping only
    those it would have written itself. You can also use models that you downloaded with Ollama or LM Studio.
    If you name no model, the chat opens the models that you used last. Other commands then use SmolLM2, a
    small model that `scripts/setup` installs, or a tiny demo model if that is missing.
    """
