"""Support for targets on workers (`--workers`): check and adapt load options, and predict speeds.

The prediction includes the time to send the weights to the workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

from edgespec.cluster.connected import ConnectedWorkers, LinkSpeed
from edgespec.cluster.machines import Machines, SshAddress
from edgespec.errors import OptionError
from edgespec.loading.constants import OUTPUT_ROWS
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pairing import ModelPair
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.machine_speed import MachineSpeed, TypeSpeed, saved_machine_speed
from edgespec.model.base import LoadOptions, Progress
from edgespec.model.memory_estimate import THIS_MACHINE, MachineShare
from edgespec.model.model_facts import OutputLayer, PassWeights
from edgespec.model.registry import FileFormat, format_of
from edgespec.options.methods import head_names, methods
from edgespec.options.settings import LOAD_OPTIONS, LoadArguments
from edgespec.store.reference import Resolved

# Options that are rejected with `--workers`, because they have no effect or are not implemented for workers.
_UNSUPPORTED = (
    "parallel", "gpu_layers", "experts", "exact", "adapter", "learn", "draft_branches", "exit_layer", "mlock",
)  # fmt: skip


def for_workers(drafting: DraftingOptions) -> DraftingOptions:
    """Return the drafting options for a target on workers, with the prefix cache disabled.

    Heads are used only if the user selected their method.

    Raises:
        OptionError: The user chose an option or method that does not work with workers.
    """
    arguments = drafting.arguments
    for name in _UNSUPPORTED:
        if arguments[name] != LOAD_OPTIONS[name].default:  # type: ignore[literal-required]
            dashed = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{dashed} does not work with --workers yet",
                f"omit {dashed}",
                option=name,
                code="option_not_supported",
            )
    if arguments["exactness"] == "bits":
        raise OptionError(
            "--exactness bits does not work with --workers yet",
            "omit --exactness",
            option="exactness",
            code="option_not_supported",
        )
    supported = [each.name for each in methods() if each.works_on_workers]
    unsupported = drafting.named_drafters.difference(supported)
    if unsupported:
        raise OptionError(
            f"the method {min(unsupported)!r} does not work with --workers yet",
            f"use {', '.join(supported)}, auto or none",
            option="method",
            code="option_not_supported",
        )
    # Reading hidden states slows down every pass on workers, so `auto` could not stay within `--max-loss`.
    uses_head = not drafting.named_drafters.isdisjoint(head_names())
    if drafting.names_head and not uses_head:
        raise OptionError(
            f"with workers, --head {drafting.head} would slow down every token, even those without drafts,"
            " so the method `auto` does not use it",
            "select the head's method, such as --method eagle, or omit --head",
            option="head",
            code="option_not_supported",
        )
    head = drafting.head if uses_head else "none"
    changed = cast(LoadArguments, {**arguments, "head": head, "prefix_cache": "none"})
    return replace(drafting, arguments=changed)


def connect_workers(
    machines: Machines | None,
    pair: ModelPair,
    options: LoadOptions,
    undo: ExitStack,
    progress: Progress | None = None,
) -> LoadOptions:
    """Reserve the workers until `undo` is closed, and return load options that include them.

    Also decides which machine computes the output layer.

    Raises:
        CancelledError: `progress` returned False.
        OptionError: The target does not support workers, or this machine cannot hold layers.
        WorkerError, MemoryBudgetError: A worker cannot be used.
    """
    if machines is None:
        return options
    form = pair.target.file_format
    if form.worker_library is None:
        raise OptionError(
            f"{pair.target.name} cannot run on workers because of its format ({form.label})",
            "use an ordinary GGUF or MLX version of the model, or omit --workers",
            option="workers",
            code="option_not_supported",
        )
    if options.split_tensors:
        _check_tensor_split(machines, pair.target.name, form)
    if machines.local_bytes and pair.target.backend.graphics_cards():
        raise OptionError(
            "--workers does not yet support local=SIZE on a machine with a graphics card",
            "start `edgespec worker` on this machine too, and use 127.0.0.1:50052 instead of local",
            option="workers",
            code="option_not_supported",
        )
    workers = ConnectedWorkers(machines, form.worker_library(), progress)
    undo.callback(workers.close)
    # Heads read hidden states and the output layer's weights on this machine, so keep the output layer here
    # for them.
    on_worker = not pair.heads and _output_is_faster_on_worker(pair.target, workers)
    return replace(options, workers=workers, output_on_worker=on_worker)


def _check_tensor_split(machines: Machines, name: str, form: FileFormat) -> None:
    if not form.splits_tensors:
        reason = f"works only with MLX models, and {name} is not one"
        next_step = "use an MLX version of it"
    elif len(machines.workers) < 2:
        reason, next_step = "needs at least two workers", "list more workers"
    elif machines.local_bytes:
        reason, next_step = (
            "does not support local=SIZE",
            "start `edgespec worker` on this machine too, and use its address instead of local",
        )
    elif ssh := next((each for each in machines.workers if isinstance(each, SshAddress)), None):
        reason, next_step = (
            f"does not support {ssh}, because the workers must reach each other",
            "start the workers with --listen and --i-trust-this-network",
        )
    else:
        return
    raise OptionError(
        f"--split-mode tensor {reason}",
        f"{next_step}, or use --split-mode layer",
        option="split_mode",
        code="option_not_supported",
    )


@dataclass(frozen=True, slots=True)
class SpreadPrediction:
    """The expected speed of plain decoding with a short context on several machines.

    Attributes:
        links: The measured connection to each worker.
        send_seconds: Time to send the weights to all workers over the measured connections, if none of them
            has cached weights. Loading takes longer if files or processors are slower than the network.
        tokens_per_second: The speed. None if a machine has not been measured, or cannot be measured for this
            format.
        unmeasured: The machines that hold part of the target but have not been measured by `edgespec
            recommend`.
        alone: The expected speed with all layers on one machine, for each measured machine that can hold
            them. Keyed by the machines' names, as in `MachineShare`.
        fits_here: Whether the whole target fits on this machine.
        disturbed: The machines on which other programs were busy during the measurement.
        faster_alone: A machine in `alone` that is faster than all machines together. Empty if there is none.
    """

    links: tuple[LinkSpeed, ...]
    send_seconds: float
    tokens_per_second: float | None
    unmeasured: tuple[str, ...]
    alone: Mapping[str, float]
    fits_here: bool
    faster_alone: str
    disturbed: tuple[str, ...] = ()

    @property
    def is_faster_here(self) -> bool:
        """Whether this machine alone is faster than all machines together."""
        return self.faster_alone == THIS_MACHINE

    @property
    def is_measured_here(self) -> bool:
        """Whether the speed with all layers on this machine is known."""
        return THIS_MACHINE in self.alone

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON-compatible values."""
        return {
            "links": [
                {"round_trip_seconds": link.round_trip_seconds, "bytes_per_second": link.bytes_per_second}
                for link in self.links
            ],
            "send_seconds": self.send_seconds,
            "tokens_per_second": self.tokens_per_second,
            "unmeasured": list(self.unmeasured),
            "measured_while_busy": list(self.disturbed),
            "alone_tokens_per_second": dict(self.alone),
            "fits_on_this_machine": self.fits_here,
            "faster_alone": self.faster_alone or None,
        }


