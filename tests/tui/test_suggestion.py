"""The first screen suggests a real model that fits the memory edgespec may use."""

from __future__ import annotations

from dataclasses import replace

import pytest

import edgespec
from edgespec.tui.texts import notices


@pytest.mark.long
def test_the_first_screen_suggests_a_model_that_fits() -> None:
    with edgespec.load("demo", threads=1, memory="1GiB") as runtime:
        assert notices(runtime) == [runtime.target.notice]
    with edgespec.load("demo", threads=1, memory="12GiB") as runtime:
        (notice,) = notices(runtime)
        assert notice == (
            "The demo is a toy model for offline use. SmolLM2, a small real model, is not installed;"
            " scripts/setup installs it. Press F9 to choose and download a real model. These fit this"
            " machine (sizes"
            " include draft models): qwen3.5-2b (1.7 GiB), qwen3.5-4b (2.8 GiB), qwen3.5-9b (5.5 GiB)."
        )


def test_suggestions_do_not_hide_that_rounding_can_change_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    exactness = edgespec.Exactness("auto", False, "can differ from plain decoding by rounding", (), 0.8)
    with edgespec.load("demo", threads=1, memory="12GiB", measure_costs=False) as runtime:
        facts = replace(runtime.target, exactness=exactness)
        monkeypatch.setattr(edgespec.Runtime, "target", facts)
        suggestion, warning = notices(runtime)
    assert "qwen3.5-9b" in suggestion
    assert "rounding" in warning
    assert "/set exactness bits" in warning
