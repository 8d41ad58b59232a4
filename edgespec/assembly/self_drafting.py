"""Create the drafters that use the target itself: some of its layers, a low-bit copy of it, or a head."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from typing import cast

from edgespec.assembly.drafting_options import DraftingOptions
from edgespec.assembly.pairing import ModelPair
from edgespec.backends.base import LanguageModel
from edgespec.backends.optional_features import HeadModel, Skippable
from edgespec.backends.registry import all_files
from edgespec.backends.self_draft_methods import EarlyExit, LowBit, SelfDraft, SkippedLayers
from edgespec.costs.curve import CostCurve
from edgespec.drafters.base import Drafter
from edgespec.drafters.draft_cache import DraftCache
from edgespec.drafters.head_cache import HeadCache
from edgespec.errors import CapabilityError, EdgespecError, OptionError
from edgespec.files import file_state
from edgespec.method_names import HEADS
from edgespec.methods import LoadedHead, MissingDrafter
from edgespec.prepare.calibration import calibration_prompt, greedy_reply
from edgespec.prepare.exit_table import exit_table
from edgespec.prepare.store import PreparedModel, read_prepared
from edgespec.saved_arrays import SavedArrays, models_fingerprint

__all__ = ["SelfDrafters"]


class SelfDrafters:
    """Creates the drafters of one target that use the target itself.

    Args:
        pair: The target and its heads.
        model: The loaded target.
        options: The drafting options.
        curve: Returns the duration of the target's passes by number of tokens.
        model_drafter: Creates a drafter from a view of the target, the name of its method, and the view's
            cache, or None for a new cache.

    Attributes:
        loaded_heads: The heads of the drafters created so far.
        notices: Why heads that were found are not used.
    """

    def __init__(
        self,
        pair: ModelPair,
        model: LanguageModel,
        options: DraftingOptions,
        curve: Callable[[], CostCurve],
        model_drafter: Callable[[LanguageModel, str, DraftCache | None], Drafter],
    ) -> None:
        self._pair, self._model, self._options = pair, model, options
        self._curve, self._model_drafter = curve, model_drafter
        self._format = pair.target.file_format
        self.loaded_heads: list[LoadedHead] = []
        self.notices: list[str] = []

    def make(self, name: str) -> Drafter | MissingDrafter:
        """Create a drafter.

        Args:
            name: A name in SELF_DRAFTS or HEADS.

        Raises:
            CapabilityError, OptionError, ModelFileError: The drafter cannot be created.
        """
        makers: dict[str, Callable[[], Drafter | MissingDrafter]] = {
            "layerskip": self._make_layerskip,
            "lowbit": self._make_lowbit,
            "swift": self._make_swift,
            **{head: partial(self._make_head, head) for head in HEADS},
        }
        return makers[name]()

    def why_not_shared(self, name: str, *, is_loaded: bool) -> Drafter | MissingDrafter:
        """Return why a drafter that cannot draft for several replies at once is missing, and what it needs.

        Args:
            name: A name in SELF_DRAFTS.
            is_loaded: Whether the drafter was requested when the model was loaded.
        """
        # These methods cannot be used with this file at all, so omitting --parallel would not help.
        unusable = {
            "swift": not self._format.skips_layers,
            "layerskip": "layerskip" in self._format.preparations,
        }
        if unusable.get(name, False):
            return self.make(name)
        alone = "omit --parallel" if is_loaded else f"load the model with --method {name} and no --parallel"
        if name == "lowbit" and self._needs_lowbit_copy():
            alone += f" and run `edgespec prepare lowbit {self._reference}` once"
        return MissingDrafter(
            f"{name} cannot draft for several replies at once, as --parallel requires",
            f"choose another method, such as model or suffix, or {alone}",
        )

    @property
    def _reference(self) -> str:
        found = self._pair.target
        return shlex.quote(str(found.path)) if found.source == "path" else found.name

    def _make_layerskip(self) -> Drafter | MissingDrafter:
        facts = self._model.facts
        if "layerskip" in self._format.preparations:
            return MissingDrafter(
                f"{facts.name} was not prepared for early exit",
                f"run `edgespec prepare layerskip {self._reference}` once",
            )
        if "layerskip" not in facts.capabilities.self_draft_methods:
            return self._missing_self_draft(EarlyExit(1))
        exit_layer = self._options.arguments["exit_layer"]
        if self._format.fixed_exit:
            if exit_layer is not None:
                raise OptionError(
                    f"exit_layer cannot be set for {facts.name}, which was prepared for a single exit layer",
                    "omit --exit-layer, or run `edgespec prepare layerskip REF --exit E` again",
                )
            exit_layer = int(read_prepared(self._pair.target.path).settings["exit_layer"])
        view = self._model.self_draft(EarlyExit(exit_layer or self._measure_best_exit()))
        return self._model_drafter(view, "layerskip", None)

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
            table = exit_table(*measure(self._model, [*prompt, *reply], len(prompt) - 1), self._curve().v)
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
        low_bit = LowBit(copy, self._options.arguments["draft_sinks"], self._options.window_tokens or None)
        return self._model_drafter(self._model.self_draft(low_bit), "lowbit", None)

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
            self.notices.append(f"not drafting with the head {option.name}: {missing.reason}")
            return missing
        try:
            view = cast(HeadModel, self._model.self_draft(option.head))
        except EdgespecError as error:
            if option.source == "named" or name in self._options.named_drafters:
                raise
            self.notices.append(f"not drafting with the head {option.name}: {error.what}")
            return MissingDrafter(error.what, error.next_step)
        files = all_files(option.head.path) if option.head.path else ()
        cache = HeadCache(view, " ".join((name, *map(file_state, files))))
        path = str(option.head.path) if option.head.path else ""
        self.loaded_heads.append(LoadedHead(option.name, path, cache))
        return self._model_drafter(view, name, cache)

    def _needs_lowbit_copy(self) -> bool:
        from edgespec.prepare.lowbit import find_lowbit

        return bool(self._format.low_bit_copy_format) and find_lowbit(self._pair.target.path) is None

    def _checked_lowbit_copy(self) -> PreparedModel | None:
        from edgespec.prepare.lowbit import check_lowbit, find_lowbit

        prepared = find_lowbit(self._pair.target.path)
        if prepared:
            check_lowbit(prepared, self._pair.target.path)
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
            pass_cost=self._curve().v,
            min_confidence=self._options.arguments["draft_confidence"],
        )
