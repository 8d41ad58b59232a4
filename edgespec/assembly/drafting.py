"""Create the drafters that the selected methods need, or explain why one is missing."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from typing import cast

from edgespec.assembly.drafting_options import DraftingOptions
from edgespec.assembly.pair_loading import LoadedDraft
from edgespec.assembly.pairing import ModelPair
from edgespec.auto.controller import AutoConfig
from edgespec.auto.live_costs import LiveCosts
from edgespec.auto.loss_limit import LossLimits
from edgespec.backends.base import LanguageModel, Progress
from edgespec.backends.optional_features import HeadModel, Skippable, Trainable
from edgespec.backends.registry import all_files
from edgespec.backends.self_draft_methods import EarlyExit, LowBit, SelfDraft, SkippedLayers
from edgespec.corpus import suffix_drafter
from edgespec.costs.curve import CostCurve, assumed_cost
from edgespec.costs.pass_limits import PassLimits
from edgespec.costs.target_costs import PassCosts
from edgespec.drafters.adaptive_tree import AdaptiveTreeGrowth
from edgespec.drafters.base import Drafter
from edgespec.drafters.draft_cache import DraftCache
from edgespec.drafters.head_cache import HeadCache
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.tree_growth import TreeGrowth
from edgespec.errors import CapabilityError, EdgespecError, OptionError
from edgespec.files import file_state
from edgespec.method_names import HEADS, SELF_DRAFTS
from edgespec.methods import DrafterSet, LoadedHead, MissingDrafter
from edgespec.prepare.calibration import calibration_prompt, greedy_reply
from edgespec.prepare.exit_table import exit_table
from edgespec.prepare.store import PreparedModel, read_prepared
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
        # Notices that explain why heads that were found are not used.
        self._head_notices: list[str] = []
        self._heads: list[LoadedHead] = []
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
        makers: dict[str, Callable[[], Drafter | MissingDrafter]] = {
            "lookahead": self._make_lookahead,
            "layerskip": self._make_layerskip,
            "lowbit": self._make_lowbit,
            "swift": self._make_swift,
            **{name: partial(self._make_head, name) for name in HEADS},
        }
        # Whether a method cannot be used with this file at all. Omitting --parallel would then not help.
        needs_other_file = {
            "swift": not self._format.skips_layers,
            "layerskip": "layerskip" in self._format.preparations,
        }
        for name, make in makers.items():
            if not self._shares_passes or name not in (*SELF_DRAFTS, *HEADS):
                self.made[name] = make() if name in needed else _not_loaded(name)
            elif needs_other_file.get(name):
                self.made[name] = make()
            else:
                self.made[name] = self._not_shared(name, is_loaded=name in needed)
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
            heads=self._heads,
            chain_model=draft.model if draft and not draft.drafter and not changes_chains else None,
            why_no_draft=self._pair.why_no_draft,
            v=self._curve.v if self._options.combines_drafters else assumed_cost,
            auto_config=config,
        )
        return drafters, (
            corpus_notice,
            *(self._head_notices or [self._pair.why_heads]),
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

    @property
    def _reference(self) -> str:
        found = self._target
        return shlex.quote(str(found.path)) if found.source == "path" else found.name

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

    def _make_layerskip(self) -> Drafter | MissingDrafter:
        facts = self._model.facts
        if "layerskip" in self._format.preparations:
            return MissingDrafter(
                f"{facts.name} was not prepared for early exit",
                f"run `edgespec prepare layerskip {self._reference}` once",
            )
        if "layerskip" not in facts.capabilities.self_draft_methods:
            return self._missing_self_draft(EarlyExit(1))
        exit_layer = self._arguments["exit_layer"]
        if self._format.fixed_exit:
            if exit_layer is not None:
                raise OptionError(
                    f"exit_layer cannot be set for {facts.name}, which was prepared for a single exit layer",
                    "omit --exit-layer, or run `edgespec prepare layerskip REF --exit E` again",
                )
            exit_layer = int(read_prepared(self._target.path).settings["exit_layer"])
        view = self._model.self_draft(EarlyExit(exit_layer or self._measure_best_exit()))
        return self._model_drafter(view, "layerskip")

    def _not_shared(self, name: str, *, is_loaded: bool) -> MissingDrafter:
        """Return why a drafter is missing that cannot draft for several replies, with everything it needs.

        Args:
            name: The drafter.
            is_loaded: Whether the drafter was requested when the model was loaded.
        """
        alone = "omit --parallel" if is_loaded else f"load the model with --method {name} and no --parallel"
        if name in HEADS:
            alone += f", with a head for it (see `edgespec models show {self._reference}`)"
        elif name == "lowbit" and self._needs_lowbit_copy():
            alone += f" and run `edgespec prepare lowbit {self._reference}` once"
        return MissingDrafter(
            f"{name} cannot draft for several replies at once, as --parallel requires",
            f"choose another method, such as model or suffix, or {alone}",
        )

    def _missing_self_draft(self, self_draft: SelfDraft) -> MissingDrafter:
        why, hint = f"{self._model.facts.name} cannot draft for itself", ""
        try:
            self._model.self_draft(self_draft).close()
        except CapabilityError as error:
            why, hint = error.what, error.next_step
        return MissingDrafter(why, hint or "choose another method")

    def _measure_best_exit(self) -> int:
        """Measure and return the fastest exit layer. Raise CapabilityError if none beats plain decoding."""
        measure = self._format.measure_exits
        assert measure is not None
        prompt = calibration_prompt(self._model.vocabulary)
        if len(prompt) >= self._model.free_tokens:
            raise CapabilityError(
                f"a context of {self._model.facts.context_tokens} tokens is too small to measure early exits",
                "pass --exit-layer, or use a larger --context",
            )
        try:
            reply = greedy_reply(self._model, prompt)
            self._model.truncate(0)
            table = exit_table(*measure(self._model, [*prompt, *reply], len(prompt) - 1), self._curve.v)
        finally:
            self._model.truncate(0)
        if not table.is_faster:
            raise CapabilityError(
                f"{self._model.facts.name}: {table.verdict}", "choose another method, or pass --exit-layer"
            )
        return table.best.exit_layer

    def _make_lowbit(self) -> Drafter | MissingDrafter:
        facts = self._model.facts
        copy = None
        if "lowbit" not in facts.capabilities.self_draft_methods:
            return self._missing_self_draft(LowBit(facts.path if self._format.low_bit_copy_format else None))
        if self._format.low_bit_copy_format:
            prepared = self._checked_lowbit_copy()
            if prepared is None:
                return MissingDrafter(
                    f"there is no low-bit copy of {facts.name}",
                    f"run `edgespec prepare lowbit {self._reference}` once",
                )
            from edgespec.prepare.lowbit import lowbit_file

            copy = str(lowbit_file(prepared))
        low_bit = LowBit(copy, self._arguments["draft_sinks"], self._options.window_tokens or None)
        return self._model_drafter(self._model.self_draft(low_bit), "lowbit")

    def _make_head(self, name: str) -> Drafter | MissingDrafter:
        heads = {option.method: option for option in self._pair.heads}
        option = heads.get(name)
        if option is None or option.head is None:
            if heads and (other := next(iter(heads.values()))).source == "named":
                return MissingDrafter(
                    f"{other.name} is a head for method {other.method}",
                    f"use --method {other.method}",
                )
            reason = f"it needs a head that was trained for {self._model.facts.name}"
            advice = f"pass one with --head REF (see `edgespec models show {self._reference}`)"
            return MissingDrafter(f"{reason}, but {self._pair.why_no_head}", self._pair.head_advice or advice)
        if name not in self._model.facts.capabilities.self_draft_methods:
            missing = self._missing_self_draft(option.head)
            self._head_notices.append(f"not drafting with the head {option.name}: {missing.reason}")
            return missing
        try:
            view = cast(HeadModel, self._model.self_draft(option.head))
        except EdgespecError as error:
            if option.source == "named" or name in self._options.named_drafters:
                raise
            self._head_notices.append(f"not drafting with the head {option.name}: {error.what}")
            return MissingDrafter(error.what, error.next_step)
        files = all_files(option.head.path) if option.head.path else ()
        cache = HeadCache(view, " ".join((name, *map(file_state, files))))
        path = str(option.head.path) if option.head.path else ""
        self._heads.append(LoadedHead(option.name, path, cache))
        return self._model_drafter(view, name, cache)

    def _needs_lowbit_copy(self) -> bool:
        from edgespec.prepare.lowbit import find_lowbit

        return bool(self._format.low_bit_copy_format) and find_lowbit(self._target.path) is None

    def _checked_lowbit_copy(self) -> PreparedModel | None:
        from edgespec.prepare.lowbit import check_lowbit, find_lowbit

        prepared = find_lowbit(self._target.path)
        if prepared:
            check_lowbit(prepared, self._target.path)
        return prepared

    def _make_swift(self) -> Drafter | MissingDrafter:
        from edgespec.drafters.swift import SwiftDrafter

        facts = self._model.facts
        if not self._format.skips_layers:
            return MissingDrafter(
                f"{facts.name} cannot skip layers, because it is not an MLX model",
                "choose another method, such as model or suffix",
            )
        if "swift" not in facts.capabilities.self_draft_methods:
            return self._missing_self_draft(SkippedLayers((1,)))
        return SwiftDrafter(
            cast(Skippable, self._model),
            store=SavedArrays("swift", models_fingerprint(facts)),
            pass_cost=self._curve.v,
            min_confidence=self._arguments["draft_confidence"],
        )

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
