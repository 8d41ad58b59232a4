"""Create the drafters that the selected methods need, or explain why one is missing."""

from __future__ import annotations

from typing import cast

from edgespec.assembly.drafting_options import DraftingOptions
from edgespec.assembly.pair_loading import LoadedDraft
from edgespec.assembly.pairing import ModelPair
from edgespec.assembly.self_drafting import SelfDrafters
from edgespec.auto.controller import AutoConfig
from edgespec.auto.live_costs import LiveCosts
from edgespec.auto.loss_limit import LossLimits
from edgespec.backends.base import LanguageModel, Progress
from edgespec.backends.optional_features import Trainable
from edgespec.backends.registry import all_files
from edgespec.corpus import suffix_drafter
from edgespec.costs.curve import CostCurve, assumed_cost
from edgespec.costs.pass_limits import PassLimits
from edgespec.costs.target_costs import PassCosts
from edgespec.drafters.adaptive_tree import AdaptiveTreeGrowth
from edgespec.drafters.base import Drafter
from edgespec.drafters.draft_cache import DraftCache
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.tree_growth import TreeGrowth
from edgespec.errors import OptionError
from edgespec.files import file_state
from edgespec.method_names import HEADS, SELF_DRAFTS
from edgespec.methods import DrafterSet, MissingDrafter
from edgespec.saved_arrays import SavedArrays, models_fingerprint

__all__ = ["make_drafters"]


def make_drafters(
    pair: ModelPair,
    model: LanguageModel,
    draft: LoadedDraft | None,
    options: DraftingOptions,
    costs: PassCosts,
    progress: Progress | None,
    *,
    shares_passes: bool = False,
    live_costs: LiveCosts | None = None,
) -> tuple[DrafterSet, tuple[str, ...]]:
    """Create the drafters for a loaded target, and return them with notices for the user.

    Can clear the target's KV cache, to measure the target's speed.

    Args:
        pair: The target and its draft model.
        model: The loaded target.
        draft: The loaded draft model, or None.
        options: The drafting options.
        costs: Provides the target's cost curve.
        progress: Called with a description and the completed fraction. Returns False to cancel.
        shares_passes: Whether the target shares its passes with other replies.
        live_costs: The live costs of another reply of this target, to share them. None creates new ones.

    Raises:
        CapabilityError, OptionError, ModelFileError, MemoryBudgetError: A drafter that a method needs cannot
            be created. Drafters already created are closed.
        CancelledError: `progress` returned False.
    """
    factory = _DrafterFactory(pair, model, options, costs, progress, shares_passes, live_costs)
    try:
        return factory.make_all(draft)
    except BaseException:
        for drafter in factory.made.values():
            if isinstance(drafter, Drafter):
                drafter.close()
        raise


