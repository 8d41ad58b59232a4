"""Fuzz settings files: TOML that every command reads and `edgespec config set` edits."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from random import Random

from edgespec.cli.help import COMMANDS
from edgespec.cli.settings import Settings
from edgespec.errors import OptionError
from edgespec.options.settings import SETTINGS, setting_value
from edgespec.options.settings_file import NotEditableError, changed
from scripts.fuzzing.mutations import NASTY_INTEGERS, damage, nasty_text, several
from scripts.fuzzing.worker import Files

_VALUES = (
    "true",
    "-1",
    "0.7",
    "'8GiB'",
    '"auto"',
    "[1, 2]",
    "{a = 1}",
    "2026-11-23",
    "nan",
    "1e400",
    "0x10",
    '""',
)


def make(rng: Random) -> Files:
    """Return a settings file with valid, invalid and damaged lines."""
    lines = [_line(rng) for _ in range(rng.randrange(8))]
    if rng.random() < 0.05:
        depth = rng.choice((100, 1_000, 10_000))
        lines.append(
            rng.choice(
                ("target = " + "[" * depth + "]" * depth, "a." * depth + "b = 1", "a = " + "{b=" * depth)
            )
        )
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return {"config.toml": several(rng, text, damage) if rng.random() < 0.4 else text}


def _line(rng: Random) -> str:
    name = rng.choice((*SETTINGS, *COMMANDS, "aliases", "pairs", "unknown"))
    kind = rng.randrange(6)
    if kind == 0:
        return f"[{name}]"
    if kind == 1:
        return f"# {nasty_text(rng)}"
    value = rng.choice((rng.choice(_VALUES), str(rng.choice(NASTY_INTEGERS)), json.dumps(nasty_text(rng))))
    return f"{'chat.' * (kind == 2)}{name if kind < 5 else json.dumps(nasty_text(rng))} = {value}"


def run(folder: Path) -> None:
    """Read the settings, then set and remove a setting in the file's text."""
    os.environ["EDGESPEC_CONFIG_DIR"] = str(folder)
    settings = Settings.read()
    text = (folder / "config.toml").read_bytes().decode("utf-8", "replace")
    if not settings.problems:
        with suppress(NotEditableError):
            changed(changed(text, ("chat", "temperature"), "0.5"), ("chat", "temperature"), None)
    for line in text.splitlines()[:3]:
        with suppress(OptionError):
            setting_value("temperature", line)
    for problem in settings.problems:
        raise problem
