"""Choose the drafters for a method, such as `auto` or `model+ngram`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from edgespec.decode.reply import MethodReport
from edgespec.errors import OptionError
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.auto.constants import TEXT_KIND_TOKENS
from edgespec.methods.auto.controller import AutoConfig, AutoController
from edgespec.methods.auto.drafter_stats import text_kind
from edgespec.methods.auto.live_costs import LiveCosts
from edgespec.methods.auto.loss_limit import LossTracker
from edgespec.methods.base import Drafter, LoadedHead, MissingDrafter
from edgespec.methods.costs.curve import CostFunction, PassLimits, assumed_cost
from edgespec.methods.tree_growth import AdaptiveTreeGrowth, TreeGrowth
from edgespec.model.base import LanguageModel
from edgespec.model.model_facts import Capabilities
from edgespec.options.methods import CHAT, TERMS, methods, parse_method
from edgespec.options.methods import method as method_of_name

__all__ = ["ANY_REPLY", "DrafterSet", "ReplyKind", "ResolvedMethod"]


class ReplyKind(NamedTuple):
    """Properties of a reply that, together with the method, determine its drafters.

    Attributes:
        constrained: Whether the reply has a constraint, so that `auto` also uses `grammar`.
        limited: Whether the request sets `max_loss`. If so, all methods draft within this limit.
        has_images: Whether the prompt contains images. If so, drafters that read the target's state do not
            draft, because they would have to see the images too.
    """

    constrained: bool = False
    limited: bool = False
    has_images: bool = False


ANY_REPLY = ReplyKind()


class ResolvedMethod(NamedTuple):
    """A method, and the drafters that it uses for one kind of reply.

    Attributes:
        names: The names of the drafters. Empty if nothing is drafted.
        is_controlled: Whether an `AutoController` decides when these drafters run.
        report: The report on the method before the reply begins.
    """

    names: tuple[str, ...]
    is_controlled: bool
    report: MethodReport


_UNKNOWN_DRAFTER = MissingDrafter("this model does not support this method", "choose another method")


class DrafterSet:
    """All drafters for a target model, and the combinations of them that methods use.

    Combinations and controllers are created on first use and then reused, because they collect acceptance
    rates.

    Args:
        drafters: Each method's drafter, or the reason why it is unavailable, keyed by method name.
        heads: The heads that drafters use.
        chain_model: The draft model if the `model` drafter drafts plain chains, otherwise None.
        why_no_draft: Why there is no draft model, for reports and error messages.
        v: Returns the cost of a verify pass of a given width, as a multiple of the cost of a single-token
            pass.
        auto_config: Settings for the controller that decides when to draft. If None, `auto` always drafts.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafters: Mapping[str, Drafter | MissingDrafter] = MappingProxyType({}),
        *,
        heads: Sequence[LoadedHead] = (),
        chain_model: LanguageModel | None = None,
        why_no_draft: str = "",
        v: CostFunction = assumed_cost,
        auto_config: AutoConfig | None = None,
    ) -> None:
        self.heads = heads
        self._auto_config = auto_config
        self._model = target
        self._target = target.facts
        self._why_no_draft = why_no_draft
        self._v = v
        self._drafters: dict[str, Drafter] = {}
        self._missing: dict[str, MissingDrafter] = {
            each.name: MissingDrafter(
                f"it needs a draft model: {why_no_draft}", "use --draft MODEL or --method ngram"
            )
            for each in methods()
            if each.needs == "draft model"
        }
        self._resolved: dict[tuple[str, ReplyKind], ResolvedMethod] = {}
        self._combinations: dict[tuple[str, ...], CombinedDrafter] = {}
        self._controllers: dict[tuple[str, ...], AutoController] = {}
        self._chain_model = chain_model
        for name, drafter in drafters.items():
            if isinstance(drafter, MissingDrafter):
                self._missing[name] = drafter
            else:
                self._drafters[name] = drafter

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the available drafters, except those that draft only in constrained replies."""
        return tuple(
            each.name for each in methods() if each.name in self._drafters and not each.only_constrained
        )

    @property
    def loss_limits(self) -> tuple[float, float] | None:
        """Maximum slowdown that drafting may cause, relative to plain decoding, or None if unlimited.

        With limits (r, n), a reply takes at most 1 + r times as long as with plain decoding, plus the time of
        n single-token passes.
        """
        return self._auto_config.limits if self._auto_config else None

    @property
    def live_costs(self) -> LiveCosts | None:
        """Live costs of the target's passes, updated by `auto`, or None if no costs were measured."""
        return self._auto_config.costs if self._auto_config else None

    def resolve(self, method: str, kind: ReplyKind = ANY_REPLY) -> ResolvedMethod:
        """Return the drafters that a method uses for a kind of reply. Can be called from any thread.

        This runs no model, so it can be called while a reply is in progress.

        Args:
            method: Method name, such as `model+ngram`.
            kind: The kind of reply.

        Raises:
            OptionError: The method is unknown, one of its drafters is unavailable, or the request sets
                `max_loss` and the method cannot be limited.
        """
        resolved = self._resolved.get((method, kind))
        if resolved is None:
            names, report = self._parsed(method, kind.constrained)
            if kind.limited:
                self._check_limited(method, names)
            if kind.has_images:
                names, report = _without_blind(names, report)
            config = self._auto_config
            is_controlled = config is not None and (method == "auto" or kind.limited or config.controls_named)
            resolved = ResolvedMethod(names, is_controlled, report)
            self._resolved[method, kind] = resolved
        return resolved

    def choose(self, method: ResolvedMethod) -> Drafter | None:
        """Return the drafter for a method, or None if the method drafts nothing.

        This can run the draft model to measure its speed. Call it only while no other reply uses the
        drafters.
        """
        names = method.names
        if not names:
            return None
        if self._auto_config and method.is_controlled:
            if names not in self._controllers:
                self._controllers[names] = self._new_controller(self._auto_config, names)
            return self._controllers[names]
        return self._drafters[names[0]] if len(names) == 1 else self._combined(names)

    def chooses_length(self, method: ResolvedMethod) -> bool | None:
        """Return whether the method's drafter chooses the draft length itself, or None if nothing is drafted.

        Unlike `choose`, this runs no model.
        """
        if not method.names:
            return None
        if method.is_controlled:
            return AutoController.chooses_length
        drafter = self._drafters[method.names[0]] if len(method.names) == 1 else CombinedDrafter
        return drafter.chooses_length

    def _check_limited(self, method: str, names: tuple[str, ...]) -> None:
        """Raise OptionError if the drafting of a method cannot be limited by `max_loss`."""
        if method == "none":
            raise OptionError(
                "max_loss has no effect with the method `none`, which does not draft",
                "leave max_loss out, or choose another method",
                option="max_loss",
                code="option_without_effect",
            )
        if names and self._auto_config is None:
            raise OptionError(
                "max_loss needs speed measurements, but this model was loaded without them",
                "load it with the method `auto`, or with max_loss",
                option="max_loss",
                code="option_not_supported",
            )

    def _parsed(self, method: str, constrained: bool) -> tuple[tuple[str, ...], MethodReport]:
        names = parse_method(method)
        capabilities = self._target.capabilities
        if names and not capabilities.rollback:
            reason, chat_reason = (
                f"{self._target.name} cannot verify {words.drafts}: {capabilities.reason}"
                for words in (TERMS, CHAT)
            )
            return (), MethodReport(method, "none", reason, chat_reason=chat_reason)
        if method == "auto":
            names = self._auto_names(constrained)
            has_model = any(not self._drafters[name].is_lookup for name in names)
            reason = "chosen automatically" if has_model else self._why_no_draft
        else:
            reason = "as requested"
        for name in names:
            if name not in self._drafters:
                missing = self._missing.get(name, _UNKNOWN_DRAFTER)
                raise OptionError(
                    f"method {method!r} cannot be used: {missing.reason}",
                    missing.hint,
                    option="method",
                    code="method_unavailable",
                )
        report = MethodReport(method, "+".join(names) or "none", reason)
        return tuple(each.name for each in methods() if each.name in names), report

    def _auto_names(self, constrained: bool) -> tuple[str, ...]:
        available = [each for each in methods() if each.name in self._drafters]
        usable = [each for each in available if constrained or not each.only_constrained]
        chosen = [each for each in usable if each.auto == "always"]
        if not any(each.runs_model for each in chosen):
            chosen = [*[each for each in usable if each.auto == "fallback"][:1], *chosen]
        return tuple(each.name for each in chosen)

    def _new_controller(self, config: AutoConfig, names: tuple[str, ...]) -> AutoController:
        for name in names:
            self._drafters[name].warm_up()
        costs, loss_tracker = config.costs, LossTracker(config.limits)
        combined = CombinedDrafter(
            [self._with_adaptive_length(self._drafters[name], config) for name in names],
            limits=PassLimits.of(self._target.capabilities),
            v=costs.v,
            allowance_seconds=lambda: loss_tracker.allowance_seconds(costs.target_step_seconds),
            exploration_seconds=lambda: loss_tracker.exploration_seconds(costs.target_step_seconds),
        )
        return AutoController(
            combined,
            loss_tracker,
            costs,
            text_kind=self._text_kind,
            run_ahead=self._model.run_ahead,
            count_threads=lambda: self._model.threads,
            statistics_key=config.statistics_key("+".join(names)),
        )

    def _text_kind(self, tokens: Sequence[int]) -> str:
        pieces = map(self._model.vocabulary.piece, tokens[-TEXT_KIND_TOKENS:])
        return text_kind("".join(piece.decode("utf-8", "replace") for piece in pieces))

    def _with_adaptive_length(self, drafter: Drafter, config: AutoConfig) -> Drafter:
        if not config.adapts_length:
            return drafter
        pass_cost = drafter.pass_seconds / config.costs.target_step_seconds

        def make_growth(draft: Capabilities) -> TreeGrowth:
            limits = PassLimits.of(self._target.capabilities, draft)
            return AdaptiveTreeGrowth(limits, config.costs.v, siblings=1, initial_pass_cost=pass_cost)

        return drafter.with_growth(make_growth)

    def _combined(self, names: tuple[str, ...]) -> CombinedDrafter:
        if names not in self._combinations:
            self._combinations[names] = CombinedDrafter(
                [self._drafters[name] for name in names],
                limits=PassLimits.of(self._target.capabilities),
                v=self._v,
            )
        return self._combinations[names]

    def chain_model(self, method: ResolvedMethod) -> LanguageModel | None:
        """Return the draft model if the method uses it to draft plain chains, otherwise None."""
        is_plain = method.report.requested == "model" and not method.is_controlled
        return self._chain_model if is_plain else None

    def reset(self) -> None:
        """Clear the last reply's tokens from every drafter."""
        for drafter in self._drafters.values():
            drafter.reset()

    def interrupt(self, enabled: bool) -> None:
        """Interrupt all drafters, or allow them to draft again if `enabled` is False."""
        for drafter in self._drafters.values():
            drafter.interrupt(enabled)

    def close(self) -> None:
        """Save the statistics of all drafting controllers, and free all drafters."""
        for controller in self._controllers.values():
            controller.save_statistics()
        for drafter in self._drafters.values():
            drafter.close()


def _without_blind(names: tuple[str, ...], report: MethodReport) -> tuple[tuple[str, ...], MethodReport]:
    """Exclude drafters that read the target's state, because they cannot see the images in the prompt."""
    kept = tuple(name for name in names if method_of_name(name).needs in ("draft model", "nothing"))
    if kept == names:
        return names, report
    left_out = " and ".join(name for name in names if name not in kept)
    verb = "do" if " and " in left_out else "does"
    reason = f"{left_out} {verb} not draft in chats with images"
    return kept, replace(report, effective="+".join(kept) or "none", reason=reason, chat_reason=reason)
