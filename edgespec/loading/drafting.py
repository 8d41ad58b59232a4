"""Create the drafters that the selected methods need, or explain why one is missing."""

from __future__ import annotations

from edgespec.decode.drafter_set import DrafterSet
from edgespec.errors import OptionError
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pair_loading import LoadedDraft
from edgespec.loading.pairing import ModelPair
from edgespec.loading.prepare.calibration import calibration_prompt
from edgespec.methods.auto.controller import AutoConfig
from edgespec.methods.auto.live_costs import LiveCosts
from edgespec.methods.auto.loss_limit import LossLimits
from edgespec.methods.base import Drafter, DrafterContext, MissingDrafter
from edgespec.methods.costs.curve import CostCurve, assumed_cost
from edgespec.methods.costs.target_costs import PassCosts
from edgespec.model.base import LanguageModel, Progress
from edgespec.model.registry import all_files
from edgespec.options.methods import Method, methods
from edgespec.store.saved_arrays import models_fingerprint
from edgespec.system.files import file_state


class DrafterFactory:
    """Creates the drafters for one loaded target.

    Args:
        pair: The target and its draft model.
        model: The loaded target.
        draft: The loaded draft model, or None.
        options: The drafting options.
        costs: Provides the target's cost curve.
        progress: Called with a description and the completed fraction. Returns False to cancel.
        shares_passes: Whether the target shares its passes with other replies.
        live_costs: The live costs to share with another reply of this target. None creates new ones.
    """

    def __init__(
        self,
        pair: ModelPair,
        model: LanguageModel,
        draft: LoadedDraft | None,
        options: DraftingOptions,
        costs: PassCosts,
        progress: Progress | None,
        *,
        shares_passes: bool = False,
        live_costs: LiveCosts | None = None,
    ) -> None:
        self._pair = pair
        self._shares_passes, self._live_costs = shares_passes, live_costs
        self._costs = costs
        self._model, self._draft = model, draft
        self._options = options
        self._arguments = options.arguments
        self._progress = progress
        self._measured_curve: CostCurve | None = None
        self._context = DrafterContext(
            target=model,
            files=pair.target,
            arguments=options.arguments,
            named=options.named_drafters,
            measured_curve=self._curve,
            calibration_prompt=lambda: calibration_prompt(model.vocabulary),
            useful_copy_type=self._useful_copy_type,
            window_tokens=options.window_tokens,
            has_room_for_copy=options.has_room_for_copy,
            substitutes=options.substitutes,
            draft=draft.model if draft else None,
            draft_drafter=draft.drafter if draft else None,
            heads=pair.heads,
            why_no_head=pair.why_no_head,
            head_advice=pair.head_advice,
            progress=progress,
        )

    def _useful_copy_type(self) -> str | None:
        # Imported lazily, because the module is needed only to explain why a named method is unavailable.
        from edgespec.loading.prepare.lowbit import useful_copy_type

        return useful_copy_type(self._pair.target.path)

    def make_all(self) -> tuple[DrafterSet, tuple[str, ...]]:
        """Create the drafters that the methods need, and return them with notices for the user.

        May clear the target's KV cache to measure the target's speed.

        Raises:
            CapabilityError, OptionError, ModelFileError, MemoryBudgetError: A drafter that a method needs
                cannot be created. Drafters already created are closed.
            CancelledError: `progress` returned False.
        """
        made: dict[str, Drafter | MissingDrafter] = {}
        try:
            return self._make_all(made)
        except BaseException:
            for drafter in made.values():
                if isinstance(drafter, Drafter):
                    drafter.close()
            raise

    def _make_all(self, made: dict[str, Drafter | MissingDrafter]) -> tuple[DrafterSet, tuple[str, ...]]:
        draft = self._draft
        if draft is None and self._arguments["learn"]:
            raise OptionError(
                "--learn trains the draft model, but there is no draft model",
                "pass an MLX draft model with --draft MODEL",
                option="learn",
                code="draft_missing",
            )
        needed = self._options.named_drafters | self._automatic_drafters()
        for method in methods():
            if method.needs == "draft model" and draft is None:
                continue  # `DrafterSet` reports why there is no draft model.
            made[method.name] = self._make(method, is_needed=method.name in needed)
        changes_chains = self._arguments["learn"] or self._arguments["draft_branches"]
        config = self._auto_config()
        drafters = DrafterSet(
            self._model,
            made,
            heads=self._context.loaded_heads,
            chain_model=draft.model if draft and not draft.drafter and not changes_chains else None,
            why_no_draft=self._pair.why_no_draft,
            v=self._curve().v if self._options.combines_drafters else assumed_cost,
            auto_config=config,
        )
        return drafters, (
            *self._context.notices,
            *(self._context.dropped_heads or [self._pair.why_heads]),
            self._costs.notice if self._measured_curve else "",
        )

    def _make(self, method: Method, *, is_needed: bool) -> Drafter | MissingDrafter:
        if self._shares_passes and not method.shares_passes:
            return self._why_not_shared(method, is_loaded=is_needed)
        if is_needed or method.always_loaded:
            made: Drafter | MissingDrafter = method.make(self._context)
            return made
        return MissingDrafter(
            f"the model was loaded without the method {method.name}",
            f"load the model with --method {method.name} (the option `method`)",
        )

    def _why_not_shared(self, method: Method, *, is_loaded: bool) -> MissingDrafter:
        """Explain why a drafter that cannot serve concurrent replies is missing, and what it needs.

        Args:
            method: The method that needs the drafter.
            is_loaded: Whether the drafter was requested when the model was loaded.
        """
        name = method.name
        alone = "omit --parallel" if is_loaded else f"load the model with --method {name} and --parallel 1"
        if command := method.preparation(self._context):
            alone += f" and run `{command}` once"
        return MissingDrafter(
            f"{name} cannot draft for several replies at once, as --parallel requires",
            f"choose another method, such as model or suffix, or {alone}",
        )

    def _automatic_drafters(self) -> set[str]:
        """Return the names of the drafters that `auto` needs in addition to those that are always loaded."""
        if "auto" not in self._options.methods:
            return set()
        names = {each.name for each in methods() if each.auto == "always" and not each.runs_model}
        names |= {head.method for head in self._pair.heads}
        if self._pair.heads or self._draft is not None:
            return names
        ready = (each for each in methods() if each.auto == "fallback" and each.is_ready(self._context))
        fallback = next(ready, None)
        return names | {fallback.name} if fallback else names

    def _auto_config(self) -> AutoConfig | None:
        max_loss = self._arguments["max_loss"]
        if not self._costs.has_loss_limit or ("auto" not in self._options.methods and max_loss is None):
            return None
        if not self._model.facts.capabilities.rollback:
            return None
        limits = LossLimits() if max_loss is None else LossLimits(max_loss)
        adapts = not self._arguments["draft_branches"] and not self._arguments["draft_confidence"]
        models = [self._model.facts, *([self._draft.model.facts] if self._draft else [])]
        curve, threads = self._curve(), self._model.threads
        paths = [option.head.path for option in self._pair.heads if option.head and option.head.path]
        heads = [file_state(file) for path in paths for file in all_files(path)]

        def statistics_key(names: str) -> str:
            settings = f"{self._costs.settings_key} {threads} {heads}"
            return f"{models_fingerprint(*models)} {settings} {names}"

        if self._live_costs:
            live_costs = self._live_costs.for_another_slot()
        else:
            live_costs = LiveCosts(curve, threads, shares_passes=self._shares_passes)
        return AutoConfig(
            limits,
            live_costs,
            statistics_key,
            controls_named=max_loss is not None,
            adapts_length=adapts,
        )

    def _curve(self) -> CostCurve:
        """Return the target's cost curve, measuring it on first use."""
        if self._measured_curve is None:
            self._measured_curve = self._costs.curve(self._progress)
        return self._measured_curve
