"""The demo model and the parsed styles, which all chats in a file share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from textual import _wait
from textual.css.stylesheet import Stylesheet

import edgespec
from edgespec.tui.worker import Load


@pytest.fixture(scope="module")
def shared_runtime() -> Iterator[edgespec.Runtime]:
    """The embedded demo pair."""
    with edgespec.load("demo", threads=1) as runtime:
        yield runtime


@pytest.fixture
def demo(shared_runtime: edgespec.Runtime, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load the embedded demo pair only once, because loading takes as long as the rest of a test.

    `test_switching.py` and `test_speed.py` load models as the command does, and close them. Pass costs are
    fixed,
    because the chat shows their consequences, and measured costs depend on what else is running.
    """
    monkeypatch.setattr(shared_runtime, "close", lambda: None)
    monkeypatch.setattr(edgespec.Runtime, "pass_costs", {2: 1.5, 4: 2.0, 8: 3.0})
    return lambda progress: shared_runtime


@pytest.fixture(scope="session", autouse=True)
def shared_styles() -> Iterator[None]:
    """Parse each style sheet only once, because parsing takes a sixth of a test's time."""
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
    Otherwise, it waits twice for a period in which almost nothing is computed, here 10 instead of 20 ms.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_wait, "process_time", time.thread_time)
        patch.setattr(_wait, "SLEEP_GRANULARITY", 0.01)
        yield
