"""A machine's speed is measured with random models, saved, and used to predict other models' speeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec.methods.costs.machine_speed as machine_speed
from edgespec.errors import CancelledError, CapabilityError, EdgespecError
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.machine_speed import MachineSpeed, TypeSpeed, measure_machine, saved_machine_speed
from edgespec.model.model_facts import PassWeights
from edgespec.model.registry import BenchmarkModels, FileFormat, format_of
from edgespec.system.facts import Facts
from tests.raising import raises

SPEED = MachineSpeed(
    {
        "F16": TypeSpeed(CostCurve((1, 2, 4), (1e-10, 1.2e-10, 1.6e-10)), 2e-11),
        "Q4_K": TypeSpeed(CostCurve((1, 2, 4), (2e-10, 3e-10, 6e-10)), 9e-11),
    },
    layer_seconds=1e-4,
)


@pytest.fixture(autouse=True)
def own_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))


def test_a_pass_takes_the_time_of_its_bytes_and_its_layers() -> None:
    weights = PassWeights({"F16": 10**9, "Q4_K": 10**8}, layers=20)
    assert SPEED.pass_seconds(weights) == pytest.approx(0.1 + 0.02 + 0.002)
    assert SPEED.pass_seconds(weights, 4) == pytest.approx(0.16 + 0.06 + 0.002)
    assert SPEED.v(weights, 4) == pytest.approx(0.222 / 0.122)
    assert SPEED.prompt_seconds(weights, 1000) == pytest.approx(20.0 + 9.0)


@pytest.mark.parametrize(
    ("name", "same_as"), [("BF16", "F16"), ("Q4_0", "Q4_K"), ("IQ3_XS", "Q4_K"), ("F32", "F16")]
)
def test_a_type_that_was_not_measured_is_as_fast_as_one_with_about_as_many_bits(
    name: str, same_as: str
) -> None:
    assert SPEED.pass_seconds(PassWeights({name: 10**9}, 1)) == SPEED.pass_seconds(
        PassWeights({same_as: 10**9}, 1)
    )


@given(
    smaller=st.integers(1, 10**11),
    more=st.integers(0, 10**11),
    layers=st.integers(1, 200),
    width=st.integers(1, 16),
)
def test_larger_models_are_slower(smaller: int, more: int, layers: int, width: int) -> None:
    small, large = (PassWeights({"F16": size}, layers) for size in (smaller, smaller + more))
    assert SPEED.pass_seconds(small, width) <= SPEED.pass_seconds(large, width)
    assert SPEED.v(small, width) >= 1.0


def small_form(monkeypatch: pytest.MonkeyPatch) -> FileFormat:
    """The GGUF format with two quantisation types and models of one layer."""
    monkeypatch.setattr(machine_speed, "BENCHMARK_BYTES", 1)
    monkeypatch.setattr(machine_speed, "TYPE_SECONDS", 0.05)
    gguf = format_of("gguf")
    assert gguf.benchmark_models is not None
    return replace(
        gguf, benchmark_models=BenchmarkModels({"Q4_0": 4.5, "Q8_0": 8.5}, gguf.benchmark_models.write)
    )


def test_measuring_runs_real_models_and_saves_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    form = small_form(monkeypatch)
    assert saved_machine_speed(form) is None
    measured = measure_machine(form)
    assert list(measured.types) == ["Q4_0", "Q8_0"]
    assert measured.layer_seconds > 0
    for each in measured.types.values():
        assert each.curve.widths[:2] == (1, 2)
        assert each.prompt_seconds > 0
    assert saved_machine_speed(form) == measured


def test_the_shortest_durations_count_at_widths_that_were_measured_every_time() -> None:
    first = TypeSpeed(CostCurve((1, 2, 4, 8), (1.0, 2.0, 3.0, 9.0)), 0.25)
    second = TypeSpeed(CostCurve((1, 2, 8), (3.0, 4.0, 11.0)), 0.75)
    best = machine_speed._best_speed([first, second])
    assert best == TypeSpeed(CostCurve((1, 2, 8), (1.0, 2.0, 9.0)), 0.25)


def test_measuring_can_be_cancelled_and_then_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    form = small_form(monkeypatch)
    with pytest.raises(CancelledError):
        measure_machine(form, lambda _what, _done: False)
    assert saved_machine_speed(form) is None


def test_a_format_without_benchmark_models_is_refused() -> None:
    with raises(CapabilityError, "GGUF"):
        measure_machine(replace(format_of("gguf"), benchmark_models=None))


def saved(**changes: Any) -> MachineSpeed | None:
    """Save `SPEED` with some values replaced, and return the value that is loaded again."""
    value = machine_speed._to_json(SPEED)
    for name, change in changes.items():
        inner = value["types"]["Q4_K"] if name in ("seconds", "prompt") else value
        assert name in inner
        inner[name] = change
    Facts().put("machine", {machine_speed._key(format_of("gguf")): value})
    return saved_machine_speed(format_of("gguf"))


@pytest.mark.parametrize("name", ["layer", "seconds", "prompt", "busy", "types"])
@pytest.mark.parametrize("value", ["damaged", [], {}, [1, 2]])
def test_results_of_another_form_count_as_missing(name: str, value: object) -> None:
    assert saved(**{name: value}) is None


def test_unusual_type_names_do_no_harm() -> None:
    types = machine_speed._to_json(SPEED)["types"]
    speed = saved(types={**types, "Q²": types["Q4_K"]})
    assert speed is not None
    assert speed.pass_seconds(PassWeights({"Q5_K": 1000}, 1)) > 0


def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_path: Path, _type_name: str, _size_bytes: int) -> PassWeights:
        raise OSError("131072 requested and 62048 written")  # As NumPy reports a full disk.

    form = small_form(monkeypatch)
    assert form.benchmark_models is not None
    full = replace(form, benchmark_models=replace(form.benchmark_models, write=write))
    with raises(EdgespecError, "62048 written", code="file_not_written") as caught:
        measure_machine(full)
    assert "TMPDIR" in caught.value.next_step


@pytest.mark.long
def test_a_result_that_cannot_be_saved_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    form = small_form(monkeypatch)
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(file))
    assert "cannot be saved" in measure_machine(form).notice


def test_results_are_saved_and_restored() -> None:
    form = format_of("gguf")
    machine_speed.save_machine_speed(form, SPEED)
    assert saved_machine_speed(form) == SPEED


@pytest.mark.long
@pytest.mark.parametrize("busy_cores", [0.0, 2.0])
def test_a_measurement_on_a_busy_machine_does_not_replace_one_on_a_quiet_machine(
    monkeypatch: pytest.MonkeyPatch, busy_cores: float
) -> None:
    form = small_form(monkeypatch)
    machine_speed.save_machine_speed(form, SPEED)
    monkeypatch.setattr(machine_speed, "CPU_LOAD", SimpleNamespace(busy_cores=lambda: busy_cores))
    measured = measure_machine(form)
    assert measured.is_disturbed == (busy_cores > 0)
    assert ("was not saved" in measured.notice) == measured.is_disturbed
    assert (saved_machine_speed(form) == SPEED) == measured.is_disturbed


def test_the_first_measurement_is_saved_even_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    form = small_form(monkeypatch)
    monkeypatch.setattr(machine_speed, "CPU_LOAD", SimpleNamespace(busy_cores=lambda: 1.0))
    measured = measure_machine(form)
    assert saved_machine_speed(form) == measured
    assert measured.is_disturbed