def predict_spread(
    target: Resolved, workers: ConnectedWorkers, machines: Sequence[MachineShare], *, fits_here: bool
) -> SpreadPrediction:
    """Measure the connections to the workers, and predict the speed of a target on several machines.

    Args:
        target: The model to run.
        workers: The connected workers that hold its layers.
        machines: The target's shares, this machine's first.
        fits_here: Whether the whole target fits on this machine.

    Raises:
        WorkerError: The connection to a worker was lost.
        ModelFileError: A file of the target is damaged.
    """
    form = target.file_format
    links = tuple(map(workers.speed_of, workers.links))
    send_seconds = sum(
        share.weight_bytes / link.bytes_per_second for share, link in zip(machines[1:], links, strict=True)
    )
    if form.read_pass_weights is None:
        return SpreadPrediction(links, send_seconds, None, (), {}, fits_here, "")
    weights = form.read_pass_weights(target.path)
    row_growth_bytes = weights.output.row_growth_bytes if weights.output else 0
    trips = [0.0]
    for share, link in zip(machines[1:], links, strict=True):
        growth = row_growth_bytes / link.bytes_per_second if share.has_output else 0.0
        trips.append(link.round_trip_seconds + growth)
    speeds = (saved_machine_speed(form), *(_from_json(link.status.speed) for link in workers.links))
    layers = sum(share.layers for share in machines)
    # All weights outside the layers belong to the output layer.
    in_layers = sum(share.read_fraction for share in machines)
    fractions = [share.read_fraction + (1.0 - in_layers if share.has_output else 0.0) for share in machines]

    def seconds(machine: int, fraction: float, layers: int) -> float | None:
        """Return the time for part of a pass on one machine, or None if the machine was not measured."""
        speed = speeds[machine]
        part = {name: round(size * fraction) for name, size in weights.bytes_of.items()}
        return None if speed is None else trips[machine] + speed.pass_seconds(PassWeights(part, layers))

    parts = {THIS_MACHINE: seconds(0, fractions[0], machines[0].layers)}
    alone = {THIS_MACHINE: seconds(0, 1.0, layers)} if fits_here else {}
    for machine, share in enumerate(machines[1:], 1):
        if share.layers:
            parts[share.name] = seconds(machine, fractions[machine], share.layers)
        # A worker that has the output layer keeps it when it runs all layers.
        fraction = 1.0 if share.has_output else in_layers
        output, rest = seconds(0, 1.0 - fraction, 0), seconds(machine, fraction, layers)
        if share.can_hold_all and share.layers < layers and None not in (output, rest):
            alone[share.name] = (output or 0.0) + (rest or 0.0)
    # If any machine was not measured, this time is a lower bound.
    together = sum(filter(None, parts.values()))
    measured = {name: 1.0 / each for name, each in alone.items() if each is not None}
    fastest = max(measured, key=lambda name: measured[name], default="")
    unmeasured = tuple(name for name, each in parts.items() if each is None)
    return SpreadPrediction(
        links,
        send_seconds,
        None if unmeasured else 1.0 / together,
        unmeasured,
        measured,
        fits_here,
        fastest if fastest and measured[fastest] * together > 1.0 else "",
        tuple(
            share.name
            for share, speed in zip(machines, speeds, strict=True)
            if speed is not None and speed.is_disturbed
        ),
    )


