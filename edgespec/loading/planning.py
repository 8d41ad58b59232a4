"""Plan how to load a target and its draft model within the memory budget.

If a plan does not fit, suggest which option to change, or which smaller model to use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import EdgespecError, MemoryBudgetError, OptionError
from edgespec.loading.constants import (
    MAX_READS_WITH_COPIES,
    MAX_WEIGHTS_SHARE,
    MIN_SUGGESTED_CONTEXT_TOKENS,
    STREAMED_SIZES,
)
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pair_estimate import PairEstimator, open_estimator
from edgespec.loading.pairing import ModelPair
from edgespec.memory.budget import Budget, address_limit, find_budget
from edgespec.memory.context_resize import has_room_to_resize
from edgespec.memory.fitting import PlanChoice, PlanOption, Preference, fit_to_budget, stream_least
from edgespec.memory.plan import MemoryPlan, shared_items
from edgespec.memory.prefix_cache.store import default_memory_bytes
from edgespec.methods.lowbit.drafter import Substitutes
from edgespec.methods.model.windowed import AttentionWindow
from edgespec.model.base import LoadOptions
from edgespec.model.formats.projector import read_projector
from edgespec.model.memory_estimate import initial_context, requested_context
from edgespec.model.registry import Backend, backend_of, process_bytes, same_backend
from edgespec.model.trial_load import TrialModel, check_loadable
from edgespec.options.methods import readers_of
from edgespec.options.settings import LoadArguments, as_bytes
from edgespec.store.catalogue import load_catalogue
from edgespec.store.installed import find_installed, smaller_models
from edgespec.store.reference import Resolved
from edgespec.system.files import format_bytes
from edgespec.system.heap import address_space_is_limited, limit_malloc_arenas

_ADVICE: Mapping[PlanOption, str] = {
    "experts": "use --experts {experts} or more, or omit it",
    "gpu_layers": "use --gpu-layers {gpu_layers} or less, or omit it",
    "context": "use --context {context} or less, or raise --memory",
    "draft_window": "omit --draft-window, or raise --memory",
    "kv_type": "omit --kv-type, or raise --memory",
    "draft": "use --draft none, or raise --memory",
    "heads": "use --head none, or raise --memory",
}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """User settings for the planner.

    Attributes:
        fixed: Options set by the user, which the planner must not change.
        prefer: Whether to keep a long context or the draft model if only one of them fits.
        prefix_cache_bytes: Size limit of the prefix cache in memory, or None for the default.
        headroom_bytes: Additional memory to reserve, or None for the default.
        may_drop_projector: Whether the planner may load the target without its projector.
        substitutes: Low-bit copies of blocks to plan with, or None to look for prepared ones.
    """

    fixed: frozenset[PlanOption] = frozenset()
    prefer: Preference = "speed"
    prefix_cache_bytes: int | None = 0
    headroom_bytes: int | None = None
    may_drop_projector: bool = False
    substitutes: Substitutes | None = None


def fixed_options(options: LoadOptions, draft: str | None) -> frozenset[PlanOption]:
    """Return the options of `load` that the user set, which the planner must not change."""
    named: dict[PlanOption, bool] = {
        "context": options.context_tokens is not None,
        "kv_type": options.kv_type != "auto",
        "draft": draft not in (None, "auto", "none"),
        "experts": options.experts is not None,
        "gpu_layers": options.gpu_layers is not None,
    }
    return frozenset(name for name, is_fixed in named.items() if is_fixed)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All decisions about loading a pair of models, made before anything is loaded.

    Attributes:
        pair: The target and its draft model, if any.
        drafting: Drafting options, including the planner's changes.
        options: Load options that apply to both models.
        float32: Whether MLX converts 16-bit weights to float32 where that is faster.
        plan: The memory plan.
        advice: Advice for the user if the whole target does not fit in memory, otherwise empty.
        trained_tokens: Context length that the target was trained for. 0 if unknown.
        longrope_switch_tokens: Context size above which the target switches to its long LongRoPE factors. 0
            if it does not use LongRoPE.
        draft_window: The draft model's attention window, or None if it attends to the whole context.
        why_in_turns: Why replies run one at a time although the user asked for concurrent ones. Empty
            otherwise.
        context_is_fixed: Whether the user chose the context length.
        dropped_projector: The projector that is not loaded, to save memory. Empty if there is none.
    """

    pair: ModelPair
    drafting: DraftingOptions
    options: LoadOptions
    float32: bool
    plan: MemoryPlan
    advice: str = ""
    trained_tokens: int = 0
    longrope_switch_tokens: int = 0
    draft_window: AttentionWindow | None = None
    why_in_turns: str = ""
    context_is_fixed: bool = False
    dropped_projector: str = ""

    @property
    def target_options(self) -> LoadOptions:
        """The target's load options.

        Their memory limit excludes the weights and KV caches of the draft model and the projector.
        """
        kinds, others = ("weights", "cache"), ("draft", "projector")
        other_bytes = sum(i.bytes for i in self.plan.items if i.role in others and i.kind in kinds)
        left = (self.options.memory_bytes or 0) - other_bytes
        # Lower the memory limit to stop MLX from converting the weights to float32.
        if not self.float32:
            target = (i.bytes for i in self.plan.items if i.role == "target" and i.kind in kinds)
            left = min(left, sum(target))
        return replace(self.options, memory_bytes=max(0, left))

    @property
    def initial_context_tokens(self) -> int:
        """The target's initial context size in tokens, or 0 if its KV cache grows token by token."""
        if self.pair.target.backend.cache_follows_text:
            return 0
        tokens, first = self.plan.context_tokens, self.options.initial_context_tokens
        return tokens if first is None else initial_context(tokens, first, self.longrope_switch_tokens)

    @property
    def notice(self) -> str:
        """Message that explains how the plan differs from the user's request, or an empty string."""
        given_up = ", ".join(decision.what for decision in self.plan.decisions)
        fitted = f"changed to fit in {format_bytes(self.plan.budget.bytes)}: {given_up}" if given_up else ""
        streaming = f"larger than memory: {self.plan.streaming.text}" if self.plan.streaming else ""
        in_turns = f"replies run one after the other: {self.why_in_turns}" if self.why_in_turns else ""
        images = ""
        if self.dropped_projector:
            images = f"images are off to save memory: --mmproj {self.dropped_projector} turns them on"
        elif self.options.small_images:
            images = "images are reduced to about a megapixel to save memory; raise --memory to avoid this"
        return " · ".join(filter(None, (streaming, fitted, in_turns, images, self.plan.unused_experts)))


