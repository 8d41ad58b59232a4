"""Help texts: what it does, examples, then the options in sections; a wrong command gets the nearest one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import click

from edgespec.cli.failures import WRONG_USAGE

__all__ = ["HelpfulCommand", "HelpfulGroup", "SectionOption"]


class SectionOption(click.Option):
    """An option that knows under which heading the help shows it."""

    def __init__(self, *args: Any, section: str = "Options", **settings: Any) -> None:
        self.section = section
        super().__init__(*args, **settings)


class _Helpful(click.Command):
    """Shows `examples`, each a line for the shell, before the options."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        self.examples = tuple(examples)
        super().__init__(*args, **settings)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    # Written as it is: a wrapped command cannot be copied.
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                heading = parameter.section if isinstance(parameter, SectionOption) else "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class HelpfulCommand(_Helpful):
    """A command with examples and sections."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it, with those of the settings that this run reads."""
        if ctx.meta:
            from edgespec.cli.screen import note
            from edgespec.cli.settings import leave_out_unread

            for line in leave_out_unread(ctx):
                note(line)
        return super().invoke(ctx)


class HelpfulGroup(_Helpful, click.Group):
    """A group of commands with examples; commands are shown before options."""

    command_class = HelpfulCommand

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, no_args_is_help=False, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; a group that does nothing alone shows its help, and that counts as wrong usage."""
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
        """As click's, but a wrong name is answered with the nearest right one."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise click.UsageError(f"no such command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)
