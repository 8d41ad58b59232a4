"""The first screen suggests a real model that fits the memory edgespec may use."""

from __future__ import annotations

import pytest

import edgespec
from edgespec.tui.texts import notices


def test_the_first_screen_suggests_a_model_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_EDGESPEC_CHAT_COMMAND", "scripts/chat")
    with edgespec.load("demo", threads=1, memory="1GiB") as runtime:
        assert not any("--target" in notice for notice in notices(runtime))
    with edgespec.load("demo", threads=1, memory="12GiB") as runtime:
        assert notices(runtime)[-1] == (
            "To chat with a larger model, run: scripts/chat --target 8b-q4 --draft 1b-q4 (downloads 5.3 GiB;"
            " needs about 7.1 GiB of the 12.0 GiB of memory that edgespec can use here; expected speed-up:"
            " 1.0x to 1.5x, depending on this machine). To see how fast each model would be on this"
            " machine, run `edgespec recommend`."
        )
