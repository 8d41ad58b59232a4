"""Command names, and help output with examples and titled option groups.

Each command's module is imported on first use. Errors about unknown commands suggest the nearest names.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import click

from edgespec.cli.failures import WRONG_USAGE, usage_error
from edgespec.system.spelling import nearest

__all__ = [
    "BEFORE_RUN",
    "COMMANDS",
    "HelpfulCommand",
    "HelpfulGroup",
    "SectionOption",
    "load_command",
]


# The names of all commands, in the order in which the help lists them.
COMMANDS = (
    "chat",
    "generate",
    "serve",
    "launch",
    "worker",
    "recommend",
    "plan",
    "verify",
    "tune",
    "race",
    "bench",
    "prepare",
    "train",
    "doctor",
    "models",
    "chats",
    "config",
    "delete-data",
    "completion",
)


def load_command(name: str) -> click.Command | None:
    """Import and return the command with this name, or None if there is none."""
    if name not in COMMANDS:
        return None
    command: click.Command = import_module(f"edgespec.cli.{name.replace('-', '_')}").command
    return command


BEFORE_RUN = "edgespec.cli.before_run"
"""Key in `ctx.meta` for a function to call with the context before the command runs."""


class SectionOption(click.Option):
    """An option that belongs to a titled group in the help."""

    def __init__(self, *args: Any, section: str = "Options", **settings: Any) -> None:
        self.section = section
        super().__init__(*args, **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's row in the help. Flags are shown as `--[no-]name`."""
        record = super().get_help_record(ctx)
        return (f"--[no-]{self.opts[0][2:]}", record[1]) if record and self.secondary_opts else record


class _Helpful(click.Command):
    """A command whose help shows `examples`, one shell command per line, before the options."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        self.examples = tuple(examples)
        super().__init__(*args, **settings)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    # Do not wrap examples, so that they can be copied.
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                heading = parameter.section if isinstance(parameter, SectionOption) else "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class HelpfulCommand(_Helpful):
    """A command with examples and titled groups of options in its help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. For an unexpected argument, raise an error that suggests `--target`."""
        if not any(each.name == "target" and isinstance(each, click.Option) for each in self.params):
            return super().parse_args(ctx, args)
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            word = shlex.quote(rest[0])
            hint = f"to choose a model, use --target {word}"
            if named := ctx.params.get("model"):
                # The user is probably used to `ollama run MODEL PROMPT`.
                hint = f"to get one reply, use: edgespec generate --target {shlex.quote(named)} {word}"
            raise usage_error(f"unexpected argument {word}", hint, ctx)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Call the function stored under `BEFORE_RUN`, if any, and then run the command."""
        if before_run := ctx.meta.get(BEFORE_RUN):
            before_run(ctx)
        return super().invoke(ctx)


class HelpfulGroup(_Helpful, click.Group):
    """A group of commands. Its help shows examples, and lists commands before options.

    Args:
        foreign_commands: Maps other programs' commands to the edgespec commands to suggest instead. MODEL is
            replaced by the next argument.
        missing_commands: Maps other programs' commands without an edgespec equivalent to the hint to show for
            them.
    """

    command_class = HelpfulCommand

    def __init__(
        self,
        *args: Any,
        foreign_commands: Mapping[str, str] | None = None,
        missing_commands: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, no_args_is_help=False, **settings)
        self._foreign_commands, self._missing_commands = foreign_commands or {}, missing_commands or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments. If the subcommand is missing, show the help and exit with status 2."""
        if not args and not ctx.resilient_parsing and not self.invoke_without_command:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(WRONG_USAGE)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand. For an unknown name, raise an error that suggests the nearest one."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            near = nearest(name, dict.fromkeys([*known, *self._foreign_commands]))
            if name in self._missing_commands:
                hint = self._missing_commands[name]
            elif near:
                model = shlex.quote(args[1]) if args[1:] and not args[1].startswith("-") else "MODEL"
                meant = self._foreign_commands.get(near[0], near[0])
                hint = f"did you mean '{meant.replace('MODEL', model)}'?"
            else:
                hint = f"available commands: {', '.join(known)}"
            raise usage_error(f"no such command {name!r}", hint, ctx)
        return super().resolve_command(ctx, args)
