"""Create the drafter that runs the first layers of the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, OptionError
from edgespec.methods.base import Drafter
from edgespec.methods.constants import AGREEMENT_TOKENS
from edgespec.methods.context import DrafterContext, MissingDrafter, why_no_view
from edgespec.methods.layerskip.exit_table import exit_table
from edgespec.methods.model.making import draft_with
from edgespec.model.base import LanguageModel
from edgespec.model.self_draft_methods import EarlyExit
from edgespec.store.prepared.prepared_files import read_prepared

__all__ = ["greedy_reply", "make", "preparation"]


def preparation(context: DrafterContext) -> str:
    """Return the command that prepares the target for early exit, or an empty string if none is needed."""
    if "layerskip" in context.file_format.preparations:
        return f"edgespec prepare layerskip {context.reference}"
    return ""


def make(context: DrafterContext) -> Drafter | MissingDrafter:
    """Create the drafter, or explain why the target cannot exit early.

    Raises:
        OptionError: `exit_layer` was set, but the files are split at another layer.
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
            f"a context of {target.facts.context_tokens} tokens is too small to measure early exits",
            "pass --exit-layer, or use a larger --context",
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
            "choose another method, or pass --exit-layer",
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
