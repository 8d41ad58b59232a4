"""Measure how fast this machine runs each quantisation type, and predict the speed of models from that.

Generating a token reads nearly all weights of a model once. The duration of a pass is therefore predicted as
the bytes of each quantisation type times the measured seconds per byte, plus the number of layers times the
measured fixed cost of a layer. Both are measured with models that have random weights.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from time import perf_counter as now
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions, Progress
from edgespec.backends.pass_weights import PassWeights
from edgespec.backends.registry import BenchmarkModels, FileFormat, backends
from edgespec.cores import CPU_LOAD
from edgespec.costs.curve import CostCurve, measure_costs
from edgespec.errors import CancelledError, CapabilityError, EdgespecError
from edgespec.files import error_reason, format_bytes
from edgespec.saved_arrays import SavedArrays

__all__ = ["MachineSpeed", "TypeSpeed", "machine_identity", "measure_machine", "saved_machine_speed"]

_MEASURED_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
# Approximate size of the weights of each benchmark model. Like those of real models, they do not fit into the
# caches of most processors.
_BENCHMARK_BYTES = 192 * 2**20
_PROMPT_TOKENS = 32
# All types are measured this many times in turn, because other activity can slow a machine for a few seconds.
# The shortest durations count.
_ROUNDS = 2
# Saved times per byte of weights, in seconds. Times outside this range are treated as damaged.
_MIN_BYTE_SECONDS, _MAX_BYTE_SECONDS = 1e-15, 1e-3
# Time budget for measuring the passes of one quantisation type once.
_TYPE_SECONDS = 0.6


@dataclass(frozen=True, slots=True)
class TypeSpeed:
    """The speed of this machine with weights of one quantisation type.

    Attributes:
        curve: Duration of a pass for each number of tokens, in seconds per byte of weights.
        prompt_seconds: Duration of prefilling one prompt token, in seconds per byte of weights.
    """

    curve: CostCurve
    prompt_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Bytes of weights that a single-token pass reads per second."""
        return 1.0 / self.curve.target_step_seconds


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """The speed of this machine with models of one file format.

    Attributes:
        types: The measured speed of each quantisation type.
        layer_seconds: Time that each layer adds to a pass, however small its weights are.
        busy_cores: Processor cores that other programs used on average during the measurement.
        notice: Why the measurement could not be saved. Empty if it was saved.
    """

    types: Mapping[str, TypeSpeed]
    layer_seconds: float
    busy_cores: float = 0.0
    notice: str = ""

    def pass_seconds(self, weights: PassWeights, width: int = 1) -> float:
        """Predict the duration of a pass of `width` tokens in a short context."""
        seconds = weights.layers * self.layer_seconds
        for name, size_bytes in weights.bytes_of.items():
            curve = self._of(name).curve
            seconds += size_bytes * curve.target_step_seconds * curve.v(width)
        return seconds

    def v(self, weights: PassWeights, width: int) -> float:
        """Predict the duration of a pass of `width` tokens, relative to a single-token pass."""
        return self.pass_seconds(weights, width) / self.pass_seconds(weights)

    def prompt_seconds(self, weights: PassWeights, tokens: int) -> float:
        """Predict the time to prefill a prompt of `tokens` tokens."""
        return tokens * sum(
            size_bytes * self._of(name).prompt_seconds for name, size_bytes in weights.bytes_of.items()
        )

    def _of(self, type_name: str) -> TypeSpeed:
        """Return the speed of a quantisation type, or of the measured type with the closest bit width."""
        nearest = min(self.types, key=lambda name: (name != type_name, abs(_bits(name) - _bits(type_name))))
        return self.types[nearest]


def _bits(type_name: str) -> int:
    """Return the bit width that the name of a quantisation type contains, such as 4 for Q4_K."""
    digits = "".join(letter if letter in "0123456789" else " " for letter in type_name).split()
    return int(digits[0]) if digits else 16


def machine_identity() -> tuple[object, ...]:
    """Return values that identify this machine and the versions of its backend packages."""
    names = [name for backend in backends() for name in backend.packages]
    return platform.node(), platform.machine(), os.cpu_count(), *map(_version, names)


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def saved_machine_speed(form: FileFormat) -> MachineSpeed | None:
    """Return the saved speed of this machine for a file format, or None if it was not measured."""
    return _from_arrays(_store(form).load())


