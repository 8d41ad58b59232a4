"""Check the environment variables of Textual, the library that draws the chat."""

from __future__ import annotations

import pkgutil
from pathlib import Path

from rich.console import COLOR_SYSTEMS
from textual import constants
from textual.driver import Driver

from edgespec.errors import ConfigurationError
from edgespec.system.files import error_reason

__all__ = ["check_textual_variables"]

# Maximum frame rate. At higher rates, the chat constantly redraws and does not respond to input.
_MAX_FRAMES_PER_SECOND = 1000


def check_textual_variables() -> None:
    """Check the TEXTUAL_* environment variables, because Textual itself does not check them.

    Raises:
        ConfigurationError: A value would prevent the chat from running.
    """
    colours = ("auto", *COLOR_SYSTEMS)
    if constants.COLOR_SYSTEM not in colours:
        raise ConfigurationError(
            f"the environment variable TEXTUAL_COLOR_SYSTEM is {constants.COLOR_SYSTEM!r}, which is not a"
            " colour system that Textual knows",
            f"unset it, or use one of {', '.join(colours)}",
        )
    if constants.DRIVER is not None and not _is_driver(constants.DRIVER):
        raise ConfigurationError(
            f"the environment variable TEXTUAL_DRIVER is {constants.DRIVER!r}, which is not a Textual driver",
            "unset it, or use a module and class, such as textual.drivers.linux_driver:LinuxDriver",
        )
    if constants.MAX_FPS > _MAX_FRAMES_PER_SECOND:
        raise ConfigurationError(
            f"the environment variable TEXTUAL_FPS is {constants.MAX_FPS}, but the chat draws at most"
            f" {_MAX_FRAMES_PER_SECOND} frames per second",
            f"unset it, or use a number from 1 to {_MAX_FRAMES_PER_SECOND}",
        )
    if constants.LOG_FILE is not None:
        try:
            open(constants.LOG_FILE, "a").close()
        except OSError as error:
            raise ConfigurationError(
                f"the environment variable TEXTUAL_LOG is {constants.LOG_FILE!r}, which cannot be written:"
                f" {error_reason(error)}",
                "unset it, or use a file that you can write to",
            ) from error
    folder = constants.SCREENSHOT_LOCATION
    if constants.SCREENSHOT_DELAY >= 0 and folder and not Path(folder).is_dir():
        raise ConfigurationError(
            f"the environment variable TEXTUAL_SCREENSHOT_LOCATION is {folder!r}, which is not a folder",
            "unset it, or use an existing folder",
        )


def _is_driver(name: str) -> bool:
    if ":" not in name:
        return False
    try:
        driver = pkgutil.resolve_name(name)
    except Exception:  # Importing the driver's module can raise any exception.
        return False
    return isinstance(driver, type) and issubclass(driver, Driver)
