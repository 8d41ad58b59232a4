"""Recommend a model for this machine, from its memory and its measured speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgespec.assembly.planning import budget_for
from edgespec.assembly.speed_prediction import (
    SpeedPrediction,
    catalogue_weights,
    predict_entry,
    predict_speed,
    recommended_draft,
)
from edgespec.backends.base import Progress
from edgespec.backends.pass_weights import PassWeights
from edgespec.backends.registry import FileFormat, backend_of, format_of
from edgespec.catalog import (
    InstalledModel,
    ModelEntry,
    draft_options,
    find_installed,
    load_catalogue,
    resolve,
)
from edgespec.catalog.installed import InstalledModels
from edgespec.catalog.suggestion import needed_bytes, short_name
from edgespec.costs.machine_speed import MachineSpeed, measure_machine, saved_machine_speed
from edgespec.options import check_load_arguments

__all__ = ["Candidate", "Recommendation", "Task", "recommend"]

Task = Literal["chat", "code"]

# Comfortable and minimum acceptable speeds for reading along, in tokens per second.
_COMFORTABLE_SPEED, _ACCEPTABLE_SPEED = 8.0, 4.0
# Recommend a draft model only if its expected speed-up is at least this.
_MIN_SPEEDUP = 1.05
# Suggest another quantisation only if it is faster by at least this factor.
_MIN_QUANTISATION_GAIN = 1.15
# Do not suggest quantisations with fewer bits per weight than this.
_MIN_BITS = 4.5
# Part of the names of models that were trained to write programs.
_CODE_NAME = "coder"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that fits in memory, and its expected speed.

    Attributes:
        reference: A reference to the model.
        draft: A reference to its recommended draft model. Empty if there is none.
        is_installed: Whether the model is on this machine.
        parameters: Number of parameters.
        download_bytes: Size of the files of the model and its draft model that are not on this machine.
        needed_bytes: Approximate memory that both models need with a context of 8,192 tokens.
        speed: The predicted speed.
        faster_type: The quantisation type with which the model would be clearly faster because speculation
            would save more time. Empty if there is none.
        is_for_code: Whether the model was trained to write programs.
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

    @property
    def command(self) -> str:
        """The command that starts a chat with this model."""
        has_draft = self.draft and self.speed.speedup >= _MIN_SPEEDUP
        return f"edgespec chat --target {self.reference}" + (f" --draft {self.draft}" if has_draft else "")


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The models that fit this machine, largest first.

    Attributes:
        best: The recommended model, or None if no model fits.
        candidates: All models that fit.
        machine: The measured speed of this machine.
        budget_bytes: Memory that edgespec may use.
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
    """Recommend a model for this machine, and predict the speed of all that fit.

    Measures this machine the first time, which takes up to 20 seconds. Downloads nothing.

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
    saved = None if remeasure else saved_machine_speed(form)
    machine = saved or measure_machine(form, progress)
    budget = budget_for([backend_of(form.name)], arguments)
    candidates = [each for each in _candidates(form, machine) if each.needed_bytes <= budget.total_bytes]
    ordered = tuple(sorted(candidates, key=lambda each: -each.parameters))
    return Recommendation(_best(ordered, task), ordered, machine, budget.total_bytes)


def _candidates(form: FileFormat, machine: MachineSpeed) -> Iterator[Candidate]:
    """Yield the installed models of a format, then the other models of the catalogue."""
    installed = find_installed()
    usable = [each for each in installed.models if each.format == form.name and each.place != "embedded"]
    for model in usable:
        if weights := _weights(form, model.path, model.entry):
            yield _installed_candidate(model, weights, installed, machine)
    names = {each.entry.name for each in usable if each.entry}
    for entry in load_catalogue().entries:
        if entry.format == form.name and entry.repository and entry.name not in names:
            yield _catalogue_candidate(entry, names, machine)


def _installed_candidate(
    model: InstalledModel, weights: PassWeights, installed: InstalledModels, machine: MachineSpeed
) -> Candidate:
    draft = next(iter(draft_options(resolve(model.reference, allow_download=False), installed)), None)
    draft_weights = None
    if draft is not None:
        entry = load_catalogue().find(draft.reference)
        draft_weights = _weights(format_of(draft.format), draft.path, entry[0] if entry else None)
    speed = predict_speed(
        machine,
        weights,
        draft_weights,
        draft.parameters / model.info.parameters if draft else 0.0,
        draft.acceptance_rate if draft else None,
    )
    size_bytes = model.info.size_bytes + (draft.size_bytes if draft else 0)
    return Candidate(
        reference=model.reference,
        draft=draft.reference if draft else "",
        is_installed=True,
        parameters=model.info.parameters,
        download_bytes=draft.size_bytes if draft and draft.path is None else 0,
        needed_bytes=needed_bytes(size_bytes, model.info.parameters),
        speed=speed,
        is_for_code=_CODE_NAME in model.info.family.lower(),
    )


def _weights(form: FileFormat, path: Path | None, entry: ModelEntry | None) -> PassWeights | None:
    """Return the weights of a model's file or, if it is not on this machine, of its catalogue entry."""
    if path is not None and form.read_pass_weights is not None:
        return form.read_pass_weights(path)
    return catalogue_weights(entry) if entry else None


def _catalogue_candidate(entry: ModelEntry, installed: Set[str], machine: MachineSpeed) -> Candidate:
    draft, speed = recommended_draft(entry), predict_entry(entry, machine)
    assert speed is not None
    draft_bytes = draft.approximate_file_bytes if draft else 0
    return Candidate(
        reference=short_name(entry),
        draft=short_name(draft) if draft else "",
        is_installed=False,
        parameters=entry.parameters,
        download_bytes=entry.approximate_file_bytes
        + (draft_bytes if draft and draft.name not in installed else 0),
        needed_bytes=needed_bytes(entry.approximate_file_bytes + draft_bytes, entry.parameters),
        speed=speed,
        faster_type=_faster_type(entry, draft, speed, machine),
        is_for_code=_CODE_NAME in entry.name,
    )


def _faster_type(
    entry: ModelEntry, draft: ModelEntry | None, speed: SpeedPrediction, machine: MachineSpeed
) -> str:
    """Return a quantisation type with which the model and its draft model are clearly faster, or ''."""
    models = entry.file_format.benchmark_models
    if draft is None or models is None:
        return ""
    best, most = "", speed.fastest_tokens_per_second * _MIN_QUANTISATION_GAIN
    draft_weights, ratio = catalogue_weights(draft), draft.parameters / entry.parameters
    own_types = catalogue_weights(entry).bytes_of
    for name, bits in models.types.items():
        if name in own_types:
            continue
        other = predict_speed(machine, catalogue_weights(entry, name), draft_weights, ratio)
        if bits >= _MIN_BITS and other.fastest_tokens_per_second > most:
            best, most = name, other.fastest_tokens_per_second
    return best


def _best(candidates: Sequence[Candidate], task: Task) -> Candidate | None:
    """Return the largest model that is comfortably fast, or at least acceptable, or else the fastest one."""
    suitable = [each for each in candidates if each.is_for_code == (task == "code")] or list(candidates)
    for least in (_COMFORTABLE_SPEED, _ACCEPTABLE_SPEED):
        fast = [each for each in suitable if each.speed.fastest_tokens_per_second >= least]
        if fast:
            return max(fast, key=lambda each: (each.parameters, each.is_installed))
    return max(suitable, key=lambda each: each.speed.fastest_tokens_per_second, default=None)
