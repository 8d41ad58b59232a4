"""`recommend` chooses the largest model that fits and is fast enough, for the speed of this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgespec.loading.recommendation as recommendation
import edgespec.methods.costs.machine_speed as machine_speed
from edgespec.errors import OptionError
from edgespec.loading.recommendation import recommend
from edgespec.loading.speed_prediction import catalogue_weights, predict_speed
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.machine_speed import MachineSpeed, TypeSpeed
from edgespec.model.model_facts import PassWeights
from edgespec.model.registry import format_of
from edgespec.store.catalogue import load_catalogue
from tests.raising import raises

GIB = 2**30


def machine(gigabytes_per_second: float, extra_cost: float = 0.1) -> MachineSpeed:
    """Return a machine that reads all types equally fast, with `extra_cost` for every additional token."""
    step = 1e-9 / gigabytes_per_second
    widths = (1, 2, 4, 8, 16)
    curve = CostCurve(widths, tuple(step * (1 + extra_cost * (width - 1)) for width in widths))
    return MachineSpeed({"Q4_K": TypeSpeed(curve, step / 10)}, 0.0)


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "data"))
    for name in ("HF_HUB_CACHE", "OLLAMA_MODELS", "LMSTUDIO_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HOME", str(tmp_path))


def save(speed: MachineSpeed) -> None:
    machine_speed.save_machine_speed(format_of("gguf"), speed)


def test_a_fast_machine_gets_the_largest_model_that_fits() -> None:
    save(machine(1000))
    result = recommend(memory=64 * GIB)
    assert result.best is not None
    assert result.best.parameters == max(
        each.parameters for each in result.candidates if not each.is_for_code
    )
    assert result.best.needed_bytes <= 64 * GIB


def test_a_slow_machine_gets_a_smaller_model_that_is_comfortable_to_read() -> None:
    save(machine(40))
    fast, slow = recommend(memory=64 * GIB), None
    save(machine(10))
    slow = recommend(memory=64 * GIB)
    assert fast.best is not None
    assert slow.best is not None
    assert slow.best.parameters < fast.best.parameters
    assert slow.best.speed.fastest_tokens_per_second >= 8


@pytest.mark.parametrize(
    ("was_busy", "is_busy", "measures"), [(1.0, 0.0, True), (1.0, 1.0, False), (0.0, 0.0, False)]
)
def test_a_disturbed_measurement_is_repeated_when_the_machine_is_quiet(
    monkeypatch: pytest.MonkeyPatch, was_busy: float, is_busy: float, measures: bool
) -> None:
    save(replace(machine(40), busy_cores=was_busy))
    monkeypatch.setattr(recommendation, "CPU_LOAD", SimpleNamespace(busy_cores=lambda: is_busy))
    monkeypatch.setattr(recommendation, "measure_machine", lambda *_: machine(50))
    result = recommend(memory=16 * GIB)
    assert result.machine == (machine(50) if measures else replace(machine(40), busy_cores=was_busy))
    assert all(each.speed.is_disturbed == (is_busy > 0) for each in result.candidates)


@pytest.mark.parametrize("gigabytes_per_second", [1000, 40, 10, 1])
@pytest.mark.parametrize("task", ["chat", "code"])
def test_the_best_models_come_first(gigabytes_per_second: int, task: Any) -> None:
    save(machine(gigabytes_per_second))
    result = recommend(task, memory=64 * GIB)
    assert result.candidates[0] is result.best
    suitable = [each for each in result.candidates if each.is_for_code == (task == "code")]
    assert list(result.candidates[: len(suitable)]) == suitable
    speeds = [each.speed.fastest_tokens_per_second for each in suitable]
    sizes = [each.parameters for each in suitable]
    comfortable, acceptable = sum(speed >= 8 for speed in speeds), sum(speed >= 4 for speed in speeds)
    assert all(speed >= 8 for speed in speeds[:comfortable])
    assert sizes[:comfortable] == sorted(sizes[:comfortable], reverse=True)
    assert sizes[comfortable:acceptable] == sorted(sizes[comfortable:acceptable], reverse=True)
    assert speeds[acceptable:] == sorted(speeds[acceptable:], reverse=True)


def test_code_gets_a_model_for_code() -> None:
    save(machine(100))
    assert "devstral" in str(recommend("code", memory=16 * GIB).best)
    assert "coder" in str(recommend("code", memory=32 * GIB).best)
    chat = recommend("chat", memory="16GiB").best
    assert chat is not None
    assert not chat.is_for_code


def test_nothing_is_recommended_if_nothing_fits() -> None:
    save(machine(100))
    result = recommend(memory=GIB // 4)
    assert (result.best, result.candidates) == (None, ())


def test_only_models_that_fit_are_candidates() -> None:
    save(machine(100))
    for size in (2, 8, 32):
        found = recommend(memory=size * GIB).candidates
        assert found
        assert all(each.needed_bytes <= size * GIB for each in found)


def test_a_draft_model_is_recommended_only_where_it_saves_time() -> None:
    save(machine(100, extra_cost=0.05))
    assert "--draft" in str(recommend(memory=12 * GIB).best.command)  # type: ignore[union-attr]
    save(machine(100, extra_cost=1.0))
    best = recommend(memory=12 * GIB).best
    assert best is not None
    assert "--draft" not in best.command
    assert best.speed.speedup == 1.0


def test_a_type_with_cheaper_passes_is_named() -> None:
    cheap, dear = machine(100, extra_cost=0.02).types["Q4_K"], machine(100, extra_cost=1.0).types["Q4_K"]
    save(MachineSpeed({"Q4_K": dear, "Q6_K": dear, "Q4_0": cheap}, 0.0))
    result = recommend(memory=16 * GIB)
    assert {each.faster_type for each in result.candidates if each.draft} == {"Q4_0"}


def test_only_the_experts_in_use_count() -> None:
    found = load_catalogue().find("qwen3-30b-a3b")
    assert found is not None
    entry = found[0]
    assert catalogue_weights(entry).total_bytes < 0.15 * entry.approximate_file_bytes


def test_the_prediction_of_a_pair_never_falls_below_plain_decoding() -> None:
    weights = PassWeights({"Q4_K": GIB}, 24)
    speed = predict_speed(machine(50, extra_cost=2.0), weights, weights, 1.0)
    assert speed.speedup == 1.0
    assert speed.fastest_tokens_per_second == speed.tokens_per_second


def test_an_invalid_size_is_refused() -> None:
    save(machine(100))
    with raises(OptionError, option="memory"):
        recommend(memory="lots")