def budget_for(backends: Sequence[Backend], arguments: LoadArguments) -> Budget:
    """Return the system and GPU memory budgets for the models.

    Args:
        backends: The backends of the models, the target's first.
        arguments: The checked arguments of `load`.
    """
    if address_space_is_limited():
        limit_malloc_arenas()
        for backend in backends:
            backend.preload()
    # The models of a pair can have different backends, and each backend has its own list of the same cards.
    cards = next(filter(None, (backend.graphics_cards() for backend in backends)), ())
    return find_budget(as_bytes(arguments["memory"]), cards, as_bytes(arguments["reserve"]))


def plan_pair(
    pair: ModelPair,
    drafting: DraftingOptions,
    options: LoadOptions,
    budget: Budget,
    request: PlanRequest | None = None,
) -> LoadPlan:
    """Plan how to load a pair of models within the memory budget. Call `check_fits` on the result.

    If the user did not set a context length, the plan may choose one longer than the default. To save memory,
    the plan first reduces images, then drops a projector that the user did not name, and only then shrinks
    anything else.

    Raises:
        ModelFileError, BackendMissingError: A model cannot be opened.
        OptionError: The models cannot be loaded with these options.
    """
    request = request or PlanRequest()
    planned = _plan_pair(pair, drafting, options, budget, request)
    if _is_whole(planned) or not options.projector:
        return planned
    if read_projector(Path(options.projector)).can_save:
        small = _plan_pair(pair, drafting, replace(options, small_images=True), budget, request)
        planned = small if _differ(small, planned) else planned
    if _is_whole(planned) or not request.may_drop_projector:
        return planned
    blind = _plan_pair(pair, drafting, replace(options, projector=""), budget, request)
    return replace(blind, dropped_projector=options.projector) if _differ(blind, planned) else planned


def _is_whole(planned: LoadPlan) -> bool:
    return planned.plan.fits_without_streaming and not planned.plan.decisions


def _differ(first: LoadPlan, second: LoadPlan) -> bool:
    return (first.plan.fits, first.plan.decisions) != (second.plan.fits, second.plan.decisions)


