"""`edgespec.load`, which loads models and returns a `Runtime`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Unpack

from edgespec.api.runtime import Runtime
from edgespec.decode.session import SessionModels
from edgespec.errors import ModelFileError, OptionError
from edgespec.loading.drafting import DrafterFactory
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.exact import load_exact_target
from edgespec.loading.load_request import LoadRequest
from edgespec.loading.pair_loading import load_draft
from edgespec.loading.pairing import (
    ModelPair,
    find_pair,
    loading_draft,
    try_pair,
    with_own_adapters,
    with_projector,
    with_working_draft,
)
from edgespec.loading.planning import LoadPlan, budget_for, check_fits, plan_pair
from edgespec.loading.prefix_cache_options import create_prefix_cache, file_states
from edgespec.loading.workers import connect_workers
from edgespec.memory.budget import check_room_to_plan
from edgespec.methods.costs.target_costs import FreeCosts
from edgespec.model.base import EarlyExit, LoadOptions, Progress
from edgespec.options.methods import method
from edgespec.options.settings import LoadArguments, as_bytes
from edgespec.store.installed import recommended_sampling
from edgespec.store.reference import Resolved
from edgespec.store.speedup_estimate import AcceptanceRecorder, measured_acceptance_rate
from edgespec.system.facts import Facts
from edgespec.system.files import MappedFiles, unwritable_cache

__all__ = ["always_draft", "load"]

_ignores_costs = ContextVar("ignores_costs", default=False)


@contextmanager
def always_draft() -> Iterator[None]:
    """Make models loaded in this `with` block always draft, even if that saves no time.

    Tests and `edgespec verify` need this, because they compare replies with and without drafting.
    """
    before = _ignores_costs.set(True)
    try:
        yield
    finally:
        _ignores_costs.reset(before)


def load(
    target: str | PathLike[str] | None = None,
    draft: str | PathLike[str] | None = "auto",
    *,
    progress: Progress | None = None,
    **options: Unpack[LoadArguments],
) -> Runtime:
    """Load a model, and a draft model to speed it up.

    Missing models are downloaded. Models that would not fit in memory are not loaded.

    Args:
        target: The model to run: a path, `user/repo:quant`, or a name such as `8b-q4`. Defaults to
            `smollm2` or, if that is not installed, to `demo`.
        draft: The draft model. `auto` chooses the best one on this machine; `none` or None disables it.
        progress: Called with a description and the completed fraction. Returning False cancels loading.
        **options: See `edgespec.LoadArguments`. `docs/options.md` lists them with their defaults.

    Returns:
        A Runtime with the loaded models. Close it after use, or use it in a `with` statement.

    Raises:
        EdgespecError: Loading failed. The error gives the reason and a hint.
    """
    if progress is not None and not callable(progress):
        raise OptionError(
            f"progress must be a function, not {progress!r}",
            "pass a function that takes a description and a fraction",
        )
    request = LoadRequest.read(target, draft, options)
    check_room_to_plan()

    def find(failed: Mapping[Path, str]) -> ModelPair:
        return find_pair(
            request.target, request.draft, request.drafting, progress, request.options, failed_drafts=failed
        )

    return with_working_draft(find, partial(_load_pair, request=request, progress=progress))


def _load_pair(pair: ModelPair, request: LoadRequest, progress: Progress | None) -> Runtime:
    """Plan and load a pair of models. Raises the same errors as `load`."""
    with ExitStack() as undo:
        connected = connect_workers(request.machines, pair, request.options, undo, progress)
        load_options = with_own_adapters(connected, pair.target)
        load_options = with_projector(load_options, pair.target, request.projector)
        trial_notice = ""
        if not request.trust:
            # If workers hold the target's layers, load only its metadata in the trial, because its weights
            # may not fit in this machine's memory.
            trial = load_options if request.machines is None else replace(load_options, memory_bytes=0)
            pair, trial_notice = try_pair(pair, trial, progress)
        budget = budget_for(pair.backends, request.drafting.arguments)
        planned = plan_pair(pair, request.drafting, load_options, budget, request.plan)
        check_fits(planned)
        runtime = _load_planned(planned, trial_notice, progress)
        # The target now owns the workers and releases them when it is closed.
        undo.pop_all()
    return runtime


def _load_planned(planned: LoadPlan, trial_notice: str, progress: Progress | None) -> Runtime:
    """Load both models and create the runtime. On failure, close everything that was loaded."""
    pair, drafting, options = planned.pair, planned.drafting, planned.options
    arguments = drafting.arguments
    states = file_states(pair.target.path, options.adapters)
    with ExitStack() as undo:
        loaded_target = load_exact_target(
            pair,
            planned.target_options,
            arguments["exactness"],
            exits_early=pair.target.file_format.fixed_exit or EarlyExit.method in drafting.named_drafters,
            measures_costs=arguments["measure_costs"],
            file_states=states,
            progress=progress,
        )
        undo.callback(loaded_target.close)
        models, costs, exactness = loaded_target.models, loaded_target.costs, loaded_target.exactness
        model = models[0]
        with loading_draft(pair):
            drafts = load_draft(pair, models, drafting, options, progress)
        for loaded in filter(None, drafts):
            undo.callback(loaded.model.close)
        assumed_costs = FreeCosts() if _ignores_costs.get() else costs
        session_models: list[SessionModels] = []
        for each, draft in zip(models, drafts, strict=True):
            drafters, notices = DrafterFactory(
                pair,
                each,
                draft,
                drafting,
                assumed_costs,
                progress,
                shares_passes=len(models) > 1,
                live_costs=session_models[0].drafters.live_costs if session_models else None,
            ).make_all()
            undo.callback(drafters.close)
            for method in drafting.methods:
                # Report a missing drafter now rather than at the first reply.
                drafters.choose(drafters.resolve(method))
            session_models.append(SessionModels(each, draft.model if draft else None, drafters))
        planned = _with_loaded_copies(planned, drafters.names)
        entry = pair.target.entry
        notices = (
            entry.notice if entry else "",
            _unused_notice(pair.target),
            _unsaved_notice(),
            trial_notice,
            pair.failed_drafts,
            planned.notice,
            model.facts.notice,
            "" if exactness.bits or exactness.requested == "off" else exactness.reason,
            *notices,
            drafts[0].notice if drafts[0] else "",
        )
        runtime = Runtime(
            *session_models[0],
            defaults={
                "method": arguments["method"],
                "draft_length": arguments["draft_length"],
                "acceptance": arguments["acceptance"],
            },
            recommended=recommended_sampling(pair.target, entry),
            costs=costs,
            notice=" · ".join(filter(None, notices)),
            plan=planned.plan,
            record=_acceptance_recorder(pair, drafting, options),
            prefix_cache=create_prefix_cache(
                arguments["prefix_cache"],
                as_bytes(arguments["prefix_cache_disk"]),
                model,
                [head.state for head in session_models[0].drafters.heads],
                loaded_target.options,
                costs,
                planned.plan,
                states,
            ),
            unadapted_acceptance=_unadapted_acceptance(pair, options),
            other_template="template" in pair.target.unused,
            mapped=_mapped_files(pair, options, drafters.names),
            more_models=session_models[1:],
        )
        undo.pop_all()
        return runtime


def _with_loaded_copies(planned: LoadPlan, drafters: Collection[str]) -> LoadPlan:
    """Return the plan without the low-bit copies of streamed weights if no drafter has loaded them."""
    streaming = planned.plan.streaming
    if streaming is None or any(method(name).needs == "copy" for name in drafters):
        return planned
    plan = planned.plan
    items = tuple(item for item in plan.items if item.role != "low-bit copy")
    return replace(planned, plan=replace(plan, items=items, streaming=replace(streaming, substitute_bytes=0)))


def _unsaved_notice() -> str:
    """Return a notice if measurements cannot be saved, which makes every start as slow as the first."""
    reason = unwritable_cache() or Facts().notice
    if not reason:
        return ""
    return (
        f"edgespec checks and measures the models again every time it starts, because {reason}; set"
        " EDGESPEC_CACHE_DIR to a writable folder"
    )


def _unused_notice(target: Resolved) -> str:
    """Return a notice that lists which of an Ollama model's settings are ignored."""
    names = [name for name in target.unused if name != "template"]
    if not names:
        return ""
    return (
        f"edgespec ignores these Ollama settings of {target.name}: {', '.join(names)}; to use them, set"
        " options such as --system"
    )


