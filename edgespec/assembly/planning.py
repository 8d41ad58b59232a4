"""From two references and options to what is loaded and what that takes, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import get_args

from edgespec.assembly.drafting_options import Drafting
from edgespec.assembly.pairing import Pair, for_draft, meant_for
from edgespec.backends.base import LoadOptions
from edgespec.backends.footprint import Blueprint
from edgespec.backends.room import context_wanted, readable
from edgespec.catalog import (
    Resolved,
    load_catalogue,
    look,
    require_mlx,
    smaller_forms,
    smaller_models,
)
from edgespec.drafters.windowed import window_for
from edgespec.errors import EdgespecError, MemoryBudgetError, OptionError
from edgespec.memory import (
    Budget,
    Choice,
    Item,
    Measured,
    MemoryPlan,
    Prefer,
    StepName,
    find_budget,
    fitted,
    items_of,
)
from edgespec.memory.kept import memory_bound

__all__ = ["PREFERENCES", "Planned", "Wishes", "budget_for", "check_fits", "plan_pair"]

PREFERENCES: Mapping[str, Prefer] = {"speed": "speed", "context": "context"}
# What Python and the libraries take before any model: measured, with the terminal's interface.
_PROCESS_BYTES = {"gguf": 80 * 2**20, "layerskip": 80 * 2**20, "mlx": 128 * 2**20}
# Left free of what was planned, for what no plan foresees: vocabularies, texts, fragments.
_HEADROOM_SHARE, _LEAST_HEADROOM_BYTES = 1 / 50, 8 * 2**20
_ROOM_BYTES = 1 << 62
_EVERYTHING: frozenset[StepName] = frozenset(get_args(StepName))
# A model is worth naming where its weights leave so much for its cache.
_WEIGHTS_SHARE = 0.85
# With so short a context at least, unless another was asked for.
_LEAST_CONTEXT_TOKENS = 512
_ADVICE: Mapping[StepName, str] = {
    "context": "use --context {context} or less, or give more with --memory",
    "draft_window": "leave --draft-window out, or give more with --memory",
    "kv_type": "leave --kv-type out, or give more with --memory",
    "draft": "use --draft none, or give more with --memory",
}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for in so many words and is not given up; and what is given up first.

    kept_bytes: what texts that are kept may take of what is left; None is a share of it, see `memory_bound`.
    """

    fixed: frozenset[StepName] = frozenset()
    prefer: Prefer = "speed"
    kept_bytes: int | None = 0

    @classmethod
    def read(cls, prefer: str, options: LoadOptions, draft: str | None, kept_bytes: int | None = 0) -> Wishes:
        """From what `load` was given: whatever is not left to us is fixed. Raises OptionError."""
        if prefer not in PREFERENCES:
            raise OptionError(f"prefer is {prefer!r}", f"choose one of {', '.join(PREFERENCES)}")
        named: dict[StepName, bool] = {
            "context": options.context_tokens is not None,
            "kv_type": options.kv_type != "auto",
            "draft": draft not in (None, "auto", "none"),
            "gpu_layers": options.gpu_layers is not None,
        }
        return cls(frozenset(name for name, fixed in named.items() if fixed), PREFERENCES[prefer], kept_bytes)


@dataclass(frozen=True, slots=True)
class Planned:
    """What to load, and how. options: for both models together. float32: see `Choice`.

    advice: the next step where the plan does not fit.
    """

    pair: Pair
    how: Drafting
    options: LoadOptions
    float32: bool
    plan: MemoryPlan
    advice: str = ""

    @property
    def target_options(self) -> LoadOptions:
        """`options` for the target alone: the draft's weights and cache are not there for it."""
        kinds = ("weights", "cache")
        of_draft = sum(item.bytes for item in self.plan.items if item.role == "draft" and item.kind in kinds)
        left = (self.options.memory_bytes or 0) - of_draft
        if not self.float32:  # MLX takes float32 wherever there is room
            target = (item for item in self.plan.items if item.role == "target" and item.kind in kinds)
            left = min(left, sum(item.bytes for item in target))
        return replace(self.options, memory_bytes=max(0, left))

    @property
    def notice(self) -> str:
        """What was given up, for people; empty where nothing was."""
        given_up = ", ".join(decision.what for decision in self.plan.decisions)
        return f"to fit {readable(self.plan.budget.bytes)}: {given_up}" if given_up else ""