def _plan_pair(
    pair: ModelPair, drafting: DraftingOptions, options: LoadOptions, budget: Budget, request: PlanRequest
) -> LoadPlan:
    fixed = _fixed_options(request, drafting)
    with ExitStack() as undo:
        estimator = PairEstimator(
            pair, drafting, options, undo, budget, request.headroom_bytes, request.substitutes
        )
        target, why_in_turns = estimator.target, estimator.why_in_turns
        start = PlanChoice(
            requested_context(options, target.trained_context_tokens),
            options.kv_type,
            pair.draft is not None,
            drafting.window_tokens,
            options.gpu_layers,
            options.experts or 0,
            heads=len(pair.heads),
        )
        forms = [] if "draft" in request.fixed else estimator.smaller_drafts(start)

        def fit(fixed: set[PlanOption], start: PlanChoice = start) -> tuple[PlanChoice, MemoryPlan]:
            return fit_to_budget(
                start,
                estimator.plan,
                fixed=frozenset(fixed),
                prefer=request.prefer,
                gpu_layers=target.layers,
                draft_forms=forms,
            )

        choice, plan = fit(fixed)
        # The model is too large only if no combination of options makes it fit. Otherwise, the cause is an
        # option that the user set, such as a long context, and the advice says which one.
        is_too_large = not plan.fits and not (fixed and fit(set())[1].fits)
        can_stream = _may_stream(options, drafting) and pair.target.backend.streams(options.gpu_layers)
        if is_too_large and can_stream and target.streamable_layers:
            # Keep the drafters, because they save the most time when passes are slow. Shorten the context,
            # because a long one would take memory away from the weights even while it is unused.
            tried = []
            for batch_tokens, context_tokens in STREAMED_SIZES:
                tokens = start.context_tokens
                if "context" not in fixed:
                    tokens = min(tokens, context_tokens)
                all_streamed = replace(
                    start,
                    context_tokens=tokens,
                    streamed_layers=target.streamable_layers,
                    batch_tokens=min(batch_tokens, options.batch_tokens),
                )
                streamed, streamed_plan = fit(fixed, all_streamed)
                tried.append((all_streamed, streamed, streamed_plan))
                if streamed_plan.fits and not streamed_plan.decisions:
                    break
            # Smaller sizes do not help if a drafter does not fit with any of them.
            all_streamed, streamed, streamed_plan = min(
                tried, key=lambda each: (not each[2].fits, len(each[2].decisions))
            )
            if streamed_plan.fits and _has_addresses(estimator.plan(replace(streamed, streamed_layers=0))):
                choice = stream_least(streamed, estimator.plan)
                # `auto` drafts with the copies only if no head fits.
                usable = estimator.substitutes if drafting.names_copy or not streamed.heads else ()
                for copies in usable:
                    # Do not shrink anything else to make room for the copies.
                    start_with_copies = replace(all_streamed, substitutes=copies.file)
                    streamed, copies_plan = fit({*fixed, "copy"}, start_with_copies)
                    with_copies = stream_least(streamed, estimator.plan)
                    if (
                        copies_plan.fits
                        and not address_space_is_limited()  # The mapped copies would need as much again.
                        and len(copies_plan.decisions) <= len(streamed_plan.decisions)
                        and (
                            drafting.names_copy
                            or request.substitutes is not None
                            or _save_time(estimator, with_copies, choice)
                        )
                    ):
                        choice, streamed_plan = with_copies, copies_plan
                        break
                plan = replace(
                    estimator.plan(choice),
                    decisions=streamed_plan.decisions,
                    streaming=estimator.streaming(choice),
                )
        plan = _with_prefix_cache(plan, plan, request.prefix_cache_bytes)
        initial_tokens = estimator.initial_context_tokens
        grows = initial_tokens is not None and has_room_to_resize(plan)
        if grows and options.context_tokens is None and plan.fits and not plan.decisions:
            choice, plan = _extend_context(choice, plan, estimator, request.prefix_cache_bytes)
        chosen = estimator.load_options(choice)
        window = estimator.draft_window(choice, plan.context_tokens)
        if choice.draft_form:
            pair = replace(pair, draft=estimator.draft_file(choice))
        advice = (
            ""
            if plan.fits_without_streaming
            else _find_advice(
                fixed, fit, pair, options, budget, request.headroom_bytes, target.trained_context_tokens
            )
        )
    if pair.draft and not choice.draft:
        why = f"the draft model {pair.draft.name} does not fit in memory"
        pair = replace(pair, draft=None, why_no_draft=why)
    if choice.heads < len(pair.heads):
        names = [head.name for head in pair.heads[choice.heads :]]
        if len(names) > 1:
            why = f"the draft heads {' and '.join(names)} do not fit in memory"
        else:
            why = f"the draft head {names[0]} does not fit in memory"
        pair = replace(pair, heads=pair.heads[: choice.heads], why_no_head=why, why_heads="")
    drafting = replace(
        drafting,
        window_tokens=choice.draft_window,
        # If the draft model does not fit in memory, do not replace it with a low-bit copy of the target.
        has_room_for_copy=choice.copy and start.draft == choice.draft and options.workers is None,
        substitutes=choice.substitutes,
        draft_kv_type=choice.draft_kv_type,
    )
    checked = ("weights", "cache", "headroom")
    left = budget.total_bytes - sum(item.bytes for item in plan.items if item.kind not in checked)
    chosen = replace(
        chosen,
        memory_bytes=max(0, left),
        initial_context_tokens=initial_tokens if grows else None,
    )
    return LoadPlan(
        pair,
        drafting,
        chosen,
        choice.float32,
        plan,
        advice,
        target.trained_context_tokens,
        target.longrope_switch_tokens,
        window,
        why_in_turns,
        "context" in fixed,
    )


