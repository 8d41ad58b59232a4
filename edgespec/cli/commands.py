"""The names of all commands. A command's module is imported when the command is first used."""

from __future__ import annotations

from importlib import import_module

import click

__all__ = ["COMMANDS", "OLLAMA_COMMANDS", "OLLAMA_SERVER_COMMANDS", "load_command"]

# In the order of the help text.
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

# What to suggest to users who type Ollama's commands. MODEL stands for the next word that they typed.
OLLAMA_COMMANDS = {
    "run": "chat --target MODEL",
    "list": "models list",
    "ls": "models list",
    "pull": "models pull MODEL",
    "show": "models show MODEL",
    "rm": "models remove MODEL",
    "cp": "models alias",
    "help": "--help",
}
OLLAMA_SERVER_COMMANDS = ("serve", "ps", "stop")


def load_command(name: str) -> click.Command | None:
    """Import and return the command with this name, or None if there is none."""
    if name not in COMMANDS:
        return None
    command: click.Command = import_module(f"edgespec.cli.{name.replace('-', '_')}").command
    return command
