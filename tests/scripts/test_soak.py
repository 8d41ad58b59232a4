"""The soak test: a quarter of a minute loses nothing, and losses, hangs and growth are reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.soaking import soak as soaking
from scripts.soaking.soak import Soak, fit, report

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and pseudo-terminals are POSIX")


@pytest.mark.long
def test_a_short_soak_loses_nothing(tmp_path: Path) -> None:
    soak = Soak(tmp_path)
    soak.run(8.0)
    soak = Soak(tmp_path)  # resumes with the next event
    for seconds in (16.0, 32.0, 64.0):  # A busy machine needs longer for four kinds of events.
        soak.run(seconds)
        kinds = {line["name"] for line in soak.lines if line["kind"] == "event"}
        if len(kinds) >= 4:
            break
    printed: list[str] = []
    assert report(soak, printed.append), printed
    assert len(kinds) >= 4
    assert any(line["kind"] == "memory" for line in soak.lines)
    saved = [line["texts"] for line in soak.lines if line["kind"] == "saved"]
    assert sum(map(len, saved)) > 10
    # A message missing from the saved chats is reported. Replies of the terminal chat may be missing.
    missing = next(text for texts in saved for text in texts)
    for path in (tmp_path / "data" / "chats").glob("*.json"):
        chat = json.loads(path.read_text("utf-8"))
        chat["messages"] = [message for message in chat["messages"] if message["content"] != missing]
        path.write_text(json.dumps(chat), "utf-8")
    assert missing in soak.lost()
    assert not report(soak, printed.append)


@pytest.mark.long
def test_a_hang_is_reported_and_the_soak_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soaking, "_ANSWER_SECONDS", 0.0)
    soak = Soak(tmp_path)
    soak.run(2.0)
    errors = [line["error"] for line in soak.lines if line["kind"] == "event"]
    assert errors
    assert any("did not answer" in error for error in errors)
    assert not report(soak, lambda _: None)


@pytest.mark.parametrize("growth", [0.0, 20.0, 200.0])
def test_growth_is_told_from_noise(growth: float) -> None:
    random = np.random.default_rng(0)
    segments = [
        [
            (seconds, (level + growth * seconds / 3600 + random.normal()) * 2**20)
            for seconds in range(0, 1800, 10)
        ]
        for level in (200.0, 230.0)
    ]
    trend = fit(segments)
    assert abs(trend.slope - growth) < 2 * trend.error
    assert trend.is_flat == (growth == 0.0)
    assert str(fit([])) == "too few samples to tell"