def _save_time(estimator: PairEstimator, with_copies: PlanChoice, without: PlanChoice) -> bool:
    """Return whether drafting with low-bit copies of blocks saves more time than it costs.

    The copies take up memory, so more blocks have to be streamed.
    """
    more, fewer = (
        sum(estimator.target.streamed_bytes(estimator.load_options(choice)).values())
        for choice in (with_copies, without)
    )
    return more <= MAX_READS_WITH_COPIES * fewer


def _may_stream(options: LoadOptions, drafting: DraftingOptions) -> bool:
    """Return whether weights may be read from disk in every pass if they do not fit in memory."""
    is_wanted = drafting.arguments["larger_than_memory"] == "auto"
    return is_wanted and options.mmap and not options.mlock and options.workers is None


def _has_addresses(plan: MemoryPlan) -> bool:
    """Return whether the address space limit (`ulimit -v`), if any, leaves room for all weights.

    Streaming saves no address space, because all weights are mapped. `plan` is the plan without streaming.
    """
    limit = address_limit()
    return limit is None or plan.planned_bytes("memory") <= limit.free_bytes + process_bytes()


def _fixed_options(request: PlanRequest, drafting: DraftingOptions) -> set[PlanOption]:
    fixed = set(request.fixed)
    if "kv_type" in fixed:
        fixed.add("draft_kv_type")
    if drafting.needs_draft_model or drafting.arguments["learn"]:
        fixed.add("draft")
    if drafting.names_head:
        fixed.add("heads")
    if drafting.names_copy:
        fixed.add("copy")
    if drafting.window_tokens is not None or not {"auto", *readers_of("draft_window")} & set(
        drafting.methods
    ):
        fixed.add("draft_window")
    return fixed


def _with_prefix_cache(plan: MemoryPlan, first: MemoryPlan, requested_bytes: int | None) -> MemoryPlan:
    """Return a plan with the size limit of the prefix cache filled in.

    Args:
        plan: The plan to complete.
        first: The plan before the context was extended. Its free memory determines the limit, so that a
            longer context does not shrink the prefix cache.
        requested_bytes: The limit that the user set, or None for the default.
    """
    free = first.free_bytes("memory") if first.fits else 0
    default = default_memory_bytes(free, plan.target_cache_bytes)
    limit = default if requested_bytes is None else min(requested_bytes, free)
    return replace(plan, prefix_cache_bytes=limit)


def _extend_context(
    choice: PlanChoice, plan: MemoryPlan, estimator: PairEstimator, prefix_cache_bytes: int | None
) -> tuple[PlanChoice, MemoryPlan]:
    """Return the load options with the longest context that fits in memory, and their memory plan."""
    max_tokens = min(estimator.target.trained_context_tokens, estimator.max_context_for_draft(choice))
    powers = (1 << exponent for exponent in reversed(range(max_tokens.bit_length())))
    for tokens in dict.fromkeys((max_tokens, *powers)):
        if tokens <= choice.context_tokens:
            break
        longer = replace(choice, context_tokens=tokens)
        with suppress(OptionError, MemoryBudgetError):
            candidate = _with_prefix_cache(estimator.plan(longer), plan, prefix_cache_bytes)
            if (
                candidate.fits
                and candidate.free_bytes("memory") >= candidate.prefix_cache_bytes
                and candidate.kv_type == plan.kv_type
                and has_room_to_resize(candidate)
            ):
                return longer, replace(candidate, streaming=plan.streaming)
    return choice, plan


