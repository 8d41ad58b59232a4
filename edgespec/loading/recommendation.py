"""Recommend a model for this machine, based on its memory and measured speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edgespec.loading.constants import (
    ACCEPTABLE_SPEED,
    COMFORTABLE_SPEED,
    MIN_BITS,
    MIN_DRAFT_SPEEDUP,
    MIN_QUANTISATION_GAIN,
)
from edgespec.loading.model_list import AvailableModel, catalogue_models, installed_models
from edgespec.loading.pairing import ModelPair
from edgespec.loading.planning import budget_for
from edgespec.loading.speed_prediction import (
    SpeedPrediction,
    catalogue_weights,
    predict_pair,
    predict_speed,
    recommended_draft,
)
from edgespec.methods.costs.machine_speed import MachineSpeed, measure_machine, saved_machine_speed
from edgespec.model.base import Progress
from edgespec.model.registry import FileFormat, backend_of, format_of
from edgespec.options.settings import check_load_arguments
from edgespec.store.catalogue import ModelEntry
from edgespec.store.constants import ASSUMED_SIZE_RATIO
from edgespec.store.installed import InstalledModels, find_installed
from edgespec.store.reference import Resolved
from edgespec.store.speedup_estimate import estimate_speedup
from edgespec.system.cores import CPU_LOAD, MAX_BUSY_CORES

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
        download_bytes: Size of the files of the model, its projector and its draft model that are not on this
            machine.
        needed_bytes: Approximate memory that both models need with a context of 8,192 tokens, and for images
            if that fits too.
        speed: The predicted speed.
        faster_type: A quantisation type that would make the model noticeably faster, because speculation
            would save more time. Empty if there is none.
        is_for_code: Whether the model was trained to write code.
        is_streamed: Whether the model is larger than memory, so that each pass reads weights from disk.
        has_heads: Whether the model can draft with a head. The prediction does not include heads.
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
    has_heads: bool = False

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
    """The models that can run on this machine.

    Attributes:
        best: The recommended model, or None if no model can run.
        candidates: All models that can run, best first: those for the task before others, comfortably fast
            ones before acceptably fast ones, each largest first, and then those that are too slow, fastest
            first.
        machine: The measured speed of this machine.
        budget_bytes: Memory that edgespec may use, in bytes.
        why_no_draft: Why no draft model makes the recommended model faster, and which model would be faster
            with one. Empty if a draft model helps.
    """

    best: Candidate | None
    candidates: tuple[Candidate, ...]
    machine: MachineSpeed
    budget_bytes: int
    why_no_draft: str = ""


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
    # On a machine that is always busy, remeasuring every time would not give better results.
    if machine is None or (machine.is_disturbed and CPU_LOAD.busy_cores() <= MAX_BUSY_CORES):
        machine = measure_machine(form, progress)
    budget = budget_for([backend_of(form.name)], arguments)
    candidates = _candidates(form, machine, budget.total_bytes)
    ordered = tuple(sorted(candidates, key=lambda each: _rank(each, task)))
    best = ordered[0] if ordered else None
    why = "" if best is None or best.uses_draft else _why_no_draft(best, ordered, machine)
    return Recommendation(best, ordered, machine, budget.total_bytes, why)


def _why_no_draft(best: Candidate, candidates: Sequence[Candidate], machine: MachineSpeed) -> str:
    if best.has_heads and not best.draft:
        return ""
    cost = f"on this machine, {cost_text(best.speed.pass_costs[2])}"
    reason = (
        f"The draft model {best.draft} does not make {best.reference} faster, because {cost}"
        if best.draft
        else f"edgespec knows no draft model for {best.reference}, and {cost}"
    )
    return f"{reason}; {_who_gains(candidates, machine)}."


def cost_text(cost: float) -> str:
    """Describe the duration of a pass of two tokens, relative to a single-token pass."""
    return f"checking two tokens at once takes {cost:.2f} times as long as one token"


def why_no_speedup(target: Resolved, draft: Resolved | None) -> str:
    """Explain why a model is not faster with its draft model on this machine, and which model would be.

    Args:
        target: The model.
        draft: The draft model that would be used, or None if there is none.

    Returns:
        A clause, or an empty string if the draft model is expected to help.

    Raises:
        ModelFileError: A file is damaged.
    """
    speed = predict_pair(ModelPair(target, draft, ""))
    if speed is None:
        is_measurable = target.file_format.benchmark_models is not None and not draft
        return "not measured yet; `edgespec recommend` measures this machine" if is_measurable else ""
    if speed.speedup >= MIN_DRAFT_SPEEDUP:
        return ""
    reason = "none is expected" if draft else "none without a draft model or head, except for repeated text"
    return "; ".join(filter(None, (reason, cost_text(speed.pass_costs[2]), draft_advice())))


def draft_advice(budget_bytes: int | None = None) -> str:
    """Return a clause that recommends the model that benefits most from a draft model on this machine.

    Args:
        budget_bytes: Memory that edgespec may use. Defaults to the available memory.

    Returns:
        The clause, which names a quantisation if no model in the catalogue would be faster. Empty if this
        machine has not been measured.
    """
    form = format_of("gguf")
    machine = saved_machine_speed(form)
    if machine is None:
        return ""
    if budget_bytes is None:
        budget_bytes = budget_for([backend_of(form.name)], check_load_arguments({})).total_bytes
    models = catalogue_models(form, InstalledModels((), (), ()), machine, budget_bytes)
    return _who_gains((model for model in models if model.fits), machine)


def _who_gains(models: Iterable[Candidate | AvailableModel], machine: MachineSpeed) -> str:
    gains = [
        (each.speed.speedup, each.reference, each.draft)
        for each in models
        if each.draft and each.speed and not each.is_streamed
    ]
    gain, target, draft = max(gains, default=(1.0, "", ""))
    if gain >= MIN_DRAFT_SPEEDUP:
        return f"{target} would be about {gain:.1f}x as fast with the draft model {draft}"
    form = format_of("gguf")
    bits = form.benchmark_models.types if form.benchmark_models else {}
    types = [
        (estimate_speedup(ASSUMED_SIZE_RATIO, ASSUMED_SIZE_RATIO, pass_cost=each.curve.v), name)
        for name, each in machine.types.items()
        if bits.get(name, 0.0) >= MIN_BITS
    ]
    gain, name = max(types, default=(1.0, ""))
    if gain >= MIN_DRAFT_SPEEDUP:
        return f"with a draft model, models in the quantisation {name} gain most (about {gain:.1f}x)"
    return "no model in the catalogue would be faster with a draft model"


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
                has_heads=model.entry is not None and bool(model.entry.heads),
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
        saves_more = other.speedup > speed.speedup and other.fastest_tokens_per_second > most
        if bits >= MIN_BITS and saves_more:
            best, most = name, other.fastest_tokens_per_second
    return best


def _rank(candidate: Candidate, task: Task) -> tuple[object, ...]:
    """Return a sort key that puts the best model for a task first. See `Recommendation.candidates`."""
    speed = candidate.speed.fastest_tokens_per_second
    is_other_task = candidate.is_for_code != (task == "code")
    shortfall = next(
        (n for n, least in enumerate((COMFORTABLE_SPEED, ACCEPTABLE_SPEED)) if speed >= least), 2
    )
    merit = candidate.parameters if shortfall < 2 else speed
    return is_other_task, shortfall, -merit, not candidate.is_installed
