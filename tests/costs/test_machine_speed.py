"""The speed of a machine is measured with random models, saved, and used to predict the speed of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec.costs.machine_speed as machine_speed
from edgespec.backends.pass_weights import PassWeights
from edgespec.backends.registry import BenchmarkModels, FileFormat, format_of
from edgespec.costs.curve import CostCurve
from edgespec.costs.machine_speed import (
    MachineSpeed,
    TypeSpeed,
    measure_machine,
    saved_machine_speed,
)
from edgespec.errors import CancelledError, CapabilityError, EdgespecError

SPEED = MachineSpeed(
    {
        "F16": TypeSpeed(CostCurve((1, 2, 4), (1e-10, 1.2e-10, 1.6e-10)), 2e-11),
        "Q4_K": TypeSpeed(CostCurve((1, 2, 4), (2e-10, 3e-10, 6e-10)), 9e-11),
    },
    layer_seconds=1e-4,
)


@pytest.fixture(autouse=True)
def own_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))


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
    monkeypatch.setattr(machine_speed, "_BENCHMARK_BYTES", 1)
    monkeypatch.setattr(machine_speed, "_TYPE_SECONDS", 0.05)
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
    with pytest.raises(CapabilityError, match="GGUF"):
        measure_machine(replace(format_of("gguf"), benchmark_models=None))


@pytest.mark.parametrize("damage", ["layer", "Q4_K", "F16 prompt", "busy"])
def test_damaged_results_count_as_missing(damage: str) -> None:
    form = format_of("gguf")
    arrays = machine_speed._to_arrays(SPEED)
    arrays[damage] = np.array(["damaged"])
    machine_speed._store(form).save(arrays)
    assert saved_machine_speed(form) is None


@pytest.mark.parametrize("name", ["layer", "Q4_K", "F16 prompt", "busy"])
@pytest.mark.parametrize("value", [np.inf, np.nan, -1.0, 1e308])
def test_impossible_results_count_as_missing(name: str, value: float) -> None:
    form = format_of("gguf")
    arrays = machine_speed._to_arrays(SPEED)
    arrays[name] = np.full_like(arrays[name], value)
    machine_speed._store(form).save(arrays)
    assert saved_machine_speed(form) is None


def test_unusual_type_names_do_no_harm() -> None:
    arrays = machine_speed._to_arrays(SPEED)
    arrays["Q²"], arrays["Q² prompt"] = arrays["Q4_K"], arrays["Q4_K prompt"]
    machine_speed._store(format_of("gguf")).save(arrays)
    speed = saved_machine_speed(format_of("gguf"))
    assert speed is not None
    assert speed.pass_seconds(PassWeights({"Q5_K": 1000}, 1)) > 0


def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_path: Path, _type_name: str, _size_bytes: int) -> PassWeights:
        raise OSError("131072 requested and 62048 written")  # As NumPy reports a full disk.

    form = small_form(monkeypatch)
    assert form.benchmark_models is not None
    full = replace(form, benchmark_models=replace(form.benchmark_models, write=write))
    with pytest.raises(EdgespecError, match="62048 written") as caught:
        measure_machine(full)
    assert "TMPDIR" in caught.value.next_step


def test_a_result_that_cannot_be_saved_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    form = small_form(monkeypatch)
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(file))
    assert "cannot be saved" in measure_machine(form).notice


def test_results_are_saved_and_restored() -> None:
    form = format_of("gguf")
    machine_speed._store(form).save(machine_speed._to_arrays(SPEED))
    assert saved_machine_speed(form) == SPEED