def check_fits(planned: LoadPlan) -> None:
    """Raise MemoryBudgetError if a load plan does not fit in memory.

    The error lists the largest items and includes the plan's advice.
    """
    plan = planned.plan
    if plan.fits:
        return
    pool = min(plan.pools, key=plan.free_bytes)
    where = " on the graphics cards" if pool == "gpu" else ""
    largest = sorted((i for i in plan.items if i.pool == pool), key=lambda item: -item.bytes)[:3]
    named = ", ".join(f"{item.name} {format_bytes(item.bytes)}" for item in largest)
    context = f"a context of {planned.options.context_tokens:,} tokens"
    if not planned.context_is_fixed:
        context += ", the smallest that edgespec chooses automatically,"
    raise MemoryBudgetError(
        f"{planned.pair.target.name} with {context} needs {format_bytes(plan.planned_bytes(pool))}{where},"
        f" but only {format_bytes(plan.budget_bytes(pool))} can be used ({plan.budget.source}); the largest"
        f" parts are {named}",
        planned.advice,
    )


def _find_advice(
    fixed: set[PlanOption],
    fit: Callable[[set[PlanOption]], tuple[PlanChoice, MemoryPlan]],
    pair: ModelPair,
    options: LoadOptions,
    budget: Budget,
    headroom_bytes: int | None = None,
    trained_tokens: int = 0,
) -> str:
    """Suggest an option to change or a smaller model for a plan that does not fit in memory.

    Args:
        fixed: The options that the user set.
        fit: Returns the best load options that leave the given options unchanged, and their memory plan.
        pair: The target and its draft model.
        options: The load options.
        budget: The memory budget.
        headroom_bytes: Additional memory to reserve, or None for the default.
        trained_tokens: Context length that the target was trained for. 0 if unknown.
    """
    for name, text in _ADVICE.items():
        if name in fixed:
            choice, plan = fit(fixed - {name})
            if plan.fits:
                if name == "context" and 0 < trained_tokens < choice.context_tokens:
                    return (
                        f"use --context {trained_tokens}, which the model was trained for (up to"
                        f" {choice.context_tokens} fit in memory), or raise --memory"
                    )
                return text.format(
                    context=choice.context_tokens, gpu_layers=choice.gpu_layers, experts=choice.experts
                )
    room = budget.total_bytes
    more = "raise --memory"
    target_bytes = pair.target.file_format.read_info(pair.target.path).size_bytes
    for smaller in smaller_models(pair.target, find_installed()):
        if weight_bytes := _weight_bytes_if_it_fits(smaller, options, room, headroom_bytes):
            size = format_bytes(weight_bytes)
            return f"choose {smaller.name} ({size}), which fits and is already on this machine, or {more}"
    fitting = [
        entry
        for entry in load_catalogue().entries
        if entry.approximate_file_bytes + backend_of(entry.format).process_bytes < room * MAX_WEIGHTS_SHARE
        and same_backend(entry.format, pair.target.format)
        # Never suggest the demo models, which are too small to be useful.
        and not entry.embedded_file
        # A model at least as large as the target does not fit either. This also excludes the target itself.
        and entry.approximate_file_bytes < target_bytes
    ]
    # A model in a Python package has no other versions to download.
    is_packaged = pair.target.entry is not None and pair.target.entry.embedded_path is not None
    if not fitting:
        _, plan = fit(fixed)
        if plan.free_bytes("memory") >= 0:
            return f"choose a smaller quantisation of the model, or {more}"
        # Round up, because less memory would not be enough.
        needed_mib = -(-plan.planned_bytes("memory") // 2**20)
        or_smaller = "" if is_packaged else ", or choose a smaller quantisation of the model"
        return f"{more} to {needed_mib:,} MiB or more{or_smaller}"
    nearest = max(fitting, key=lambda entry: entry.approximate_file_bytes)
    size = format_bytes(nearest.approximate_file_bytes)
    return f"choose a smaller model, such as {nearest.name} ({size}), or a smaller quantisation, or {more}"


def _weight_bytes_if_it_fits(
    model: Resolved, options: LoadOptions, room_bytes: int, headroom_bytes: int | None
) -> int:
    """Return the size of a model's weights in bytes, or 0 if it does not fit even with a short context."""
    context_tokens = options.context_tokens or MIN_SUGGESTED_CONTEXT_TOKENS
    options = replace(options, context_tokens=context_tokens, memory_bytes=0)
    try:
        check_loadable([TrialModel(model.name, model.path, model.file_format, runs=False)])
        estimator = open_estimator(model, options)
    except EdgespecError:
        return 0
    try:
        estimate = estimator.estimate(replace(options, memory_bytes=room_bytes))
    except EdgespecError:
        return 0
    finally:
        estimator.close()
    shared = shared_items(estimate.total_bytes, model.backend.process_bytes, headroom_bytes)
    fits = estimate.total_bytes + sum(item.bytes for item in shared) <= room_bytes
    return estimate.bytes_of("weights") if fits else 0
