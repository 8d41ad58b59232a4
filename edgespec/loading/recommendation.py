"""Recommend a model for this machine, based on its memory and measured speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edgespec.loading.constants import (
    ACCEPTABLE_SPEED,
    COMFORTABLE_SPEED,
    MIN_BITS,
    MIN_DRAFT_SPEEDUP,
    MIN_QUANTISATION_GAIN,
)
from edgespec.loading.model_list import catalogue_models, installed_models
from edgespec.loading.planning import budget_for
from edgespec.loading.speed_prediction import (
    SpeedPrediction,
    catalogue_weights,
    predict_speed,
    recommended_draft,
)
from edgespec.methods.costs.machine_speed import MachineSpeed, measure_machine, saved_machine_speed
from edgespec.model.base import Progress
from edgespec.model.registry import FileFormat, backend_of, format_of
from edgespec.options.settings import check_load_arguments
from edgespec.store.catalogue import ModelEntry
from edgespec.store.installed import find_installed
from edgespec.system.cores import CPU_LOAD, MAX_BUSY_CORES

__all__ = ["Candidate", "Recommendation", "Task", "recommend"]

Task = Literal["chat", "code"]

# Substrings that identify models trained to write code.
_CODE_NAMES = ("coder", "devstral")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that can run on this machine, and its expected speed.

    Attributes:
        reference: A reference to the model.
        draft: A reference to its recommended draft model. Empty if there is none.
        is_installed: Whether the model is on this machine.
        parameters: Number of parameters.
        download_bytes: Size of the files of the model and its draft model that are not on this machine.
        needed_bytes: Approximate memory that both models need with a context of 8,192 tokens.
        speed: The predicted speed.
        faster_type: A quantisation type that would make the model noticeably faster, because speculation
            would save more time. Empty if there is none.
        is_for_code: Whether the model was trained to write code.
        is_streamed: Whether the model is larger than memory, so that each pass reads weights from disk.
    """

    reference: str
    draft: str
    is_installed: bool
    parameters: int
    download_bytes: int
    needed_bytes: int
    speed: SpeedPrediction
    faster_type: str = ""
    is_for_code: bool = False
    is_streamed: bool = False

    @property
    def uses_draft(self) -> bool:
        """Whether the draft model makes replies noticeably faster."""
        return bool(self.draft) and self.speed.speedup >= MIN_DRAFT_SPEEDUP

    @property
    def command(self) -> str:
        """The command that starts a chat with this model."""
        return f"edgespec chat --target {self.reference}" + (
            f" --draft {self.draft}" if self.uses_draft else ""
        )


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The models that can run on this machine, largest first.

    Attributes:
        best: The recommended model, or None if no model can run.
        candidates: All models that can run.
        machine: The measured speed of this machine.
        budget_bytes: Memory that edgespec may use, in bytes.
    """

    best: Candidate | None
    candidates: tuple[Candidate, ...]
    machine: MachineSpeed
    budget_bytes: int


def recommend(
    task: Task = "chat",
    *,
    memory: str | int | None = None,
    reserve: str | int | None = None,
    remeasure: bool = False,
    progress: Progress | None = None,
) -> Recommendation:
    """Recommend a model for this machine, and predict the speed of every model that can run.

    The machine's speed is measured on first use, and again if other programs disturbed the last measurement
    but are no longer busy. A measurement takes up to 20 seconds. Nothing is downloaded.

    Args:
        task: What the model will be used for.
        memory: Memory that edgespec may use, such as "8GiB". Defaults to the available memory.
        reserve: Memory to leave for other programs if `memory` is None.
        remeasure: Whether to measure this machine even if saved measurements exist.
        progress: Called with a description and the completed fraction. Returning False cancels.

    Raises:
        OptionError: A size is invalid.
        CancelledError: `progress` returned False.
        EdgespecError: A temporary file for the measurement cannot be written.
    """
    arguments = check_load_arguments({"memory": memory, "reserve": reserve})
    form = format_of("gguf")
    machine = None if remeasure else saved_machine_speed(form)
    # On a machine that is always busy, remeasuring every time would not give a better result.
    if machine is None or (machine.is_disturbed and CPU_LOAD.busy_cores() <= MAX_BUSY_CORES):
        machine = measure_machine(form, progress)
    budget = budget_for([backend_of(form.name)], arguments)
    candidates = _candidates(form, machine, budget.total_bytes)
    ordered = tuple(sorted(candidates, key=lambda each: -each.parameters))
    return Recommendation(_best(ordered, task), ordered, machine, budget.total_bytes)


def _candidates(form: FileFormat, machine: MachineSpeed, budget_bytes: int) -> Iterator[Candidate]:
    """Yield the models of a format that can run: the installed ones, then the rest of the catalogue."""
    installed = find_installed()
    for model in (
        *installed_models(form, installed, machine, budget_bytes),
        *catalogue_models(form, installed, machine, budget_bytes),
    ):
        if model.can_run and model.speed is not None:
            listed = None if model.is_installed else model.entry
            yield Candidate(
                reference=model.reference,
                draft=model.draft,
                is_installed=model.is_installed,
                parameters=model.parameters,
                download_bytes=model.download_bytes,
                needed_bytes=model.needed_bytes,
                speed=model.speed,
                faster_type=_faster_type(listed, model.speed, machine) if listed else "",
                is_for_code=any(
                    name in (listed.name if listed else model.family.lower()) for name in _CODE_NAMES
                ),
                is_streamed=model.is_streamed,
            )


def _faster_type(entry: ModelEntry, speed: SpeedPrediction, machine: MachineSpeed) -> str:
    """Return a quantisation type that makes the model and its draft model noticeably faster, or ''."""
    models, draft = entry.file_format.benchmark_models, recommended_draft(entry)
    if draft is None or models is None:
        return ""
    best, most = "", speed.fastest_tokens_per_second * MIN_QUANTISATION_GAIN
    draft_weights, ratio = catalogue_weights(draft), draft.parameters / entry.parameters
    own_types = catalogue_weights(entry).bytes_of
    for name, bits in models.types.items():
        if name in own_types:
            continue
        other = predict_speed(machine, catalogue_weights(entry, name), draft_weights, ratio)
        if bits >= MIN_BITS and other.fastest_tokens_per_second > most:
            best, most = name, other.fastest_tokens_per_second
    return best


def _best(candidates: Sequence[Candidate], task: Task) -> Candidate | None:
    """Return the largest comfortably fast model, else the largest acceptably fast one, else the fastest."""
    suitable = [each for each in candidates if each.is_for_code == (task == "code")] or list(candidates)
    for least in (COMFORTABLE_SPEED, ACCEPTABLE_SPEED):
        fast = [each for each in suitable if each.speed.fastest_tokens_per_second >= least]
        if fast:
            return max(fast, key=lambda each: (each.parameters, each.is_installed))
    return max(suitable, key=lambda each: each.speed.fastest_tokens_per_second, default=None)