def budget_for(pair: Pair, given_bytes: int | None) -> Budget:
    """The budget of a pair: given, or found; the memory of graphics cards only where they may be used."""
    if pair.target.format == "mlx":
        return find_budget(given_bytes)
    from edgespec.backends.llamacpp.devices import cards

    return find_budget(given_bytes, [(card.name, card.free_bytes) for card in cards()])


def plan_pair(
    pair: Pair, how: Drafting, options: LoadOptions, budget: Budget, wishes: Wishes | None = None
) -> Planned:
    """Decide what is loaded so that it fits the budget. The plan may not fit: see `check_fits`.

    Raises what opening the models does: ModelFileError, BackendMissingError, OptionError.
    """
    wishes = wishes or Wishes()
    fixed = set(wishes.fixed)
    if "kv_type" in fixed:
        fixed.add("draft_kv_type")
    if "model" in how.asked or how.learn:
        fixed.add("draft")
    if "lowbit" in how.asked:
        fixed.add("copy")
    if how.window_tokens is not None or not {"auto", "model", "lowbit"} & set(how.methods):
        fixed.add("draft_window")
    with ExitStack() as undo:
        pairs = _Models(pair, how, options, undo)
        start = Choice(
            context_wanted(options, pairs.target.trained_context_tokens),
            options.kv_type,
            pair.draft is not None,
            how.window_tokens,
            options.gpu_layers,
        )

        forms = [] if "draft" in wishes.fixed else pairs.smaller_drafts(start, budget)

        def fit(kept: set[StepName]) -> tuple[Choice, MemoryPlan]:
            return fitted(
                start,
                pairs.measure,
                budget,
                fixed=frozenset(kept),
                prefer=wishes.prefer,
                gpu_layers=pairs.target.layers,
                draft_forms=forms,
            )

        choice, plan = fit(fixed)
        chosen = pairs.options_of(choice)
        if choice.draft_form:
            pair = replace(pair, draft=pairs.draft_of(choice))
        advice = "" if plan.fits else _advice(fixed, fit, pair, options, budget)
    if pair.draft and not choice.draft:
        pair = replace(pair, draft=None, why_no_draft=f"the draft {pair.draft.name} does not fit the memory")
    how = replace(
        how,
        window_tokens=choice.draft_window,
        room_for_copy=choice.copy,
        draft_kv_type=choice.draft_kv_type,
    )
    # The headroom is there for what backends count more closely, such as a file's own header.
    beside = ("process", "compute", "output")
    left = budget.bytes + budget.gpu_bytes - sum(item.bytes for item in plan.items if item.kind in beside)
    chosen = replace(chosen, memory_bytes=max(0, left))
    plan = _with_kept(plan, wishes.kept_bytes)
    return Planned(pair, how, chosen, choice.float32, plan, advice)


def _with_kept(plan: MemoryPlan, wanted_bytes: int | None) -> MemoryPlan:
    """The plan with what texts that are kept may take: never more than the rest leaves."""
    left = plan.left_bytes("memory")
    kept_bytes = memory_bound(left) if wanted_bytes is None else min(wanted_bytes, left)
    if not plan.fits or kept_bytes <= 0:
        return plan
    return replace(plan, items=(*plan.items, Item("kept", "kept texts, at most", "kept", kept_bytes)))


