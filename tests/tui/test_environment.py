"""Environment variables of Textual with values that the chat cannot use."""

from __future__ import annotations

import pytest
from textual import constants

from edgespec.errors import ConfigurationError
from edgespec.tui.app import run_chat
from edgespec.tui.worker import Load
from tests.raising import raises


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "COLOR_SYSTEM",
            "zzz",
            (
                "the environment variable TEXTUAL_COLOR_SYSTEM is 'zzz', which is not a colour"
                " system that Textual knows; unset it, or use one of auto, standard, 256, truecolor, windows"
            ),
        ),
        ("COLOR_SYSTEM", "", "the environment variable TEXTUAL_COLOR_SYSTEM is '', which is not a colour"),
        (
            "DRIVER",
            "a:b",
            "TEXTUAL_DRIVER is 'a:b', which is not a Textual driver; unset it, or use a module",
        ),
        ("DRIVER", "", "TEXTUAL_DRIVER is '', which is not a Textual driver;"),
        ("DRIVER", "os:path", "TEXTUAL_DRIVER is 'os:path', which is not a Textual driver;"),
        ("DRIVER", "textual.driver.Driver", "TEXTUAL_DRIVER is 'textual.driver.Driver', which is not a"),
        (
            "MAX_FPS",
            10**9,
            "TEXTUAL_FPS is 1000000000, but the chat draws at most 1000 frames per second; unset",
        ),
        (
            "LOG_FILE",
            "/none/x",
            "TEXTUAL_LOG is '/none/x', which cannot be written: no such file or directory;",
        ),
    ],
)
def test_a_bad_value_is_named(
    monkeypatch: pytest.MonkeyPatch, demo: Load, name: str, value: str | int, message: str
) -> None:
    monkeypatch.setattr(constants, name, value)
    with raises(ConfigurationError, message):
        run_chat(demo)


def test_a_missing_folder_for_screenshots(monkeypatch: pytest.MonkeyPatch, demo: Load) -> None:
    monkeypatch.setattr(constants, "SCREENSHOT_DELAY", 1)
    monkeypatch.setattr(constants, "SCREENSHOT_LOCATION", "/none")
    with raises(ConfigurationError, "'/none'"):
        run_chat(demo)
