"""Which drafters a target gets: by what was asked for, and by what the models can do."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from edgespec.assembly.drafting_options import Drafting
from edgespec.assembly.pairing import Draft
from edgespec.auto.controller import AutoConfig
from edgespec.auto.live_costs import LiveCosts
from edgespec.auto.loss_limit import LossLimits
from edgespec.backends.base import (
    EarlyExit,
    LanguageModel,
    LowBit,
    Progress,
    SelfDraft,
    SkippedLayers,
)
from edgespec.backends.optional_features import Skippable, Trainable
from edgespec.catalog import Resolved
from edgespec.corpus import suffix_drafter
from edgespec.costs.curve import CostCurve, CostFunction, assumed_cost
from edgespec.costs.pass_limits import PassLimits
from edgespec.costs.target_costs import PassCosts
from edgespec.drafters.adaptive_tree import AdaptiveTreeGrowth
from edgespec.drafters.base import Drafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.tree_growth import TreeGrowth
from edgespec.errors import CapabilityError, OptionError
from edgespec.methods import MissingDrafter
from edgespec.prepare.calibration import calibration_prompt, greedy_reply
from edgespec.prepare.exit_table import exit_table
from edgespec.prepare.store import PreparedModel, read_prepared
from edgespec.saved_arrays import SavedArrays, models_fingerprint

__all__ = ["Outfit", "outfit"]


@dataclass(frozen=True, slots=True)
class Outfit:
    """All that goes into `DrafterSet` for a target. notices: what a person should know about it."""

    others: dict[str, Drafter | MissingDrafter]
    growth: Callable[[LanguageModel], tuple[int, ...] | TreeGrowth]
    curve: CostFunction
    policy: AutoConfig | None
    notices: tuple[str, ...]


def outfit(
    found: Resolved,
    model: LanguageModel,
    draft: Draft | None,
    how: Drafting,
    costs: PassCosts,
    progress: Progress | None,
) -> Outfit:
    """Make the drafters of a target, or say why they are missing.

    Raises what making those fails with that were asked for: CapabilityError, OptionError, ModelFileError,
    MemoryBudgetError; CancelledError. What was made until then is closed.
    """
    maker = _Maker(found, model, how, costs, progress)
    try:
        return maker.all(draft)
    except BaseException:
        for drafter in maker.made.values():
            if isinstance(drafter, Drafter):
                drafter.close()
        raise


class _Maker:
    """Makes the drafters of one target."""

    def __init__(
        self,
        found: Resolved,
        model: LanguageModel,
        how: Drafting,
        costs: PassCosts,
        progress: Progress | None,
    ) -> None:
        self._found = found
        self._format = found.file_format
        self._costs = costs
        self._model = model
        self._how = how
        self._progress = progress
        self._curve: CostCurve | None = None
        self.made: dict[str, Drafter | MissingDrafter] = {}

    def all(self, draft: Draft | None) -> Outfit:
        suffix, said = suffix_drafter(
            self._model.vocabulary,
            corpus=self._how.corpus,
            remember=self._how.remember,
            can_branch=self._model.facts.capabilities.tree,
            progress=self._progress,
        )
        self.made["suffix"] = suffix
        asked = self._how.asked | self._automatic(draft)
        for name, make in (
            ("lookahead", self._lookahead),
            ("layerskip", self._layerskip),
            ("lowbit", self._lowbit),
            ("swift", self._swift),
        ):
            self.made[name] = make() if name in asked else _not_asked(name)
        if draft and draft.drafts:
            self.made["model"] = draft.drafts
        elif draft and self._how.learn:
            self.made["model"] = self._learning(draft.model)
        elif self._how.learn:
            raise OptionError(
                "there is no draft model that could learn", "give an MLX draft with --draft REF"
            )
        curve = self._v.v if self._how.together else assumed_cost
        policy = self._policy(draft)
        notices = (said, self._costs.notice if self._curve else "")
        return Outfit(self.made, self._growth, curve, policy, notices)

    def _automatic(self, draft: Draft | None) -> set[str]:
        """What `auto` takes in the place of a draft model, where that has been prepared."""
        if "auto" not in self._how.methods or draft is not None:
            return set()
        if self._format.fixed_exit:
            return {"layerskip"}
        from edgespec.prepare.lowbit import find_valid_lowbit

        wanted = self._format.low_bit_copy_format and self._how.room_for_copy
        return {"lowbit"} if wanted and find_valid_lowbit(self._found.path) else set()

    def _policy(self, draft: Draft | None) -> AutoConfig | None:
        """What decides round by round; nobody where all is drafted as it was asked for."""
        how = self._how
        if not self._costs.has_loss_limit or ("auto" not in how.methods and how.max_loss is None):
            return None
        if not self._model.facts.capabilities.rollback:
            return None
        terms = LossLimits() if how.max_loss is None else LossLimits(how.max_loss)
        grows = not how.branches and not how.confidence
        models = [self._model.facts, *([draft.model.facts] if draft else [])]

        def notes(names: str) -> SavedArrays:
            return SavedArrays("policy", f"{models_fingerprint(*models)} {self._costs.settings_key} {names}")

        return AutoConfig(
            terms, LiveCosts(self._v), notes, controls_named=how.max_loss is not None, adapts_length=grows
        )

    @property
    def _v(self) -> CostCurve:
        """The measured cost curve of the target; taken when something needs it."""
        if self._curve is None:
            self._curve = self._costs.curve(self._progress)
        return self._curve

    @property
    def _reference(self) -> str:
        """The target as a command line names it."""
        found = self._found
        return shlex.quote(str(found.path)) if found.source == "path" else found.name

    def _growth(self, draft: LanguageModel) -> tuple[int, ...] | TreeGrowth:
        """How the drafts of a model grow; each drafter needs one of its own."""
        branches = self._how.branches
        if not isinstance(branches, str):
            return branches
        limits = PassLimits.of(self._model.facts.capabilities, draft.facts.capabilities)
        return AdaptiveTreeGrowth(limits, self._v.v)

    def _drafter(self, draft: LanguageModel, name: str) -> ModelDrafter:
        return ModelDrafter(
            draft,
            self._model.facts.vocab_size,
            branches=self._growth(draft),
            min_confidence=self._how.confidence,
            name=name,
        )

    def _lookahead(self) -> Drafter:
        return LookaheadDrafter(self._model.facts.capabilities, self._v)

    def _layerskip(self) -> Drafter | MissingDrafter:
        facts = self._model.facts
        if "layerskip" in self._format.preparations:
            return MissingDrafter(
                f"{facts.name} was not prepared for early exit",
                f"run `edgespec prepare layerskip {self._reference}` once",
            )
        if "layerskip" not in facts.capabilities.self_draft_methods:
            return self._why_not(EarlyExit(1))
        exit_layer = self._how.exit_layer
        if self._format.fixed_exit:
            if exit_layer is not None:
                raise OptionError(
                    "exit_layer is for MLX models, and this one was prepared for one exit",
                    "leave --exit-layer out, or run `edgespec prepare layerskip REF --exit E` again",
                )
            exit_layer = int(read_prepared(self._found.path).settings["exit_layer"])
        return self._drafter(self._model.self_draft(EarlyExit(exit_layer or self._best_exit())), "layerskip")

    def _why_not(self, how: SelfDraft) -> MissingDrafter:
        """What the backend says of a way to draft for itself that was not exact when it was tried."""
        why, hint = f"{self._model.facts.name} cannot draft for itself", ""
        try:
            self._model.self_draft(how).close()
        except CapabilityError as error:
            why, hint = error.what, error.next_step
        return MissingDrafter(why, hint or "choose another method")

    def _best_exit(self) -> int:
        """The MLX model's best exit, measured. Raises CapabilityError where none pays."""
        measure = self._format.measure_exits
        assert measure is not None
        request = calibration_prompt(self._model.vocabulary)
        if len(request) >= self._model.free_tokens:
            raise CapabilityError(
                f"a context of {self._model.facts.context_tokens} tokens is too small to measure exits in",
                "give --exit-layer, or a larger --context",
            )
        try:
            reply = greedy_reply(self._model, request)
            self._model.truncate(0)
            table = exit_table(*measure(self._model, [*request, *reply], len(request) - 1), self._v.v)
        finally:
            self._model.truncate(0)
        if not table.is_faster:
            raise CapabilityError(
                f"{self._model.facts.name}: {table.verdict}", "choose another method, or give --exit-layer"
            )
        return table.best.exit_layer

    def _lowbit(self) -> Drafter | MissingDrafter:
        facts = self._model.facts
        copy = None
        if "lowbit" not in facts.capabilities.self_draft_methods:
            return self._why_not(LowBit(facts.path if self._format.low_bit_copy_format else None))
        if self._format.low_bit_copy_format:
            prepared = self._lowbit_copy()
            if prepared is None:
                return MissingDrafter(
                    f"there is no copy of {facts.name} with fewer bits",
                    f"run `edgespec prepare lowbit {self._reference}` once",
                )
            from edgespec.prepare.lowbit import lowbit_file

            copy = str(lowbit_file(prepared))
        how = LowBit(copy, self._how.sink_tokens, self._how.window_tokens or None)
        return self._drafter(self._model.self_draft(how), "lowbit")

    def _lowbit_copy(self) -> PreparedModel | None:
        """The copy that was prepared, checked. Raises ModelFileError for a damaged or a stale one."""
        from edgespec.prepare.lowbit import check_lowbit, find_lowbit

        prepared = find_lowbit(self._found.path)
        if prepared:
            check_lowbit(prepared, self._found.path)
        return prepared

    def _swift(self) -> Drafter | MissingDrafter:
        from edgespec.drafters.swift import SwiftDrafter

        facts = self._model.facts
        if not self._format.skips_layers:
            return MissingDrafter(
                f"{facts.name} cannot skip layers: that takes an MLX model", "choose another method"
            )
        if "swift" not in facts.capabilities.self_draft_methods:
            return self._why_not(SkippedLayers((1,)))
        return SwiftDrafter(
            cast(Skippable, self._model),
            store=SavedArrays("swift", models_fingerprint(facts)),
            pass_cost=self._v.v,
            min_confidence=self._how.confidence,
        )

    def _learning(self, draft: LanguageModel) -> Drafter:
        from edgespec.drafters.online import OnlineDrafter
        from edgespec.drafters.online_training import OnlineTrainer

        trainer = cast(Trainable, draft).trainer()
        notes = SavedArrays("online", models_fingerprint(self._model.facts, draft.facts))
        drafter = self._drafter(draft, "model")
        return OnlineDrafter(drafter, OnlineTrainer(drafter.cache, trainer, store=notes))


def _not_asked(name: str) -> MissingDrafter:
    return MissingDrafter(
        f"{name} was not asked for when the model was loaded",
        f"load with --method {name} (in Python: method or methods of load)",
    )