class _Models:
    """The metadata of a target and what drafts for it, opened while a plan is made."""

    def __init__(self, pair: Pair, how: Drafting, options: LoadOptions, undo: ExitStack) -> None:
        self._pair, self._how = pair, how
        self._options = replace(options, low_bits=pair.target.format == "mlx" and "lowbit" in how.asked)
        self.target = opened(pair.target, self._options)
        undo.callback(self.target.close)
        self._undo = undo
        self._drafts: dict[str, tuple[Resolved, Blueprint]] = {}
        if pair.draft:
            self._drafts[""] = pair.draft, self._opened_draft(pair.draft)
        self._copy: Blueprint | None = None
        if copy := _lowbit_copy(pair, how):
            self._copy = opened(copy, options)
            undo.callback(self._copy.close)
        self._process_bytes = max(
            _PROCESS_BYTES[each.format] for each in (pair.target, pair.draft) if each is not None
        )

    def _opened_draft(self, found: Resolved) -> Blueprint:
        draft = opened(found, replace(self._options, low_bits=False, draft=True, adapter=None))
        self._undo.callback(draft.close)
        return draft

    def smaller_drafts(self, start: Choice, budget: Budget) -> list[str]:
        """Files of the draft with fewer bits that are here, by name; looked for where the memory is short."""
        if self._pair.draft is None or fitted(start, self.measure, budget, fixed=_EVERYTHING)[1].fits:
            return []
        for found in smaller_forms(self._pair.draft, look()):
            with suppress(EdgespecError):
                self._drafts[found.name] = found, self._opened_draft(found)
        return [name for name in self._drafts if name]

    def draft_of(self, choice: Choice) -> Resolved:
        """The file that drafts."""
        return self._drafts[choice.draft_form][0]

    def options_of(self, choice: Choice) -> LoadOptions:
        """How the target is loaded."""
        return replace(
            self._options,
            context_tokens=choice.context_tokens,
            kv_type=choice.kv_type,
            gpu_layers=choice.gpu_layers,
        )

    def measure(self, choice: Choice) -> Measured:
        """See `ladder.Measure`."""
        options = self.options_of(choice)
        pair = self._pair
        target_options = meant_for(pair.target, pair.draft, options)
        # MLX takes float32 wherever there is room for it.
        room = _ROOM_BYTES if choice.float32 else 0
        target = self.target.footprint(replace(target_options, memory_bytes=room))
        items = list(items_of("target", target))
        if self._drafts and choice.draft:
            found, draft = self._drafts[choice.draft_form]
            drafting = replace(
                for_draft(options, target.context_tokens, None),
                memory_bytes=_ROOM_BYTES,
                kv_type=choice.draft_kv_type or options.kv_type,
            )
            drafting = replace(
                meant_for(found, pair.target, drafting),
                context_for=lambda trained: self._draft_tokens(choice, target.context_tokens, trained),
            )
            items += items_of("draft", draft.footprint(drafting))
        if self._copy and choice.copy:
            tokens = self._copied_tokens(choice, target.context_tokens)
            items += items_of("low-bit copy", self._copy.footprint(replace(options, context_tokens=tokens)))
        taken = sum(item.bytes for item in items)
        items.append(Item("Python", "Python and its libraries", "process", self._process_bytes))
        items.append(Item("free", "headroom", "headroom", _headroom(taken)))
        return Measured(tuple(items), target)

    def _draft_tokens(self, choice: Choice, target_tokens: int, trained_tokens: int) -> int:
        """The context of the draft: the target's, or that of its window."""
        window = window_for(target_tokens, trained_tokens, choice.draft_window, self._how.sink_tokens)
        return window.context_tokens if window else target_tokens

    def _copied_tokens(self, choice: Choice, target_tokens: int) -> int:
        """The context of a low-bit copy: as large as the target's, or its window and the drafts after it."""
        if not choice.draft_window:
            return target_tokens
        from edgespec.backends.llamacpp.lowbit import COPY_ROOM_TOKENS

        return min(target_tokens, self._how.sink_tokens + choice.draft_window + COPY_ROOM_TOKENS)


def opened(found: Resolved, options: LoadOptions) -> Blueprint:
    """The metadata of a model, opened by the backend of its format. Raises what loading it would."""
    if found.format == "mlx":
        require_mlx(found.name)
        from edgespec.backends.mlx.blueprint import MlxBlueprint

        return MlxBlueprint(str(found.path), found.name, options)
    from edgespec.backends.llamacpp import blueprint

    if found.format == "layerskip":
        return blueprint.HalvesBlueprint(str(found.path), found.name)
    return blueprint.GgufBlueprint(str(found.path), found.name)


