"""From references and options to a Runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from os import PathLike
from pathlib import Path

from edgespec.assembly.drafting import outfit
from edgespec.assembly.drafting_options import Branches, Drafting
from edgespec.assembly.exact import hold_to_exact
from edgespec.assembly.load_options import load_options
from edgespec.assembly.pairing import Pair, find_pair, load_draft, load_target
from edgespec.assembly.planning import LoadPlan, PlanRequest, budget_for, check_fits, plan_pair
from edgespec.assembly.prefix_cache_options import (
    PrefixCacheOptions,
    create_prefix_cache,
    file_states,
)
from edgespec.backends.base import LoadOptions, Progress
from edgespec.backends.mapped_files import MappedFiles
from edgespec.catalog.acceptance_history import AcceptanceRecorder
from edgespec.checks import check_boolean, check_path, check_text, parse_size
from edgespec.costs.target_costs import FreeCosts, TargetCosts
from edgespec.drafters.base import Drafter
from edgespec.errors import ModelFileError, OptionError
from edgespec.memory import check_room_to_plan
from edgespec.memory.context_resize import INITIAL_CONTEXT_TOKENS
from edgespec.methods import DrafterSet
from edgespec.prepare.lowbit import find_lowbit, lowbit_file
from edgespec.request import MethodOptions
from edgespec.runtime import Runtime

__all__ = ["eagerly", "load"]

_eager = ContextVar("eager", default=False)


@contextmanager
def eagerly() -> Iterator[None]:
    """What `load` loads in here guesses whether or not it pays: a proof of sameness needs guesses."""
    before = _eager.set(True)
    try:
        yield
    finally:
        _eager.reset(before)


def load(
    target: str = "demo",
    draft: str | None = "auto",
    *,
    memory: str | int | None = None,
    prefer: str = "speed",
    context: int | None = None,
    reserve_full_context: bool = False,
    threads: int | None = None,
    gpu_layers: int | None = None,
    kv_type: str = "auto",
    flash_attention: str = "auto",
    mmap: bool = True,
    mlock: bool = False,
    method: str = "auto",
    draft_length: int | None = None,
    methods: Sequence[str] = (),
    acceptance: str = "invariant",
    adapter: str | PathLike[str] | None = None,
    exact: bool = False,
    draft_branches: Branches = (),
    draft_confidence: float = 0.0,
    draft_window: int | None = None,
    draft_sinks: int = 4,
    exit_layer: int | None = None,
    corpus: str | PathLike[str] | None = None,
    remember: bool = False,
    learn: bool = False,
    max_loss: float | None = None,
    measure_costs: bool = True,
    prefix_cache: str = "memory",
    prefix_cache_memory: str | int | None = None,
    prefix_cache_disk: str | int | None = None,
    progress: Progress | None = None,
) -> Runtime:
    """Load a target and its draft.

    target, draft: references (a path, `user/repo:quant`, an alias); draft `auto` takes the best one on this
    machine, by its tokens and its size, `none` takes none. memory: the budget for everything, Python itself
    included, such as "8GiB"; by default what is available. prefer: where that is short, "speed" gives up
    context before the draft, "context" the draft before context; what is named here is never given up.
    context: tokens of prompt and reply together; by default what the target was trained for, as far as
    nothing else is given up for it, or else 8,192. reserve_full_context: take the memory for all of them at
    once (of 8,192 by default); without it the caches grow with the text. adapter: a folder with a LoRA or
    DoRA adapter for an MLX target, as mlx-lm writes them. exact: replies are those of plain decoding to the
    last bit of every logit: only passes are run that were found to agree, and texts are gone on with only as
    far as that makes no difference. methods: those that replies may ask for besides `method`; what they need
    is loaded as well.
    draft_branches to measure_costs: see `Drafting`.
    prefix_cache: where the KV caches of earlier prompts and replies are kept for reuse: "none", "memory", or
    "disk", which also keeps them for later runs. prefix_cache_memory: its size limit in memory; by default a
    quarter of the memory that the plan leaves free, and at most 4 GiB. prefix_cache_disk: its size limit on
    disk; by default 4 GiB, or a tenth of the free disk.
    progress: called with (what, fraction), False cancels.

    Raises EdgespecError with the reason and the next step.
    """
    check_text("target", target, "a path, user/repo:quant or a name such as demo")
    if draft is not None:
        check_text("draft", draft, "auto, none, a path, user/repo:quant or a name")
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise OptionError(f"methods is {methods!r}", 'give a list such as ["suffix", "model+ngram"]')
    if progress is not None and not callable(progress):
        raise OptionError(f"progress is {progress!r}", "give a function of a text and a fraction")
    defaults = MethodOptions().override(method, draft_length, acceptance)
    how = Drafting(
        methods=(method, *methods),
        branches=draft_branches,
        confidence=draft_confidence,
        window_tokens=draft_window,
        sink_tokens=draft_sinks,
        exit_layer=exit_layer,
        corpus=None if corpus is None else check_path("corpus", corpus),
        remember=remember,
        learn=learn,
        max_loss=max_loss,
        measure_costs=check_boolean("measure_costs", measure_costs),
    )
    given_bytes = None if memory is None else parse_size("memory", memory)
    options = load_options(
        how,
        given_bytes=given_bytes,
        context=context,
        initial_context_tokens=None
        if check_boolean("reserve_full_context", reserve_full_context)
        else INITIAL_CONTEXT_TOKENS,
        threads=threads,
        gpu_layers=gpu_layers,
        kv_type=kv_type,
        flash_attention=flash_attention,
        mmap=mmap,
        mlock=mlock,
        adapter=adapter,
        exact=exact,
    )
    keeping = PrefixCacheOptions.read(prefix_cache, prefix_cache_memory, prefix_cache_disk)
    check_room_to_plan()
    pair = find_pair(target, draft, how, progress, options)
    wishes = PlanRequest.read(prefer, options, draft, keeping.wanted_bytes)
    planned = plan_pair(pair, how, options, budget_for(pair, given_bytes), wishes)
    check_fits(planned)
    return _loaded(planned, defaults, keeping, progress)


def _loaded(
    planned: LoadPlan, defaults: MethodOptions, keeping: PrefixCacheOptions, progress: Progress | None
) -> Runtime:
    """Load both models and put together what drafts. What was loaded is closed again when that fails."""
    pair, how, options = planned.pair, planned.how, planned.options
    seen = file_states(pair.target.path, options.adapter)
    with ExitStack() as undo:
        model = load_target(pair, planned.target_options, progress)
        undo.callback(model.close)
        costs = TargetCosts(model, options, how.measure_costs)
        exactly = hold_to_exact(model, costs.settings_key, progress) if options.exact else ""
        draft = None
        if pair.draft:
            draft = load_draft(pair, pair.draft, model, how, options, progress)
            undo.callback(draft.model.close)
        made = outfit(pair.target, model, draft, how, FreeCosts() if _eager.get() else costs, progress)
        drafters = DrafterSet(
            model,
            draft.model if draft else None,
            branches=made.growth(draft.model) if draft else (),
            min_confidence=how.confidence,
            why_no_draft=pair.why_no_draft,
            others=made.others,
            v=made.curve,
            auto_config=made.policy,
        )
        undo.callback(drafters.close)
        for method in how.methods:
            drafters.choose(method)  # what is missing is said now, not with the first reply
        entry = pair.target.entry
        notices = (entry.notice if entry else "", planned.notice, model.facts.notice, exactly, *made.notices)
        runtime = Runtime(
            model,
            draft.model if draft else None,
            drafters,
            defaults=defaults,
            costs=costs,
            notice=" · ".join(filter(None, (*notices, draft.notice if draft else ""))),
            plan=planned.plan,
            record=_record_of(pair, how),
            prefix_cache=create_prefix_cache(
                keeping, model, planned.target_options, costs, planned.plan, seen
            ),
            mapped=_mapped(pair, options, copied=isinstance(made.others["lowbit"], Drafter)),
        )
        undo.pop_all()
        return runtime


def _mapped(pair: Pair, options: LoadOptions, *, copied: bool) -> MappedFiles:
    """The files whose pages llama.cpp reads when it needs them. copied: a copy with fewer bits drafts."""
    paths: list[Path] = []
    for each in (pair.target, pair.draft):
        if each and each.file_format.mapped and options.mmap:
            with suppress(OSError, ModelFileError):  # deleted meanwhile: what is mapped stays
                paths += each.file_format.files(each.path)
    has_copy = copied and pair.target.file_format.low_bit_copy_format and options.mmap
    copy = find_lowbit(pair.target.path) if has_copy else None
    if copy:
        paths.append(lowbit_file(copy))
    return MappedFiles(paths)


def _record_of(pair: Pair, how: Drafting) -> AcceptanceRecorder | None:
    """Where guesses are counted; not of drafts that change, or guess when sure or several at once."""
    if pair.draft is None or how.branches or how.confidence or how.learn:
        return None
    return AcceptanceRecorder((pair.target.path, pair.target.format), (pair.draft.path, pair.draft.format))
