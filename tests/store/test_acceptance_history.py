"""Tests of measured acceptance rates: counting, saving, use by `auto`, and deletion."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.store.acceptance_history import (
    AcceptanceRecorder,
    LocalModel,
    _key,
    add_acceptance,
    measured_acceptance_rate,
)
from edgespec.store.catalogue import models_folder
from edgespec.store.drafts import choose_draft, draft_options
from edgespec.store.installed import find_installed
from edgespec.store.reference import resolve
from edgespec.system.facts import Facts
from tests.saved_facts import saved_facts
from tests.store.fake_stores import add_to_lmstudio


@pytest.fixture(autouse=True)
def own_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[LocalModel, LocalModel]:
    paths = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for path in paths:
        path.write_bytes((models_folder() / "demo-draft-q8_0.gguf").read_bytes())
    return (paths[0], "gguf"), (paths[1], "gguf")


def test_a_rate_needs_enough_drafts_of_the_same_files(pair: tuple[LocalModel, LocalModel]) -> None:
    record = AcceptanceRecorder(*pair)
    assert measured_acceptance_rate(*pair) is None
    record.count(199, 100)
    record.save()
    assert measured_acceptance_rate(*pair) is None
    record.count(1, 0)
    record.save()
    record.save()
    assert measured_acceptance_rate(*pair) == 0.5
    assert measured_acceptance_rate(pair[1], pair[0]) is None
    os.utime(pair[1][0], (1, 1))
    assert measured_acceptance_rate(*pair) is None
    assert edgespec.delete_data("learned") > 0
    assert not saved_facts("acceptance")


def test_the_history_favours_recent_replies(pair: tuple[LocalModel, LocalModel]) -> None:
    one, other = pair
    add_acceptance(one, one, 300, 150)
    for _ in range(20):
        add_acceptance(one, one, 10_000, 9_000)
    assert measured_acceptance_rate(one, one) == pytest.approx(0.9, abs=0.01)
    record = AcceptanceRecorder(one, other)
    record.count(2000, 500)  # This count is saved before the run ends.
    assert measured_acceptance_rate(one, other) == 0.25
    one[0].unlink()
    record.count(500, 5)
    record.save()
    assert measured_acceptance_rate(one, other) is None


@pytest.mark.parametrize("damaged", [[], {}, [1], ["a", "b"], [-5, -9], [1, 300], 7])
def test_damaged_counts_are_not_used(pair: tuple[LocalModel, LocalModel], damaged: Any) -> None:
    Facts().put("acceptance", {_key(*pair): damaged})
    assert measured_acceptance_rate(*pair) is None
    add_acceptance(*pair, 200, 50)
    assert measured_acceptance_rate(*pair) == 0.25


def test_auto_uses_measured_acceptance_rates(own_home: Path) -> None:
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
    add_acceptance((target.path, "gguf"), (path, "gguf"), 15_000, 0)
    choice = choose_draft(target)
    assert choice.draft is None
    assert "is expected to make" in choice.reason
    edgespec.delete_data("learned")
    assert choose_draft(target).draft is not None