def _output_is_faster_on_worker(target: Resolved, workers: ConnectedWorkers) -> bool:
    """Return whether passes are faster with the output layer on the last worker than on this machine.

    Returns False if the target has no separate output layer, or if either machine was not measured.
    Measures the connection to the worker only if the result depends on it.

    Raises:
        WorkerError: The connection to the worker was lost.
        ModelFileError: A file of the target is damaged.
    """
    form, link = target.file_format, workers.links[-1]
    output = form.read_pass_weights(target.path).output if form.read_pass_weights else None
    here, there = saved_machine_speed(form), _from_json(link.status.speed)
    if output is None or here is None or there is None:
        return False
    # Compare with unlimited bandwidth first. If the worker is slower even then, the connection need not be
    # measured.
    return _saves_time(output, here, there, math.inf) and _saves_time(
        output, here, there, workers.speed_of(link).bytes_per_second
    )


def _saves_time(
    output: OutputLayer, here: MachineSpeed, there: MachineSpeed, bytes_per_second: float
) -> bool:
    """Return whether a worker computes the output layer faster, including the time to send logits back."""
    weights = PassWeights({output.type_name: output.size_bytes}, 0)
    sending = OUTPUT_ROWS * output.row_growth_bytes / bytes_per_second
    return there.pass_seconds(weights) + sending < here.pass_seconds(weights)


def saved_speed_json() -> dict[str, Any]:
    """Return this machine's measured speed for GGUF models as JSON values, or {} if it was not measured."""
    speed = saved_machine_speed(format_of("gguf"))
    if speed is None:
        return {}
    seconds = {name: each.curve.target_step_seconds for name, each in speed.types.items()}
    return {
        "layer_seconds": speed.layer_seconds,
        "seconds_per_byte": seconds,
        "busy_cores": speed.busy_cores,
    }


def _from_json(values: Mapping[str, Any]) -> MachineSpeed | None:
    """Return the speed of a worker's machine for single-token passes, or None if it was not measured."""
    try:
        seconds = {str(name): float(each) for name, each in values["seconds_per_byte"].items()}
        layer_seconds = float(values["layer_seconds"])
        # Older workers do not report their load.
        busy_cores = float(values.get("busy_cores", 0.0))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    numbers = (layer_seconds, *seconds.values())
    if not seconds or not all(math.isfinite(each) and each > 0 for each in numbers):
        return None
    types = {name: TypeSpeed(CostCurve((1,), (each,)), each) for name, each in seconds.items()}
    return MachineSpeed(types, layer_seconds, busy_cores)