class _DrafterFactory:
    """Creates the drafters for one target. `made` maps names to the drafters created so far."""

    def __init__(
        self,
        pair: ModelPair,
        model: LanguageModel,
        options: DraftingOptions,
        costs: PassCosts,
        progress: Progress | None,
        shares_passes: bool,
        live_costs: LiveCosts | None,
    ) -> None:
        self._pair = pair
        self._shares_passes, self._live_costs = shares_passes, live_costs
        self._target = pair.target
        self._format = pair.target.file_format
        self._costs = costs
        self._model = model
        self._options = options
        self._arguments = options.arguments
        self._progress = progress
        self._measured_curve: CostCurve | None = None
        self._self_drafters = SelfDrafters(pair, model, options, lambda: self._curve, self._model_drafter)
        self.made: dict[str, Drafter | MissingDrafter] = {}

    def make_all(self, draft: LoadedDraft | None) -> tuple[DrafterSet, tuple[str, ...]]:
        corpus = self._arguments["corpus"]
        suffix, corpus_notice = suffix_drafter(
            self._model.vocabulary,
            corpus=None if corpus is None else str(corpus),
            remember=self._arguments["remember"],
            can_branch=self._model.facts.capabilities.tree,
            progress=self._progress,
        )
        self.made["suffix"] = suffix
        needed = self._options.named_drafters | self._automatic_self_drafts(draft)
        own = self._self_drafters
        self.made["lookahead"] = self._make_lookahead() if "lookahead" in needed else _not_loaded("lookahead")
        for name in (*SELF_DRAFTS, *HEADS):
            if self._shares_passes and name in SELF_DRAFTS:
                self.made[name] = own.why_not_shared(name, is_loaded=name in needed)
            else:
                self.made[name] = own.make(name) if name in needed else _not_loaded(name)
        if draft:
            self.made["model"] = self._make_model(draft)
        elif self._arguments["learn"]:
            raise OptionError(
                "--learn trains the draft model, but no draft model is loaded",
                "pass an MLX draft model with --draft REF",
            )
        changes_chains = self._arguments["learn"] or self._arguments["draft_branches"]
        config = self._auto_config(draft)
        drafters = DrafterSet(
            self._model,
            self.made,
            heads=own.loaded_heads,
            chain_model=draft.model if draft and not draft.drafter and not changes_chains else None,
            why_no_draft=self._pair.why_no_draft,
            v=self._curve.v if self._options.combines_drafters else assumed_cost,
            auto_config=config,
        )
        return drafters, (
            corpus_notice,
            *(own.notices or [self._pair.why_heads]),
            self._costs.notice if self._measured_curve else "",
        )

    def _automatic_self_drafts(self, draft: LoadedDraft | None) -> set[str]:
        if "auto" not in self._options.methods:
            return set()
        if self._pair.heads:
            return {head.method for head in self._pair.heads}
        if draft is not None:
            return set()
        if self._format.fixed_exit:
            return {"layerskip"}
        from edgespec.prepare.lowbit import find_valid_lowbit

        may_copy = self._format.low_bit_copy_format and self._options.has_room_for_copy
        return {"lowbit"} if may_copy and find_valid_lowbit(self._target.path) else set()

    def _auto_config(self, draft: LoadedDraft | None) -> AutoConfig | None:
        max_loss = self._arguments["max_loss"]
        if not self._costs.has_loss_limit or ("auto" not in self._options.methods and max_loss is None):
            return None
        if not self._model.facts.capabilities.rollback:
            return None
        limits = LossLimits() if max_loss is None else LossLimits(max_loss)
        adapts = not self._arguments["draft_branches"] and not self._arguments["draft_confidence"]
        models = [self._model.facts, *([draft.model.facts] if draft else [])]

        curve, threads = self._curve, self._model.threads

        paths = [option.head.path for option in self._pair.heads if option.head and option.head.path]
        heads = [file_state(file) for path in paths for file in all_files(path)]

        def saved_statistics(names: str) -> SavedArrays:
            settings = f"{self._costs.settings_key} {threads} {heads}"
            return SavedArrays("policy", f"{models_fingerprint(*models)} {settings} {names}")

        if self._live_costs:
            live_costs = self._live_costs.for_another_slot()
        else:
            live_costs = LiveCosts(curve, threads, shares_passes=self._shares_passes)
        return AutoConfig(
            limits,
            live_costs,
            saved_statistics,
            controls_named=max_loss is not None,
            adapts_length=adapts,
        )

    @property
    def _curve(self) -> CostCurve:
        """The duration of the target's forward passes by number of tokens, measured on first use."""
        if self._measured_curve is None:
            self._measured_curve = self._costs.curve(self._progress)
        return self._measured_curve

    def _growth(self, draft: LanguageModel) -> tuple[int, ...] | TreeGrowth:
        branches = self._arguments["draft_branches"]
        if not isinstance(branches, str):
            return branches
        limits = PassLimits.of(self._model.facts.capabilities, draft.facts.capabilities)
        return AdaptiveTreeGrowth(limits, self._curve.v)

    def _model_drafter(
        self, draft: LanguageModel, name: str, cache: DraftCache | None = None
    ) -> ModelDrafter:
        return ModelDrafter(
            draft,
            self._model.facts.vocab_size,
            branches=self._growth(draft),
            min_confidence=self._arguments["draft_confidence"],
            name=name,
            cache=cache,
        )

    def _make_model(self, draft: LoadedDraft) -> Drafter:
        if draft.drafter:
            return draft.drafter
        if self._arguments["learn"]:
            return self._make_online(draft.model)
        return self._model_drafter(draft.model, "model")

    def _make_lookahead(self) -> Drafter:
        return LookaheadDrafter(self._model.facts.capabilities, self._curve)

    def _make_online(self, draft: LanguageModel) -> Drafter:
        """Create a drafter that trains its draft model between replies."""
        from edgespec.drafters.online import OnlineDrafter, OnlineTrainer

        saved = SavedArrays("online", models_fingerprint(self._model.facts, draft.facts))
        return OnlineDrafter(
            draft,
            self._model.facts.vocab_size,
            OnlineTrainer(DraftCache(draft), cast(Trainable, draft).trainer(), store=saved),
            branches=self._growth(draft),
            min_confidence=self._arguments["draft_confidence"],
        )


def _not_loaded(name: str) -> MissingDrafter:
    return MissingDrafter(
        f"{name} was not requested when the model was loaded",
        f"load the model with --method {name} (in Python, use the option `method` or `methods`)",
    )
