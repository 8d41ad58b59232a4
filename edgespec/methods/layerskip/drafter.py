"""Create the drafter that runs the first layers of the target (LayerSkip, arXiv 2404.16710).

Only models trained for early exit make good predictions from their lower layers. The exit layer is set by the
user, fixed when the model is prepared, or chosen by agreement and cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ModelFileError, OptionError
from edgespec.methods.base import Drafter, DrafterContext, MissingDrafter, why_no_view
from edgespec.methods.constants import AGREEMENT_TOKENS, MAX_EXIT_DRAFT_LENGTH, MIN_TRAINED_AGREEMENT
from edgespec.methods.costs.curve import CostFunction, assumed_cost
from edgespec.methods.model.making import draft_with
from edgespec.model.base import EarlyExit, LanguageModel
from edgespec.store.prepared_files import check_prepared, find_prepared, read_prepared
from edgespec.store.reference import Resolved

__all__ = [
    "EXIT_WIDTHS",
    "Exit",
    "ExitTable",
    "best_draft_length",
    "exit_table",
    "find_split_model",
    "greedy_reply",
    "make",
    "preparation",
]

# Verify pass widths, in tokens, to measure for choosing the exit layer.
EXIT_WIDTHS = range(1, MAX_EXIT_DRAFT_LENGTH + 2)


def preparation(context: DrafterContext) -> str:
    """Return the command that prepares the target for early exit, or an empty string if none is needed."""
    if "layerskip" in context.file_format.preparations:
        return f"edgespec prepare layerskip {context.reference}"
    return ""


def make(context: DrafterContext) -> Drafter | MissingDrafter:
    """Create the drafter, or explain why the target cannot exit early.

    Raises:
        OptionError: `exit_layer` was set, but the target was prepared for a single exit layer.
        CapabilityError: No exit layer makes replies faster, or the context is too small to measure this.
        ModelFileError: The prepared files are damaged.
    """
    target, facts = context.target, context.target.facts
    if command := preparation(context):
        return MissingDrafter(f"{facts.name} was not prepared for early exit", f"run `{command}` once")
    if "layerskip" not in facts.capabilities.self_draft_methods:
        return why_no_view(target, EarlyExit(1))
    exit_layer = context.arguments["exit_layer"]
    if context.file_format.fixed_exit:
        if exit_layer is not None:
            raise OptionError(
                f"exit_layer cannot be set for {facts.name}, which was prepared for a single exit layer",
                "omit --exit-layer, or run `edgespec prepare layerskip MODEL --exit E` again",
                option="exit_layer",
                code="option_not_supported",
            )
        exit_layer = int(read_prepared(context.files.path).settings["exit_layer"])
    view = target.self_draft(EarlyExit(exit_layer or _measure_best_exit(context)))
    return draft_with(context, view, "layerskip")


def _measure_best_exit(context: DrafterContext) -> int:
    """Find the fastest exit layer by measurement. Raises CapabilityError if none beats plain decoding."""
    target, measure = context.target, context.file_format.measure_exits
    assert measure is not None
    prompt = context.calibration_prompt()
    if len(prompt) >= target.free_tokens:
        raise CapabilityError(
            f"a context of {target.facts.context_tokens} tokens is too small to find the best exit layer",
            "set --exit-layer, or use a larger --context",
            code="early_exit_not_supported",
        )
    try:
        reply = greedy_reply(target, prompt)
        target.truncate(0)
        measured = measure(target, [*prompt, *reply], len(prompt) - 1)
        table = exit_table(*measured, context.measured_curve().v)
    finally:
        target.truncate(0)
    if not table.is_faster:
        raise CapabilityError(
            f"{target.facts.name}: {table.verdict}",
            "choose another method, or set --exit-layer",
            code="early_exit_not_supported",
        )
    return table.best.exit_layer


def greedy_reply(model: LanguageModel, prompt: Sequence[int]) -> list[int]:
    """Return the model's greedy reply to a prompt, limited by the context size.

    The KV cache must be empty before the call. Afterwards, it contains the prompt and the reply.
    """
    model.prefill(prompt[:-1])
    reply: list[int] = []
    token = prompt[-1]
    all_tokens = np.arange(model.facts.vocab_size)
    while len(reply) < AGREEMENT_TOKENS and model.free_tokens:
        token = int(model.verify(TokenTree.chain(token)).at(0, all_tokens).argmax())
        model.commit(())
        reply.append(token)
        if model.vocabulary.is_end(token):
            break
    return reply


@dataclass(frozen=True, slots=True)
class Exit:
    """A possible exit layer and its expected speed-up.

    Attributes:
        exit_layer: Number of layers run in a draft pass.
        agreement: Fraction of positions where these layers predict the same token as the full model.
        cost: Cost of drafting a token, as a multiple of the cost of a single-token pass of the full model.
        draft_length: Draft length with the highest expected speed-up.
        speed_up: Expected speed-up over plain decoding. 1.0 means no speed-up.
    """

    exit_layer: int
    agreement: float
    cost: float
    draft_length: int
    speed_up: float

    @property
    def is_faster(self) -> bool:
        return self.speed_up > 1.0

    @property
    def shortfall(self) -> str:
        """User-facing reason why early exit is not faster than plain decoding, or an empty string."""
        if self.is_faster:
            return ""
        reason = "does not benefit from" if self.agreement >= MIN_TRAINED_AGREEMENT else "was not trained for"
        return f"{reason} early exit, so it would not be faster here ({self.speed_up:.2f}x)"

    def to_json(self) -> dict[str, float]:
        return {
            "exit_layer": self.exit_layer,
            "agreement": round(self.agreement, 4),
            "cost": round(self.cost, 4),
            "draft_length": self.draft_length,
            "speed_up": round(self.speed_up, 3),
        }


@dataclass(frozen=True, slots=True)
class ExitTable:
    """A model's possible exit layers, from the lowest to the highest, with their expected speed-ups."""

    exits: tuple[Exit, ...]
    layer_count: int

    @property
    def best(self) -> Exit:
        """The exit layer with the highest expected speed-up. Ties favour the lowest layer."""
        return max(self.exits, key=lambda one: one.speed_up)

    @property
    def is_faster(self) -> bool:
        return self.best.is_faster

    @property
    def verdict(self) -> str:
        """User-facing summary of whether early exit is faster."""
        best = self.best
        accuracy = (
            f"after {best.exit_layer} of {self.layer_count} layers, it predicts the same token as the full"
            f" model {best.agreement:.0%} of the time"
        )
        if best.is_faster:
            return (
                f"{accuracy}; with a draft length of {best.draft_length}, replies are about"
                f" {best.speed_up:.2f}x as fast"
            )
        return f"it {best.shortfall}: {accuracy}"


