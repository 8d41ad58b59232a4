"""Environment variables of Textual with values that the chat cannot use."""

from __future__ import annotations

import pytest
from textual import constants

from edgespec.errors import ConfigurationError
from edgespec.tui.app import run_chat
from edgespec.tui.worker import Load
from tests.raising import raises


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COLOR_SYSTEM", "zzz"),
        ("COLOR_SYSTEM", ""),
        ("DRIVER", "a:b"),
        ("DRIVER", ""),
        ("DRIVER", "os:path"),
        ("DRIVER", "textual.driver.Driver"),
        ("MAX_FPS", 10**9),
        ("LOG_FILE", "/none/x"),
    ],
)
def test_a_bad_value_is_named(
    monkeypatch: pytest.MonkeyPatch, demo: Load, name: str, value: str | int
) -> None:
    monkeypatch.setattr(constants, name, value)
    variable = {"MAX_FPS": "FPS", "LOG_FILE": "LOG"}.get(name, name)
    with raises(ConfigurationError, f"TEXTUAL_{variable} is {value!r}"):
        run_chat(demo)


def test_a_missing_folder_for_screenshots(monkeypatch: pytest.MonkeyPatch, demo: Load) -> None:
    monkeypatch.setattr(constants, "SCREENSHOT_DELAY", 1)
    monkeypatch.setattr(constants, "SCREENSHOT_LOCATION", "/none")
    with raises(ConfigurationError, "'/none'"):
        run_chat(demo)
