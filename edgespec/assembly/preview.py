"""What loading would take and decide, without loading: from what is here, or from what the hub says of it."""

from __future__ import annotations

import tempfile
from importlib import import_module
from os import PathLike
from pathlib import Path

from edgespec.assembly.drafting_options import Branches, Drafting
from edgespec.assembly.load_options import load_options
from edgespec.assembly.pairing import find_pair
from edgespec.assembly.planning import LoadPlan, PlanRequest, budget_for, plan_pair
from edgespec.assembly.prefix_cache_options import PrefixCacheOptions
from edgespec.backends.base import Progress
from edgespec.backends.memory_estimate import Pool
from edgespec.catalog import Resolved
from edgespec.catalog.remote_header import resolve_metadata
from edgespec.checks import check_text, parse_size
from edgespec.drafters.windowed import AttentionWindow
from edgespec.heap import address_space_is_limited
from edgespec.memory import MemoryPlan, check_room_to_plan
from edgespec.memory.context_resize import INITIAL_CONTEXT_TOKENS

__all__ = ["MemoryPlan", "Pool", "Preview", "plan"]


class Preview:
    """The plan of a pair. notes: what the references came to. advice: where it does not fit.

    trained_context_tokens: what the target was trained for, 0 where its files do not say.
    first_context_tokens: what the context begins with, and grows from with the text.
    draft_window: what the draft sees of a longer text; None where it sees all of it.
    """

    def __init__(self, planned: LoadPlan) -> None:
        pair = planned.pair
        self.target: str = pair.target.name
        self.draft: str | None = pair.draft.name if pair.draft else None
        self.notes: tuple[str, ...] = tuple(each.note for each in (pair.target, pair.draft) if each)
        self.why_no_draft: str = pair.why_no_draft
        self.plan: MemoryPlan = planned.plan
        self.advice: str = planned.advice
        self.trained_context_tokens: int = planned.trained_tokens
        self.first_context_tokens: int = planned.initial_context_tokens
        self.draft_window: AttentionWindow | None = planned.draft_window


def plan(
    target: str = "demo",
    draft: str | None = "auto",
    *,
    memory: str | int | None = None,
    prefer: str = "speed",
    context: int | None = None,
    gpu_layers: int | None = None,
    kv_type: str = "auto",
    flash_attention: str = "auto",
    mmap: bool = True,
    mlock: bool = False,
    method: str = "auto",
    adapter: str | PathLike[str] | None = None,
    exact: bool = False,
    prefix_cache: str = "memory",
    prefix_cache_memory: str | int | None = None,
    draft_branches: Branches = (),
    draft_window: int | None = None,
    draft_sinks: int = 4,
    progress: Progress | None = None,
) -> Preview:
    """What `load` with the same options would take and decide.

    Nothing is loaded and no model downloaded: of one that is not here its metadata is read from the hub.
    Raises what `load` does, but for MemoryBudgetError: a plan that does not fit says so. That is
    raised only where this process may not even take what looking at a model needs.
    """
    check_text("target", target, "a path, user/repo:quant or a name such as demo")
    how = Drafting(
        methods=(method,), branches=draft_branches, window_tokens=draft_window, sink_tokens=draft_sinks
    )
    keeping = PrefixCacheOptions.read(prefix_cache, prefix_cache_memory, None)
    given_bytes = None if memory is None else parse_size("memory", memory)
    options = load_options(
        how,
        given_bytes=given_bytes,
        context=context,
        initial_context_tokens=INITIAL_CONTEXT_TOKENS,
        gpu_layers=gpu_layers,
        kv_type=kv_type,
        flash_attention=flash_attention,
        mmap=mmap,
        mlock=mlock,
        adapter=adapter,
        exact=exact,
    )
    check_room_to_plan()
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:

        def find(reference: str) -> Resolved:
            return resolve_metadata(reference, Path(folder), progress)

        pair = find_pair(target, draft, how, progress, options, find)
        if address_space_is_limited():
            import_module("edgespec.assembly.loading")  # a load has it in memory
        wishes = PlanRequest.read(prefer, options, draft, keeping.wanted_bytes)
        return Preview(plan_pair(pair, how, options, budget_for(pair, given_bytes), wishes))
