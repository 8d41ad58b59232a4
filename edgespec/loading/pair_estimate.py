"""Estimate the total memory needed by a target and all its drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError, ModelFileError, about_option
from edgespec.loading.constants import STREAMED_ROWS
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pairing import ModelPair, draft_load_options, loading_draft, options_in_pair
from edgespec.memory.budget import Budget
from edgespec.memory.fitting import PlanChoice
from edgespec.memory.plan import Item, MemoryPlan, Streaming, create_items, shared_items
from edgespec.methods.lowbit.drafter import Substitutes
from edgespec.methods.model.windowed import AttentionWindow, choose_draft_window
from edgespec.model.base import LoadOptions
from edgespec.model.formats.projector import estimate_projector
from edgespec.model.memory_estimate import GPU, MemoryEstimator, MemoryPart
from edgespec.options.methods import Method, methods
from edgespec.options.methods import method as method_of_name
from edgespec.store.hub_files import hub_cache_folder
from edgespec.store.installed import find_installed, smaller_quantisations
from edgespec.store.reference import Resolved
from edgespec.system.disks import (
    folder_bytes_per_second,
    is_sparse,
    largest_file,
    network_drive,
    read_bytes_per_second,
)
from edgespec.system.files import reading_model_files

_UNLIMITED_BYTES = 1 << 62


class PairEstimator:
    """Estimates the memory needed by a target and all its drafters.

    Args:
        pair: The target and its draft model.
        drafting: The drafting options.
        options: The load options.
        undo: Exit stack that closes the opened model files.
        budget: The memory budget.
        headroom_bytes: Additional memory that each plan reserves, or None for the default.
        substitutes: Low-bit copies of blocks to plan with, or None to look for prepared ones.

    Attributes:
        target: Estimates the memory of the target alone.
        substitutes: Sets of low-bit copies of blocks to draft with while the target streams these blocks, the
            preferred one first.
        why_in_turns: Why replies run one at a time although the user asked for concurrent ones. Empty
            otherwise.
    """

    def __init__(
        self,
        pair: ModelPair,
        drafting: DraftingOptions,
        options: LoadOptions,
        undo: ExitStack,
        budget: Budget,
        headroom_bytes: int | None = None,
        substitutes: Substitutes | None = None,
    ) -> None:
        self._pair, self._drafting = pair, drafting
        self._budget, self._headroom_bytes = budget, headroom_bytes
        self._plans: dict[PlanChoice, MemoryPlan] = {}
        self._options = replace(
            options, low_bits=pair.target.file_format.low_bit_weights and drafting.names_copy
        )
        with about_option("target", ModelFileError):
            self.target = open_estimator(pair.target, self._options)
        undo.callback(self.target.close)
        self._undo = undo
        # Draft models and their estimators, keyed by the name of the lower-bit version, or by "" for the
        # requested draft model.
        self._drafts: dict[str, tuple[Resolved, MemoryEstimator]] = {}
        if pair.draft:
            with loading_draft(pair):
                self._drafts[""] = pair.draft, self._open_draft(pair.draft)
        self.why_in_turns = self._why_in_turns() if options.parallel > 1 else ""
        if self.why_in_turns:
            self._options = replace(self._options, parallel=1)
        elif options.parallel > 1 or options.workers is not None:
            # Allocate the whole context up front. A context shared by several replies cannot grow, and
            # growing one on workers would copy it over the network.
            self._options = replace(self._options, initial_context_tokens=None)
        self._copy: MemoryEstimator | None = None
        shares_passes = self._options.parallel > 1
        copy = None if options.workers else _find_copy(pair, drafting, shares_passes)
        if copy is not None:
            self._copy = open_estimator(copy, replace(options, adapters=()))
            undo.callback(self._copy.close)
        self.substitutes: Sequence[Substitutes] = [substitutes] if substitutes else []
        if substitutes is None and options.workers is None:
            self.substitutes = _find_substitutes(pair, drafting, shares_passes)
        self._process_bytes = max(backend.process_bytes for backend in pair.backends)

    def _open_draft(self, draft: Resolved) -> MemoryEstimator:
        with about_option("draft", ModelFileError):
            estimator = open_estimator(draft, self._options.for_draft())
        self._undo.callback(estimator.close)
        return estimator

    @property
    def initial_context_tokens(self) -> int | None:
        """The context size to start with, or None to allocate the full context immediately."""
        return self._options.initial_context_tokens

    def _why_in_turns(self) -> str:
        if self._drafting.arguments["exactness"] == "bits":
            return "with --exactness bits, replies cannot be computed together"
        for estimator in (self.target, *(estimator for _, estimator in self._drafts.values())):
            if estimator.why_not_shared:
                return (
                    f"{estimator.name} cannot generate several replies at once, because"
                    f" {estimator.why_not_shared}"
                )
        return ""

    def smaller_drafts(self, start: PlanChoice) -> list[str]:
        """Return the names of the installed lower-bit versions of the draft model.

        Returns an empty list if the models already fit in memory with the options `start`.
        """
        if self._pair.draft is None or self.plan(start).fits:
            return []
        for draft in smaller_quantisations(self._pair.draft, find_installed()):
            with suppress(EdgespecError):
                self._drafts[draft.name] = draft, self._open_draft(draft)
        return [name for name in self._drafts if name]

    def draft_file(self, choice: PlanChoice) -> Resolved:
        return self._drafts[choice.draft_form][0]

    def load_options(self, choice: PlanChoice) -> LoadOptions:
        """Return the target's load options with the values from `choice`."""
        heads = [option.head for option in self._pair.heads[: choice.heads] if option.head]
        copies = self._substitutes_of(choice)
        return replace(
            self._options,
            own_head=any(head.path is None for head in heads),
            context_tokens=choice.context_tokens,
            kv_type=choice.kv_type,
            # A model that is streamed runs on the CPU.
            gpu_layers=0 if choice.streamed_layers else choice.gpu_layers,
            # Keep None for "not set", because only an option that was set can be reported as having no
            # effect.
            experts=choice.experts or self._options.experts,
            streamed_layers=choice.streamed_layers,
            streamable=tuple(copies.layer_bytes) if copies else None,
            batch_tokens=choice.batch_tokens or self._options.batch_tokens,
            max_logit_rows=STREAMED_ROWS if self._can_limit_rows(choice) else None,
        )

    def _can_limit_rows(self, choice: PlanChoice) -> bool:
        """Return whether a streamed target can reserve memory for the logits of fewer tokens per pass.

        Heads need the hidden states of a whole batch. The user may have asked for wide draft trees, and
        replies that share passes need more rows.
        """
        branches = self._drafting.arguments["draft_branches"]
        tree_rows = 1 if isinstance(branches, str) else 1 + sum(accumulate(branches, mul))
        return (
            choice.streamed_layers > 0
            and not choice.heads
            and tree_rows <= STREAMED_ROWS
            and self._options.parallel == 1
        )

    def _substitutes_of(self, choice: PlanChoice) -> Substitutes | None:
        return next((each for each in self.substitutes if each.file == choice.substitutes), None)

    def streaming(self, choice: PlanChoice) -> Streaming | None:
        """Return what each pass would read from disk, after measuring the disk's read speed.

        Raises:
            ModelFileError: The model's file cannot be read.
        """
        if not choice.streamed_layers:
            return None
        files = self._pair.target.file_format.files(self._pair.target.path)
        with reading_model_files(files[0]):
            path = largest_file(files)
            if is_sparse(path):
                # The model is not on this machine, and reading the holes in its sparse file would measure
                # memory speed.
                path = hub_cache_folder()
                speed = folder_bytes_per_second(path)
            else:
                speed = read_bytes_per_second(path)
        options = self.load_options(choice)
        streamed, experts = self.target.streamed_bytes(options), self.target.expert_reads(options)
        copies = self._substitutes_of(choice)
        return Streaming(
            len(streamed),
            self.target.streamable_layers,
            sum(streamed.values()),
            speed,
            copies.bytes_of(list(streamed)) if copies else 0,
            network_drive(path),
            *((experts.all_bytes, experts.kept_bytes) if experts else ()),
        )

    def plan(self, choice: PlanChoice) -> MemoryPlan:
        """Return the memory plan for a choice of load options. May raise OptionError or MemoryBudgetError."""
        if choice not in self._plans:
            self._plans[choice] = self._make_plan(choice)
        return self._plans[choice]

    def _make_plan(self, choice: PlanChoice) -> MemoryPlan:
        options = self.load_options(choice)
        pair = self._pair
        target_options = options_in_pair(pair.target, pair.draft, options)
        # Use the memory limit to control conversion to float32, because MLX converts the weights only if the
        # result fits within the limit.
        room = _UNLIMITED_BYTES if choice.float32 else 0
        target = self.target.estimate(replace(target_options, memory_bytes=room))
        items = list(create_items("target", target))
        if options.projector:
            on_gpu = options.gpu_layers != 0 and any(part.pool == GPU for part in target.parts)
            projector = estimate_projector(
                Path(options.projector), on_gpu=on_gpu, small_images=options.small_images
            )
            items += create_items("projector", projector)
        if self._drafts and choice.draft:
            items += self._draft_items(choice, options, target.context_tokens)
        if copies := self._substitutes_of(choice):
            items += self._substitute_items(choice, copies, options, target.context_tokens)
        elif self._copy and choice.copy:
            tokens = self._copy_context_tokens(choice, target.context_tokens)
            copy_options = replace(options, adapters=(), projector="", context_tokens=tokens)
            items += create_items("low-bit copy", self._copy.estimate(copy_options))
        for option in pair.heads[: choice.heads]:
            assert option.head is not None
            role = "head" if len(pair.heads) == 1 else f"{option.method} head"
            one = pair.target.file_format.estimate_head(option.head, pair.target.path, target.context_tokens)
            one = one.for_replies(options.parallel)
            items += create_items(role, one.without_gpu() if options.gpu_layers == 0 else one)
        for method in map(method_of_name, sorted(self._drafting.named_drafters)):
            size = method.estimate_bytes(pair.target, target.context_tokens) * options.parallel
            items += [Item(method.name, f"{method.name} drafter", "cache", size)] if size else []
        # The weights of a streamed model are read into memory of exactly their size.
        without = {"unusable", "weights"} if choice.streamed_layers else {"unusable"}
        models_bytes = sum(item.bytes for item in items if item.kind not in without)
        items += shared_items(models_bytes, self._process_bytes, self._headroom_bytes)
        return MemoryPlan(
            self._budget,
            target.context_tokens,
            target.kv_type,
            tuple(items),
            machines=target.machines,
            experts=target.experts,
            why_experts_stay=target.why_experts_stay,
        )

    def _draft_items(self, choice: PlanChoice, options: LoadOptions, target_tokens: int) -> Sequence[Item]:
        draft, estimator = self._drafts[choice.draft_form]
        draft_options = replace(
            draft_load_options(options, self._drafting, target_tokens, None),
            memory_bytes=_UNLIMITED_BYTES,
            kv_type=choice.draft_kv_type or options.kv_type,
        )
        draft_options = replace(
            options_in_pair(draft, self._pair.target, draft_options),
            choose_context_tokens=lambda trained: self._draft_tokens(choice, target_tokens, trained),
        )
        return create_items("draft", estimator.estimate(draft_options))

    def _substitute_items(
        self, choice: PlanChoice, copies: Substitutes, options: LoadOptions, target_tokens: int
    ) -> Sequence[Item]:
        """Return the memory items for drafting with low-bit blocks plus the target's other weights."""
        from edgespec.backends.llamacpp.lowbit import partial_copy_options

        tokens = self._copy_context_tokens(choice, target_tokens)
        estimate = self.target.estimate(replace(partial_copy_options(options), context_tokens=tokens))
        layers = list(self.target.streamed_bytes(options))
        parts = [part for part in estimate.parts if part.kind != "weights"]
        weights = MemoryPart("weights", copies.bytes_of(layers))
        return create_items("low-bit copy", replace(estimate, parts=(weights, *parts)))

    def _window(self, choice: PlanChoice, target_tokens: int, trained_tokens: int) -> AttentionWindow | None:
        return choose_draft_window(
            target_tokens, trained_tokens, choice.draft_window, self._drafting.arguments["draft_sinks"]
        )

    def _draft_tokens(self, choice: PlanChoice, target_tokens: int, trained_tokens: int) -> int:
        window = self._window(choice, target_tokens, trained_tokens)
        return window.context_tokens if window else target_tokens

    def draft_window(self, choice: PlanChoice, target_tokens: int) -> AttentionWindow | None:
        """Return the draft model's attention window, or None if there is no draft model or no window."""
        if not self._drafts or not choice.draft:
            return None
        trained = self._drafts[choice.draft_form][1].trained_context_tokens
        return self._window(choice, target_tokens, trained)

    def max_context_for_draft(self, choice: PlanChoice) -> int:
        """Return the longest target context that the draft model supports.

        A draft model with an attention window supports any length. Without a window, the limit is the context
        length that the model was trained for.
        """
        longest = self.target.trained_context_tokens
        if not self._drafts or not choice.draft or self.draft_window(choice, choice.context_tokens):
            return longest
        return self._drafts[choice.draft_form][1].trained_context_tokens or longest

    def _copy_context_tokens(self, choice: PlanChoice, target_tokens: int) -> int:
        if not choice.draft_window:
            return target_tokens
        from edgespec.backends.llamacpp.lowbit import WINDOW_EXTRA_TOKENS

        return min(
            target_tokens, self._drafting.arguments["draft_sinks"] + choice.draft_window + WINDOW_EXTRA_TOKENS
        )


