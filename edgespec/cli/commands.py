"""The names of the commands. Each is a file of this folder, imported when the command is used."""

from __future__ import annotations

from importlib import import_module

import click

__all__ = ["COMMANDS", "load_command"]

# In the order in which the help lists them.
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


def load_command(name: str) -> click.Command | None:
    """Import the command of that name; None if there is none."""
    if name not in COMMANDS:
        return None
    command: click.Command = import_module(f"edgespec.cli.{name.replace('-', '_')}").command
    return command