def exit_table(
    agreements: Mapping[int, float],
    layer_bytes: Sequence[int],
    head_bytes: int,
    v: CostFunction = assumed_cost,
) -> ExitTable:
    """Estimate the speed-up of drafting with each exit layer.

    Args:
        agreements: Agreement with the full model for each exit layer, from 1 to the number of layers - 1.
        layer_bytes: Weight bytes of each layer.
        head_bytes: Weight bytes of the output head, which is read after the last layer.
        v: Returns the cost of a verify pass of a given width, as a multiple of the cost of a single-token
            pass.
    """
    total = sum(layer_bytes) + head_bytes
    exits = []
    for layer, agreement in sorted(agreements.items()):
        lower_cost = sum(layer_bytes[:layer]) / total
        draft_cost = lower_cost + head_bytes / total

        def cost(length: int, lower_cost: float = lower_cost, draft_cost: float = draft_cost) -> float:
            # The verify pass reuses the lower layers' results for all tokens except the last drafted one.
            return length * draft_cost + lower_cost + (1 - lower_cost) * v(length + 1)

        length, speed_up = best_draft_length(agreement, cost, MAX_EXIT_DRAFT_LENGTH)
        exits.append(Exit(layer, agreement, draft_cost, length, speed_up))
    return ExitTable(tuple(exits), len(layer_bytes))


def find_split_model(found: Resolved, *, is_named: bool) -> Resolved:
    """Return the model's files prepared for early exit, or `found` if there are none.

    Args:
        found: The resolved target.
        is_named: Whether the user named the method. If so, damaged or outdated files are an error.

    Raises:
        ModelFileError: The files are damaged or outdated.
    """
    if "layerskip" not in found.file_format.preparations:
        return found
    prepared = find_prepared("layerskip", found.path)
    if prepared is None:
        return found
    try:
        check_prepared(prepared, found.path)
    except ModelFileError:
        if is_named:
            raise
        return found
    return replace(found, path=prepared.folder, note=str(prepared.folder), format=prepared.kind)


def best_draft_length(
    acceptance_rate: float, cost: Callable[[int], float], longest: int
) -> tuple[int, float]:
    """Return the draft length with the highest expected speed-up, and that speed-up.

    The expected speed-up is S(k) = E(k) / cost(k), where E(k) = 1 + a + ... + a^k is the expected number of
    emitted tokens (Leviathan et al. 2023, arXiv 2211.17192).

    Args:
        acceptance_rate: The probability a that a drafted token is accepted.
        cost: Returns the duration of drafting and verifying k tokens, relative to a single-token target pass.
        longest: Maximum draft length to consider.
    """

    def speed_up(length: int) -> float:
        return sum(acceptance_rate**i for i in range(length + 1)) / cost(length)

    best = max(range(1, longest + 1), key=speed_up)
    return best, speed_up(best)
