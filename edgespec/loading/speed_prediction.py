"""Predict how fast models run on this machine, before they are loaded or downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from edgespec.loading.constants import PREDICTED_PROMPT_TOKENS, TYPICAL_LAYERS
from edgespec.loading.pairing import ModelPair
from edgespec.methods.costs.machine_speed import MachineSpeed, saved_machine_speed
from edgespec.model.base import LoadOptions
from edgespec.model.model_facts import PassWeights
from edgespec.store.catalogue import ModelEntry, load_catalogue
from edgespec.store.speedup_estimate import estimate_speedup, measured_acceptance_rate

_BATCH_TOKENS = LoadOptions().batch_tokens


@dataclass(frozen=True, slots=True)
class SpeedPrediction:
    """The expected speed of a model with a short context.

    Attributes:
        tokens_per_second: Speed of plain decoding.
        pass_costs: Durations of passes of 2, 4 and 8 tokens, relative to a single-token pass.
        prompt_seconds: Time to first token for a prompt of 1,000 tokens.
        speedup: Speed-up with the recommended draft model. 1 if there is none.
        is_disturbed: Whether other programs were busy when this machine was measured, so that the speed is
            probably too low.
    """

    tokens_per_second: float
    pass_costs: Mapping[int, float]
    prompt_seconds: float
    speedup: float = 1.0
    is_disturbed: bool = False

    @property
    def fastest_tokens_per_second(self) -> float:
        """Speed with the recommended draft model."""
        return self.tokens_per_second * self.speedup

    def to_json(self) -> dict[str, object]:
        """Return the prediction as JSON-compatible values."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_with_draft": self.fastest_tokens_per_second,
            "pass_costs": {str(width): cost for width, cost in self.pass_costs.items()},
            "prompt_1000_seconds": self.prompt_seconds,
            "speedup": self.speedup,
            "measured_while_busy": self.is_disturbed,
        }


def no_reads(_width: int) -> float:
    """Return the time that a pass of a model in memory spends reading its weights from disk."""
    return 0.0


def predict_speed(
    speed: MachineSpeed,
    target: PassWeights,
    draft: PassWeights | None,
    size_ratio: float = 0.0,
    acceptance_rate: float | None = None,
    *,
    read_seconds: Callable[[int], float] = no_reads,
    batch_tokens: int = _BATCH_TOKENS,
) -> SpeedPrediction:
    """Predict the speed of a target, alone and with a draft model.

    Args:
        speed: The measured speed of this machine.
        target: The weights of the target.
        draft: The weights of the draft model, or None.
        size_ratio: The draft model's parameter count divided by the target's.
        acceptance_rate: The pair's measured acceptance rate. If None, it is estimated from `size_ratio`.
        read_seconds: Returns the time that a pass over a number of tokens spends reading weights from disk
            while it computes.
        batch_tokens: Number of prompt tokens per pass.
    """
    in_memory = speed.pass_seconds(target)
    step = max(in_memory, read_seconds(1))
    prompt_passes = ceil(PREDICTED_PROMPT_TOKENS / batch_tokens)
    speedup = 1.0

    def v(width: int) -> float:
        return max(in_memory * speed.v(target, width), read_seconds(width)) / step

    if draft is not None:
        speedup = estimate_speedup(
            size_ratio,
            speed.pass_seconds(draft) / step,
            acceptance_rate=acceptance_rate,
            pass_cost=v,
        )
    return SpeedPrediction(
        tokens_per_second=1.0 / step,
        pass_costs={width: v(width) for width in (2, 4, 8)},
        prompt_seconds=max(
            speed.prompt_seconds(target, PREDICTED_PROMPT_TOKENS), prompt_passes * read_seconds(batch_tokens)
        ),
        speedup=max(1.0, speedup),
        is_disturbed=speed.is_disturbed,
    )


def predict_pair(
    pair: ModelPair,
    *,
    read_seconds: Callable[[int], float] = no_reads,
    batch_tokens: int = _BATCH_TOKENS,
) -> SpeedPrediction | None:
    """Predict the speed of a pair from its files, or return None if this machine has not been measured.

    Args:
        pair: The target and its draft model.
        read_seconds: Returns the time that a pass over a number of tokens spends reading weights from disk
            while it computes.
        batch_tokens: Number of prompt tokens per pass.

    Raises:
        ModelFileError: A file is damaged.
    """
    form = pair.target.file_format
    speed = saved_machine_speed(form)
    if speed is None or form.read_pass_weights is None:
        return None
    draft = pair.draft if pair.draft and pair.draft.format == form.name else None
    weights = form.read_pass_weights(pair.target.path)
    if draft is None:
        return predict_speed(speed, weights, None, read_seconds=read_seconds, batch_tokens=batch_tokens)
    parameters = [form.read_info(each.path).parameters for each in (draft, pair.target)]
    return predict_speed(
        speed,
        weights,
        form.read_pass_weights(draft.path),
        parameters[0] / max(parameters[1], 1),
        measured_acceptance_rate(pair.target, draft),
        read_seconds=read_seconds,
        batch_tokens=batch_tokens,
    )


def predict_entry(
    entry: ModelEntry,
    speed: MachineSpeed | None = None,
    *,
    read_seconds: Callable[[int], float] = no_reads,
) -> SpeedPrediction | None:
    """Predict the speed of a catalogue model and its recommended draft model, without their files.

    Args:
        entry: The model's catalogue entry.
        speed: The measured speed of this machine. Defaults to the saved speed.
        read_seconds: Returns the time that a pass over a number of tokens spends reading weights from disk
            while it computes.

    Returns:
        The prediction, or None if this machine has not been measured with the model's file format.
    """
    speed = speed or saved_machine_speed(entry.file_format)
    if speed is None:
        return None
    draft = recommended_draft(entry)
    return predict_speed(
        speed,
        catalogue_weights(entry),
        catalogue_weights(draft) if draft else None,
        draft.parameters / entry.parameters if draft else 0.0,
        read_seconds=read_seconds,
    )


def recommended_draft(entry: ModelEntry) -> ModelEntry | None:
    """Return the catalogue entry of a model's recommended draft model, or None if there is none."""
    found = load_catalogue().find(entry.drafts[0]) if entry.drafts else None
    return found[0] if found else None


def catalogue_weights(entry: ModelEntry, type_name: str = "") -> PassWeights:
    """Estimate which weights each pass of a catalogue model reads, without needing its files.

    Args:
        entry: The model's catalogue entry.
        type_name: Quantisation type to assume for all weights. Defaults to the typical mix of the model's
            quantisation.
    """
    models = entry.file_format.benchmark_models
    size_bytes = entry.active_fraction * entry.approximate_file_bytes
    mixture: Mapping[str, float] = {type_name or entry.quantisation: 1.0}
    if models and type_name:
        size_bytes = entry.active_fraction * entry.parameters * models.types[type_name] / 8
    elif models:
        mixture = models.mixtures.get(entry.quantisation, mixture)
    layers = next(count for most, count in TYPICAL_LAYERS if entry.parameters <= most)
    return PassWeights({name: round(share * size_bytes) for name, share in mixture.items()}, layers)
