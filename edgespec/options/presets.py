"""Presets: named settings, such as a system prompt and a model, each in its own TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigurationError, OptionError, shorten
from edgespec.options.settings import SETTINGS, setting_value, unknown_setting
from edgespec.options.settings_file import encoded, error_at, quoted, read_text
from edgespec.system.files import config_folder, error_reason, write_advice, write_private_file
from edgespec.system.spelling import nearest

__all__ = ["Preset", "preset_names", "preset_path", "read_preset", "write_preset"]

_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,39}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Preset:
    """A named group of settings.

    Attributes:
        name: The name, which is also the file name without `.toml`.
        settings: Setting values by name, such as `system`, `target` and `temperature`.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def preset_path(name: str) -> Path:
    """Return the path of a preset's file, which may not exist. Raises OptionError if the name is invalid."""
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"{shorten(name, 60)!r} is not a valid preset name",
            "use at most 40 letters, digits, hyphens and underscores",
        )
    return _folder() / f"{name}.toml"


def _folder() -> Path:
    return config_folder() / "presets"


def preset_names() -> list[str]:
    """Return the names of all presets in alphabetical order, including those with invalid files."""
    try:
        files = [path for path in _folder().iterdir() if path.suffix == ".toml"]
    except OSError:
        return []
    return sorted((path.stem for path in files if _NAME.fullmatch(path.stem)), key=str.lower)


def read_preset(name: str) -> Preset:
    """Read a preset.

    Raises:
        ConfigurationError: The file is unreadable, or contains an unknown setting or an invalid value.
        OptionError: There is no such preset.
    """
    path = preset_path(name)
    text = read_text(path)
    if text is None:
        names = preset_names()
        near = nearest(name, names)
        existing = (
            f"choose one of {', '.join(names)}"
            if names
            else f"type /preset save {name} in the chat, or create the file {path}"
        )
        raise OptionError(
            f"there is no preset {name!r}", f"did you mean {' or '.join(near)}?" if near else existing
        )
    settings = {}
    for key, given in tomllib.loads(text).items():
        try:
            if key not in SETTINGS:
                raise OptionError(*unknown_setting(key), code="option_unknown")
            settings[key] = setting_value(key, given)
        except OptionError as error:
            raise error_at(path, text, (key,), error.what, error.next_step) from error
    return Preset(name, settings)


def write_preset(preset: Preset) -> Path:
    """Write a preset and return the path of its file. Replaces an existing preset with the same name.

    Raises:
        ConfigurationError: The file cannot be written, or would be too large to read back.
        OptionError: The name is invalid.
    """
    path = preset_path(preset.name)
    lines = [f"{name} = {_literal(value)}" for name, value in preset.settings.items()]
    data = encoded(path, "".join(f"{line}\n" for line in lines))
    try:
        write_private_file(path, data)
    except OSError as error:
        raise ConfigurationError(
            f"the preset {preset.name} cannot be saved to {path}: {error_reason(error)}",
            write_advice(error, path.parent, "EDGESPEC_CONFIG_DIR"),
            code="file_not_written",
        ) from error
    return path


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if "\n" in value:
        lines = "\n".join(quoted(line)[1:-1] for line in value.split("\n"))
        return f'"""\n{lines}"""'
    return quoted(value)
