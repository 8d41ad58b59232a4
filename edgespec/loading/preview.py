"""Implement `edgespec plan` and `edgespec.plan`, which plan how to load models without loading them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Unpack

from edgespec.loading.load_request import LoadRequest
from edgespec.loading.pairing import (
    ModelPair,
    find_pair,
    try_pair,
    with_own_adapters,
    with_projector,
    with_working_draft,
)
from edgespec.loading.planning import LoadPlan, budget_for, plan_pair
from edgespec.loading.speed_prediction import SpeedPrediction, no_reads, predict_pair
from edgespec.loading.workers import SpreadPrediction, connect_workers, predict_spread
from edgespec.memory.budget import check_room_to_plan
from edgespec.memory.plan import MemoryPlan as MemoryPlan
from edgespec.methods.model.windowed import AttentionWindow
from edgespec.model.base import Progress
from edgespec.model.memory_estimate import Pool as Pool
from edgespec.options.settings import LoadArguments
from edgespec.store.reference import Resolved
from edgespec.store.remote_header import resolve_head_metadata, resolve_metadata
from edgespec.system.heap import address_space_is_limited


class Preview:
    """The plan for loading a model, made without loading anything.

    Attributes:
        target, draft: Names of the models. `draft` is None if there is no draft model.
        notes: User-facing notes on how the model names were resolved to files, and on draft models that
            cannot be loaded.
        why_no_draft: Why there is no draft model, as a clause that mentions the draft model. Empty if there
            is one.
        heads: Names of the heads to draft with, most preferred first.
        why_no_head: Why there is no head, or why heads were dropped. Empty otherwise.
        why_heads: Notice that names the chosen heads. Empty if the user chose the head.
        plan: The memory plan.
        advice: Advice for the user if the plan does not fit. Otherwise empty.
        trained_context_tokens: Context length that the target was trained for. 0 if unknown.
        first_context_tokens: Initial size of the context, which grows on demand.
        draft_window: The draft model's attention window, or None if it attends to the whole context.
        prediction: The expected speed on this machine. None if `edgespec recommend` has not measured it, or
            if the target is on several machines.
        spread: The measured connections to the workers, and the expected speed with them. None without
            workers.
    """

    def __init__(
        self,
        planned: LoadPlan,
        prediction: SpeedPrediction | None = None,
        spread: SpreadPrediction | None = None,
    ) -> None:
        pair = planned.pair
        self.target: str = pair.target.name
        self.draft: str | None = pair.draft.name if pair.draft else None
        resolved = tuple(each.note for each in (pair.target, pair.draft) if each)
        self.notes: tuple[str, ...] = (*resolved, *filter(None, [pair.failed_drafts]))
        self.why_no_draft: str = pair.why_no_draft
        self.heads: tuple[str, ...] = tuple(head.name for head in pair.heads)
        self.why_no_head: str = pair.why_no_head
        self.why_heads: str = pair.why_heads
        self.plan: MemoryPlan = planned.plan
        self.advice: str = planned.advice
        self.trained_context_tokens: int = planned.trained_tokens
        self.first_context_tokens: int = planned.initial_context_tokens
        self.draft_window: AttentionWindow | None = planned.draft_window
        self.prediction: SpeedPrediction | None = prediction
        self.spread: SpreadPrediction | None = spread


def plan(
    target: str | PathLike[str] | None = None,
    draft: str | PathLike[str] | None = "auto",
    *,
    progress: Progress | None = None,
    **options: Unpack[LoadArguments],
) -> Preview:
    """Return what `load` would decide and how much memory it would use, without loading anything.

    For models that are not on this machine, only the metadata is downloaded. With workers, `plan` reserves
    them while it runs, and measures the connections to them.

    Args:
        target: The model to run, as for `load`.
        draft: The draft model, as for `load`.
        progress: Called with a description and the completed fraction. Returning False cancels planning.
        **options: See `edgespec.LoadArguments`.

    Raises:
        EdgespecError: Any error that `load` raises. A plan that does not fit in memory is not an error,
            unless there is too little memory to read a model's metadata.
    """
    request = LoadRequest.read(target, draft, options)
    check_room_to_plan()
    if address_space_is_limited():
        # Import the modules that `load` needs, so that the plan does not count their address space as free.
        import_module("edgespec.api.loading")
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:

        def find(reference: str) -> Resolved:
            return resolve_metadata(reference, Path(folder), progress)

        def find_head(reference: str) -> Resolved:
            return resolve_head_metadata(reference, Path(folder), progress)

        def find_models(failed_drafts: Mapping[Path, str]) -> ModelPair:
            return find_pair(
                request.target,
                request.draft,
                request.drafting,
                progress,
                request.options,
                find,
                find_head,
                failed_drafts,
            )

        return with_working_draft(find_models, partial(_preview, request=request, progress=progress))


def _preview(pair: ModelPair, request: LoadRequest, progress: Progress | None) -> Preview:
    """Plan how to load a pair of models. Raises the same errors as `plan`."""
    load_options = with_own_adapters(request.options, pair.target)
    if not request.trust:
        # With a limit of 0 bytes, the trial reads only the metadata.
        try_pair(pair, replace(load_options, memory_bytes=0), progress)
    budget = budget_for(pair.backends, request.drafting.arguments)
    with ExitStack() as undo:
        connected = connect_workers(request.machines, pair, load_options, undo, progress)
        connected = with_projector(connected, pair.target, request.projector)
        planned = plan_pair(pair, request.drafting, connected, budget, request.plan)
        if connected.workers is None:
            streaming = planned.plan.streaming
            read_seconds = streaming.seconds_of_pass if streaming else no_reads
            prediction = predict_pair(
                planned.pair, read_seconds=read_seconds, batch_tokens=planned.options.batch_tokens
            )
            return Preview(planned, prediction)
        whole = plan_pair(pair, request.drafting, load_options, budget, request.plan)
        spread = predict_spread(
            planned.pair.target,
            connected.workers,
            planned.plan.machines,
            fits_here=whole.plan.fits_without_streaming,
        )
        return Preview(planned, spread=spread)