def _lowbit_copy(pair: Pair, how: Drafting) -> Resolved | None:
    """The copy with fewer bits that will draft for a GGUF target: named, or `auto`'s for want of a draft."""
    automatic = "auto" in how.methods and pair.draft is None and pair.target.format == "gguf"
    if pair.target.format == "mlx" or not ("lowbit" in how.asked or automatic):
        return None
    from edgespec.prepare.lowbit import copy_path, find_lowbit

    prepared = find_lowbit(pair.target.path)
    if prepared is None or not copy_path(prepared).exists():
        return None
    return replace(
        pair.target, name=f"{pair.target.name} at low bits", path=copy_path(prepared), format="gguf"
    )


def _advice(
    fixed: set[StepName],
    fit: Callable[[set[StepName]], tuple[Choice, MemoryPlan]],
    pair: Pair,
    options: LoadOptions,
    budget: Budget,
) -> str:
    """What to give up of what was asked for, or the nearest model that would fit."""
    for name, text in _ADVICE.items():
        if name in fixed:
            choice, plan = fit(fixed - {name})
            if plan.fits:
                return text.format(context=choice.context_tokens)
    room = budget.bytes + budget.gpu_bytes
    more = "give more with --memory"
    for smaller in smaller_models(pair.target, look()):
        if weight_bytes := _fitting_weights(smaller, options, room):
            size = readable(weight_bytes)
            return f"choose {smaller.name} ({size}), the nearest model on this machine, or {more}"
    fitting = [
        entry
        for entry in load_catalogue().entries
        if entry.approximate_file_bytes + _PROCESS_BYTES[entry.format] < room * _WEIGHTS_SHARE
        and entry is not pair.target.entry
    ]
    if not fitting:
        return f"choose a smaller model or quantisation, or {more}"
    nearest = max(fitting, key=lambda entry: entry.approximate_file_bytes)
    size = readable(nearest.approximate_file_bytes)
    return f"choose a smaller model, such as {nearest.name} ({size}), or a smaller quantisation, or {more}"


def _fitting_weights(found: Resolved, options: LoadOptions, room_bytes: int) -> int:
    """What the weights of a model take; 0 where it does not fit by itself, nor with a short context."""
    asked = replace(options, context_tokens=options.context_tokens or _LEAST_CONTEXT_TOKENS, memory_bytes=0)
    try:
        model = opened(found, asked)
    except EdgespecError:
        return 0
    try:
        footprint = model.footprint(replace(asked, memory_bytes=room_bytes))
    except EdgespecError:
        return 0
    finally:
        model.close()
    taken = footprint.bytes + _headroom(footprint.bytes) + _PROCESS_BYTES[found.format]
    return footprint.of("weights") if taken <= room_bytes else 0


def _headroom(taken_bytes: int) -> int:
    return max(_LEAST_HEADROOM_BYTES, int(taken_bytes * _HEADROOM_SHARE))


def check_fits(planned: Planned) -> None:
    """Raises MemoryBudgetError with the numbers and the next step where the plan does not fit."""
    plan = planned.plan
    if plan.fits:
        return
    pool = min(plan.pools, key=plan.left_bytes)
    where = "on the graphics cards" if pool == "gpu" else ""
    parts = [item for item in plan.items if item.pool == pool]
    largest = sorted(parts, key=lambda item: -item.bytes)[:3]
    named = ", ".join(f"{item.name} {readable(item.bytes)}" for item in largest)
    raise MemoryBudgetError(
        f"{planned.pair.target.name} with a context of {planned.options.context_tokens:,} tokens takes"
        f" {readable(plan.taken_bytes(pool))}{where} and {readable(plan.budget_bytes(pool))} are there"
        f" ({plan.budget.source}): {named}",
        planned.advice,
    )
