"""Measure how fast this machine runs each quantisation type, to predict the speed of models.

Generating a token reads nearly all of a model's weights once. The duration of a pass is therefore predicted
as the bytes of each quantisation type times the measured seconds per byte, plus the number of layers times
the measured fixed cost of a layer. Both are measured with models that have random weights.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from time import perf_counter as now
from typing import Any

from edgespec.errors import CancelledError, CapabilityError, EdgespecError
from edgespec.methods.costs.constants import (
    BENCHMARK_BYTES,
    BENCHMARK_PROMPT_TOKENS,
    MACHINE_REPEATS,
    MACHINE_ROUNDS,
    MACHINE_WIDTHS,
    TYPE_SECONDS,
)
from edgespec.methods.costs.curve import CostCurve, measure_costs
from edgespec.model.base import LoadOptions, Progress
from edgespec.model.model_facts import PassWeights
from edgespec.model.registry import BenchmarkModels, FileFormat, backends
from edgespec.system.cores import CPU_LOAD, MAX_BUSY_CORES
from edgespec.system.facts import Facts
from edgespec.system.files import error_reason, format_bytes
from edgespec.system.installation import package_version

__all__ = [
    "MachineSpeed",
    "TypeSpeed",
    "machine_identity",
    "measure_machine",
    "save_machine_speed",
    "saved_machine_speed",
]

_KEPT = (
    "This measurement was not saved, because other programs were busy. The saved one was made when this"
    " machine was idle."
)


@dataclass(frozen=True, slots=True)
class TypeSpeed:
    """This machine's speed with weights of one quantisation type.

    Attributes:
        curve: Duration of a pass by width, in seconds per byte of weights.
        prompt_seconds: Duration of prefilling one prompt token, in seconds per byte of weights.
    """

    curve: CostCurve
    prompt_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Number of weight bytes that a single-token pass reads per second."""
        return 1.0 / self.curve.target_step_seconds


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """This machine's speed with models of one file format.

    Attributes:
        types: The measured speed of each quantisation type.
        layer_seconds: Fixed time that each layer adds to a pass, regardless of the layer's size.
        busy_cores: Average number of processor cores that other programs used during the measurement.
        notice: Why the measurement was not saved, or empty if it was.
    """

    types: Mapping[str, TypeSpeed]
    layer_seconds: float
    busy_cores: float = 0.0
    notice: str = ""

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs were busy enough during the measurement to distort it."""
        return self.busy_cores > MAX_BUSY_CORES

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
        """Return the speed of a quantisation type, or of the measured type closest to it in bit width."""
        nearest = min(self.types, key=lambda name: (name != type_name, abs(_bits(name) - _bits(type_name))))
        return self.types[nearest]


def _bits(type_name: str) -> int:
    """Return the bit width in a quantisation type's name, such as 4 for Q4_K."""
    digits = "".join(letter if letter in "0123456789" else " " for letter in type_name).split()
    return int(digits[0]) if digits else 16


def machine_identity() -> tuple[object, ...]:
    """Return values that identify this machine and the versions of its backend packages."""
    names = [name for backend in backends() for name in backend.packages]
    return platform.node(), platform.machine(), os.cpu_count(), *map(package_version, names)


def saved_machine_speed(form: FileFormat) -> MachineSpeed | None:
    """Return this machine's saved speed for a file format, or None if it was not measured."""
    return _from_json(Facts().get("machine", _key(form)))


def save_machine_speed(form: FileFormat, speed: MachineSpeed) -> None:
    """Save this machine's speed for a file format."""
    Facts().put("machine", {_key(form): _to_json(speed)})


