"""The model that new chats open with: the setting `chat.target`, which the list of models can change."""

from __future__ import annotations

import tomllib

from edgespec.errors import ConfigurationError
from edgespec.options.settings_file import quoted, read_text, settings_path, write_value

__all__ = ["default_for_chats", "set_default_for_chats"]

_SETTING = ("chat", "target")


def default_for_chats() -> str:
    """Return the reference in the settings. Empty if there is none, so that the model used last opens."""
    try:
        chat = tomllib.loads(read_text(settings_path()) or "").get(_SETTING[0])
    except ConfigurationError:
        # The next start of the chat reports the damaged file.
        return ""
    return str(chat.get(_SETTING[1], "")) if isinstance(chat, dict) else ""


def set_default_for_chats(reference: str) -> None:
    """Change the reference in the settings, or remove it if it is empty.

    Raises:
        ConfigurationError: The settings file cannot be changed.
        OptionError: The reference is not valid UTF-8.
    """
    write_value(settings_path(), _SETTING, quoted(reference) if reference else None)