def _mapped_files(pair: ModelPair, options: LoadOptions, drafters: Collection[str]) -> MappedFiles:
    paths: list[Path] = []
    for found in (pair.target, pair.draft):
        if found and found.file_format.mapped and options.mmap:
            with suppress(OSError, ModelFileError):
                paths += found.file_format.files(found.path)
    if pair.target.file_format.mapped and options.mmap:
        heads = (option.head.path for option in pair.heads if option.head)
        paths += [path for path in heads if path and path.is_file()]
    for name in drafters if options.mmap else ():
        with suppress(ModelFileError):
            copy: Resolved | None = method(name).find_copy(pair.target, True)
            if copy is not None and copy.file_format.mapped:
                paths += copy.file_format.files(copy.path)
    return MappedFiles(paths)


def _unadapted_acceptance(pair: ModelPair, options: LoadOptions) -> float | None:
    """Return the pair's measured acceptance rate without adapters, or None if there are no adapters."""
    if pair.draft is None or not options.adapters:
        return None
    return measured_acceptance_rate(pair.target, pair.draft)


def _acceptance_recorder(
    pair: ModelPair, drafting: DraftingOptions, options: LoadOptions
) -> AcceptanceRecorder | None:
    """Return a recorder for the draft model's acceptance rate, or None if the options would skew the rate."""
    arguments = drafting.arguments
    distorts = (
        options.adapters or arguments["draft_branches"] or arguments["draft_confidence"] or arguments["learn"]
    )
    if pair.draft is None or distorts:
        return None
    return AcceptanceRecorder(pair.target, pair.draft)
