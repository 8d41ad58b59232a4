"""The names of all commands. Each command's module is imported on first use."""

from __future__ import annotations

from importlib import import_module

import click

__all__ = ["ALIASES", "COMMANDS", "MISSING_COMMANDS", "OLLAMA_COMMANDS", "load_command"]

# The names of all commands, in the order of the help text.
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

# Other names of commands: Ollama's name for its chat.
ALIASES = {"run": "chat"}

# Ollama's commands, and what to suggest instead. MODEL stands for the next word that the user typed.
OLLAMA_COMMANDS = {
    "list": "models list",
    "ls": "models list",
    "pull": "models pull MODEL",
    "show": "models show MODEL",
    "rm": "models remove MODEL",
    "cp": "models alias",
    "help": "--help",
}
# Ollama's commands that edgespec does not have, and why not.
MISSING_COMMANDS = dict.fromkeys(
    ("ps", "stop"), "the server unloads unused models, and lists the loaded ones at /api/ps"
)


def load_command(name: str) -> click.Command | None:
    """Import and return the command with this name, or None if there is none."""
    if name not in COMMANDS:
        return None
    command: click.Command = import_module(f"edgespec.cli.{name.replace('-', '_')}").command
    return command
