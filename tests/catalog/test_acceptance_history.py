"""Tests of measured acceptance rates: counting, saving, use by `auto`, and deletion."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

import edgespec
from edgespec.catalog import choose_draft, draft_options, find_installed, resolve
from edgespec.catalog.acceptance_history import AcceptanceHistory, AcceptanceRecorder, LocalModel
from edgespec.catalog.catalogue import models_folder
from tests.catalog.fake_stores import add_to_lmstudio


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data" / "learnt" / "acceptances.json"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[LocalModel, LocalModel]:
    paths = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for path in paths:
        path.write_bytes((models_folder() / "demo-draft-q8_0.gguf").read_bytes())
    return (paths[0], "gguf"), (paths[1], "gguf")


def test_a_rate_needs_enough_drafts_of_the_same_files(
    pair: tuple[LocalModel, LocalModel], data: Path
) -> None:
    record = AcceptanceRecorder(*pair)
    assert AcceptanceHistory().rate(*pair) is None
    record.count(199, 100)
    record.save()
    assert AcceptanceHistory().rate(*pair) is None
    record.count(1, 0)
    record.save()
    record.save()
    assert AcceptanceHistory().rate(*pair) == 0.5
    assert AcceptanceHistory().rate(pair[1], pair[0]) is None
    if sys.platform != "win32":
        assert stat.S_IMODE(data.stat().st_mode) == 0o600
    os.utime(pair[1][0], (1, 1))
    assert AcceptanceHistory().rate(*pair) is None
    assert edgespec.delete_data("learned") > 0
    assert not data.exists()


def test_the_history_is_bounded_and_favours_recent_replies(
    pair: tuple[LocalModel, LocalModel], monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    monkeypatch.setattr("edgespec.catalog.acceptance_history._MAX_PAIRS", 2)
    kept = AcceptanceHistory()
    one, other = pair
    for mine in ((one, other), (other, one), (one, one)):
        kept.add(*mine, 300, 150)
    assert [kept.rate(one, other), kept.rate(other, one), kept.rate(one, one)] == [None, 0.5, 0.5]
    for _ in range(20):
        kept.add(one, one, 10_000, 9_000)
    assert kept.rate(one, one) == pytest.approx(0.9, abs=0.01)
    record = AcceptanceRecorder(one, other)
    record.count(2000, 500)  # This count is saved before the run ends.
    assert kept.rate(one, other) == 0.25
    one[0].unlink()
    record.count(500, 5)
    record.save()
    assert kept.rate(one, other) is None
    assert data.stat().st_size < 300


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'{"version": 1, "pairs": []}',
        b'{"version": 1, "pairs": {"a": [1]}}',
        b'{"version": 1, "pairs": {"a": [1, 2], "b": [-5, -9]}}',
        b'{"version": 2, "pairs": {}}',
        b"[" * 200_000,
        b" " * 2**21,
    ],
    ids=range(9),
)
def test_a_damaged_history_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "acceptances.json"
    path.write_bytes(content)
    draft = (models_folder() / "demo-draft-q8_0.gguf", "gguf")
    assert AcceptanceHistory(path).rate(draft, draft) is None
    AcceptanceHistory(path).add(draft, draft, 200, 50)
    assert AcceptanceHistory(path).rate(draft, draft) == 0.25


def test_auto_uses_measured_acceptance_rates(own_home: Path, data: Path) -> None:
    folder = own_home / ".lmstudio" / "models" / "maker"
    for name, file in (("Large", "target"), ("Small", "draft")):
        add_to_lmstudio(folder, f"{name}-GGUF/{name}.gguf", models_folder() / f"demo-{file}-q8_0.gguf")
    target = resolve("maker/Large-GGUF", allow_download=False)
    assert choose_draft(target).reason.endswith("(estimated from its size)")
    options = {"context": 512, "threads": 1, "prefix_cache": "none"}
    guesses = true = 0
    with edgespec.load("maker/Large-GGUF", method="model", **options) as runtime:  # type: ignore[arg-type]
        while guesses < 200:
            reply = runtime.generate("How do I list files?", max_tokens=200, seed=guesses + 1)
            guesses += reply.stats.drafted_per_position[0]
            true += reply.stats.accepted_per_position[0]
        before = guesses
        runtime.generate("How do I list files?", max_tokens=20, seed=1, method="suffix")
        runtime.generate("How do I list files?", max_tokens=20, seed=1, method="none")
    assert before == guesses
    (option,) = draft_options(target, find_installed())
    assert option.acceptance_rate == true / guesses
    why = choose_draft(target).reason
    assert f"(measured: {true / guesses:.0%} of its drafted tokens are accepted)" in why
    # A draft model with a very low acceptance rate is no longer taken.
    path = folder / "Small-GGUF" / "Small.gguf"
    AcceptanceHistory().add((target.path, "gguf"), (path, "gguf"), 15_000, 0)
    choice = choose_draft(target)
    assert choice.draft is None
    assert "has an expected speed-up of" in choice.reason
    edgespec.delete_data("learned")
    assert choose_draft(target).draft is not None
