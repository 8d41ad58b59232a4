"""The demo model, loaded anew for each chat as the command does it, and styles that all chats share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from textual import _wait
from textual.css.stylesheet import Stylesheet

import edgespec
from edgespec.catalog import Progress
from edgespec.tui.worker import Load


@pytest.fixture
def demo() -> Load:
    """Load the embedded demo pair."""

    def load(progress: Progress) -> edgespec.Runtime:
        return edgespec.load("demo", threads=1, progress=progress)

    return load


@pytest.fixture(scope="session", autouse=True)
def shared_styles() -> Iterator[None]:
    """Parse each style sheet once, because that takes a sixth of the time of a test."""
    parse = Stylesheet._parse_rules
    parsed: dict[Any, Any] = {}

    def parse_once(sheet: Stylesheet, *args: Any, **options: Any) -> Any:
        key = args, tuple(options.items()), tuple(sheet._variables.items())
        if key not in parsed:
            parsed[key] = parse(sheet, *args, **options)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def idle_without_the_model_thread() -> Iterator[None]:
    """Count the app as idle while only the model thread computes.

    Textual waits after each key until the whole process is idle, which is a second or two during a reply.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_wait, "process_time", time.thread_time)
        yield