def measure_machine(form: FileFormat, progress: Progress | None = None) -> MachineSpeed:
    """Measure how fast this machine runs each quantisation type of a file format, and save the results.

    Takes up to 20 seconds and up to 1 GiB of memory and of temporary files.

    Raises:
        CapabilityError: The format has no benchmark models.
        CancelledError: `progress` returned False.
        EdgespecError: A temporary file cannot be written.
    """
    models = form.benchmark_models
    if models is None:
        raise CapabilityError(f"edgespec cannot measure how fast this machine runs {form.label} models")
    with _temporary_folder() as folder:
        path = folder / "model"
        small, weights, _ = _measure(form, models, path, next(iter(models.types)), 0)
        layer_seconds = small.target_step_seconds / weights.layers
        measured: dict[str, list[TypeSpeed]] = {name: [] for name in models.types}
        busy_cores = []
        for done, name in enumerate(_ROUNDS * tuple(models.types)):
            if progress and not progress(f"measuring {name} weights", done / (_ROUNDS * len(measured))):
                raise CancelledError("the measurement of this machine was cancelled")
            curve, weights, prompt_seconds = _measure(form, models, path, name, _BENCHMARK_BYTES)
            busy_cores.append(CPU_LOAD.busy_cores())
            size_bytes, fixed = weights.total_bytes, weights.layers * layer_seconds
            seconds = tuple((each - fixed) / size_bytes for each in curve.seconds)
            measured[name].append(TypeSpeed(replace(curve, seconds=seconds), prompt_seconds / size_bytes))
    types = {name: _best_speed(speeds) for name, speeds in measured.items()}
    store = _store(form)
    speed = MachineSpeed(types, layer_seconds, mean(busy_cores))
    store.save(_to_arrays(speed))
    return replace(speed, notice=store.notice)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Create a temporary folder, and delete it after the block. Write errors in the block say what to do."""
    parent = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
            yield Path(folder)
    except OSError as error:
        raise EdgespecError(
            f"the speed of this machine cannot be measured, because {parent} is full or not writable:"
            f" {error_reason(error)}",
            f"free {format_bytes(2 * _BENCHMARK_BYTES)} there, or set TMPDIR to another folder",
        ) from error


def _best_speed(speeds: Sequence[TypeSpeed]) -> TypeSpeed:
    """Return the shortest durations in several measurements of one type, at their common widths."""
    seconds = [dict(zip(each.curve.widths, each.curve.seconds, strict=True)) for each in speeds]
    widths = sorted(set.intersection(*map(set, seconds)))
    curve = CostCurve(tuple(widths), tuple(min(each[width] for each in seconds) for width in widths))
    return TypeSpeed(curve, min(each.prompt_seconds for each in speeds))


def _measure(
    form: FileFormat, models: BenchmarkModels, path: Path, type_name: str, size_bytes: int
) -> tuple[CostCurve, PassWeights, float]:
    """Return a benchmark model's pass durations, its weights, and the time to prefill one prompt token."""
    weights = models.write(path, type_name, size_bytes)
    model = form.load(str(path), "the benchmark model", LoadOptions(context_tokens=512), None)
    try:
        # Delete the file now, so that it does not remain if this process is killed. On POSIX systems, the
        # loaded model can still read it.
        with suppress(OSError):
            path.unlink()
        curve = measure_costs(model, _MEASURED_WIDTHS, repeats=3, budget_seconds=_TYPE_SECONDS)
        began = now()
        model.prefill([0] * _PROMPT_TOKENS)
        return curve, weights, (now() - began) / _PROMPT_TOKENS
    finally:
        model.close()


def _store(form: FileFormat) -> SavedArrays:
    return SavedArrays("machine", repr((form.name, machine_identity())))


def _to_arrays(speed: MachineSpeed) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {
        "layer": np.array(speed.layer_seconds),
        "busy": np.array(speed.busy_cores),
    }
    for name, each in speed.types.items():
        arrays[name] = np.array([each.curve.widths, each.curve.seconds])
        arrays[f"{name} prompt"] = np.array(each.prompt_seconds)
    return arrays


def _from_arrays(saved: Mapping[str, NDArray[Any]]) -> MachineSpeed | None:
    """Return the saved speed, or None if nothing was saved or the arrays are damaged."""
    try:
        names = [name for name in saved if f"{name} prompt" in saved]
        types = {
            name: TypeSpeed(
                CostCurve(tuple(map(int, saved[name][0])), tuple(map(float, saved[name][1]))),
                float(saved[f"{name} prompt"]),
            )
            for name in names
        }
        speed = MachineSpeed(types, float(saved["layer"]), float(saved["busy"]))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None
    return speed if types and _is_plausible(speed) else None


def _is_plausible(speed: MachineSpeed) -> bool:
    """Return whether all values of a saved speed are possible on a real machine."""
    per_byte = [
        seconds for each in speed.types.values() for seconds in (*each.curve.seconds, each.prompt_seconds)
    ]
    return (
        all(_MIN_BYTE_SECONDS < seconds < _MAX_BYTE_SECONDS for seconds in per_byte)
        and 0.0 <= speed.layer_seconds < 1.0
        and 0.0 <= speed.busy_cores < 1e6
    )