def measure_machine(form: FileFormat, progress: Progress | None = None) -> MachineSpeed:
    """Measure how fast this machine runs each quantisation type of a file format, and save the results.

    Noisy results never replace clean ones. The measurement takes up to 20 seconds, and needs 1 GiB of memory
    and 1 GiB of temporary disk space.

    Raises:
        CapabilityError: The format has no benchmark models.
        CancelledError: `progress` returned False.
        EdgespecError: A temporary file cannot be written.
    """
    models = form.benchmark_models
    if models is None:
        raise CapabilityError(
            f"edgespec cannot predict the speed of models in this format ({form.label}), because it has no"
            " benchmark for it"
        )
    with _temporary_folder() as folder:
        path = folder / "model"
        small, weights, _ = _measure(form, models, path, next(iter(models.types)), 0)
        layer_seconds = small.target_step_seconds / weights.layers
        measured: dict[str, list[TypeSpeed]] = {name: [] for name in models.types}
        busy_cores = []
        for done, name in enumerate(MACHINE_ROUNDS * tuple(models.types)):
            if progress and not progress(
                f"measuring {name} weights", done / (MACHINE_ROUNDS * len(measured))
            ):
                raise CancelledError(
                    "the speed of this machine was not measured", "try again, which takes up to 20 seconds"
                )
            curve, weights, prompt_seconds = _measure(form, models, path, name, BENCHMARK_BYTES)
            busy_cores.append(CPU_LOAD.busy_cores())
            size_bytes, fixed = weights.total_bytes, weights.layers * layer_seconds
            seconds = tuple((each - fixed) / size_bytes for each in curve.seconds)
            measured[name].append(TypeSpeed(replace(curve, seconds=seconds), prompt_seconds / size_bytes))
    types = {name: _best_speed(speeds) for name, speeds in measured.items()}
    speed = MachineSpeed(types, layer_seconds, mean(busy_cores))
    if speed.is_disturbed and (saved := saved_machine_speed(form)) and not saved.is_disturbed:
        return replace(speed, notice=_KEPT)
    save_machine_speed(form, speed)
    return replace(speed, notice=Facts().notice)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Create a temporary folder. If writing to it fails, raise an error that says what to do."""
    parent = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
            yield Path(folder)
    except OSError as error:
        raise EdgespecError(
            f"cannot measure this machine's speed, because a temporary file cannot be written to {parent}:"
            f" {error_reason(error)}",
            f"free {format_bytes(2 * BENCHMARK_BYTES)} there, or set TMPDIR to another folder",
            code="file_not_written",
        ) from error


def _best_speed(speeds: Sequence[TypeSpeed]) -> TypeSpeed:
    """Merge several measurements of one type, taking the shortest duration at each common width."""
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
        # Delete the file now, so that it is not left behind if this process is killed. On POSIX systems, the
        # loaded model can still read it.
        with suppress(OSError):
            path.unlink()
        curve = measure_costs(model, MACHINE_WIDTHS, repeats=MACHINE_REPEATS, budget_seconds=TYPE_SECONDS)
        began = now()
        model.prefill([0] * BENCHMARK_PROMPT_TOKENS)
        return curve, weights, (now() - began) / BENCHMARK_PROMPT_TOKENS
    finally:
        model.close()


def _key(form: FileFormat) -> str:
    return repr((form.name, machine_identity()))


def _to_json(speed: MachineSpeed) -> dict[str, Any]:
    types = {
        name: {"widths": each.curve.widths, "seconds": each.curve.seconds, "prompt": each.prompt_seconds}
        for name, each in speed.types.items()
    }
    return {"layer": speed.layer_seconds, "busy": speed.busy_cores, "types": types}


def _from_json(saved: Any) -> MachineSpeed | None:
    """Return the saved speed, or None if nothing was saved or the data is invalid."""
    try:
        types = {
            name: TypeSpeed(
                CostCurve(tuple(map(int, each["widths"])), tuple(map(float, each["seconds"]))),
                float(each["prompt"]),
            )
            for name, each in saved["types"].items()
        }
        return MachineSpeed(types, float(saved["layer"]), float(saved["busy"])) if types else None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