def open_estimator(model: Resolved, options: LoadOptions) -> MemoryEstimator:
    """Return a memory estimator for a model. Raises the same errors as loading the model."""
    return model.file_format.open_estimator(str(model.path), model.name, options)


def _find_substitutes(
    pair: ModelPair, drafting: DraftingOptions, shares_passes: bool
) -> Sequence[Substitutes]:
    """Return sets of low-bit copies of the target's blocks. Raises the same errors as `_find_copy`."""
    found = _copies(pair, drafting, lambda method: method.find_substitutes, shares_passes)
    return next(filter(None, found), ())


def _find_copy(pair: ModelPair, drafting: DraftingOptions, shares_passes: bool) -> Resolved | None:
    """Return the copy of the target that a method drafts with, or None if there is none.

    Raises:
        ModelFileError: The user named the method, but the copy is damaged or outdated.
    """
    found = _copies(pair, drafting, lambda method: method.find_copy, shares_passes)
    return next(filter(None, found), None)


def _copies(
    pair: ModelPair,
    drafting: DraftingOptions,
    finder: Callable[[Method], Callable[[Any, bool], Any]],
    shares_passes: bool,
) -> Iterator[Any]:
    """Yield the result of `finder` for each method that may draft with copies of the target.

    If replies share passes (`shares_passes`), some methods cannot draft.
    """
    automatic = "auto" in drafting.methods and pair.draft is None and not pair.target.file_format.fixed_exit
    for each in methods():
        if shares_passes and not each.shares_passes:
            continue
        is_named = each.name in drafting.named_drafters
        if is_named or (automatic and each.auto == "fallback"):
            yield finder(each)(pair.target, is_named)
