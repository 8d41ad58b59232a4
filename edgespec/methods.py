"""Methods by name: which drafters take part, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from edgespec.auto.combined_drafter import CombinedDrafter
from edgespec.auto.controller import AutoConfig, AutoController
from edgespec.auto.loss_limit import LossLimit
from edgespec.auto.text_kind import kind_of
from edgespec.backends.base import Capabilities, LanguageModel
from edgespec.costs.curve import Curve, gentle
from edgespec.costs.pass_limits import PassLimits
from edgespec.drafters.adaptive_tree import AdaptiveTreeGrowth
from edgespec.drafters.base import BudgetedDrafter, Drafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.tree_growth import TreeGrowth
from edgespec.errors import OptionError
from edgespec.method_names import DRAFTER_NAMES, parse_method
from edgespec.reply import MethodReport

__all__ = ["DrafterSet", "MissingDrafter"]

# Of these the first that is there drafts for `auto`.
_AUTOMATIC_MODELS = ("model", "layerskip", "lowbit")


@dataclass(frozen=True, slots=True)
class MissingDrafter:
    """Why a drafter cannot take part, and what would help."""

    why: str
    hint: str


class DrafterSet:
    """The drafters a target has, made once and put together as a method asks.

    branches: of the draft model's tree; a TreeGrowth is this drafter's alone. why_no_draft: said when `auto`
    has no draft model to use. others: drafters beside the draft model's and n-gram lookup, or why they are
    missing, by name; a `model` among them takes the usual one's place. curve: v(m) of the target. policy:
    decides round by round for `auto`; without one that drafts as drafters that are named do.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None,
        *,
        branches: tuple[int, ...] | TreeGrowth = (),
        min_confidence: float = 0.0,
        why_no_draft: str = "",
        others: Mapping[str, Drafter | MissingDrafter] = MappingProxyType({}),
        curve: Curve = gentle,
        policy: AutoConfig | None = None,
    ) -> None:
        self._policy = policy
        self._ahead = target.run_ahead
        self._piece = lambda token: target.vocabulary.piece(token).decode("utf-8", "replace")
        self._target = target.facts
        self._why_no_draft = why_no_draft
        self._curve = curve
        self._made: dict[str, Drafter] = {"ngram": NgramDrafter()}
        self._missing: dict[str, MissingDrafter] = {
            "model": MissingDrafter(
                f"it needs a draft model: {why_no_draft}", "give --draft REF or use --method ngram"
            )
        }
        self._combined: dict[tuple[str, ...], CombinedDrafter] = {}
        self._guarded: dict[tuple[str, ...], AutoController] = {}
        self._chains = draft if not branches and "model" not in others else None
        if draft is not None and "model" not in others:
            self._made["model"] = ModelDrafter(
                draft, self._target.vocab_size, branches=branches, min_confidence=min_confidence
            )
        for name, drafter in others.items():
            if isinstance(drafter, MissingDrafter):
                self._missing[name] = drafter
            else:
                self._made[name] = drafter

    @property
    def names(self) -> tuple[str, ...]:
        """The drafters that can take part."""
        return tuple(name for name in DRAFTER_NAMES if name in self._made)

    def choose(self, method: str) -> tuple[Drafter | None, MethodReport]:
        """The drafter for a method, and the report of what runs.

        Raises OptionError for an unknown method, and for one whose drafters are not all there.
        """
        names = parse_method(method)
        capabilities = self._target.capabilities
        if names and not capabilities.rollback:
            reason = f"{self._target.name} decodes plainly: {capabilities.reason}"
            return None, MethodReport(method, "none", reason)
        if method == "auto":
            names = self._automatic()
            drafts = any(not self._made[name].is_lookup for name in names)
            reason = "guesses while that pays" if drafts else self._why_no_draft
        else:
            reason = "asked for"
        for name in names:
            if name not in self._made:
                missing = self._missing.get(name, _NEVER)
                raise OptionError(f"method {method!r} cannot be used: {missing.why}", missing.hint)
        effective = "+".join(names) or "none"
        names = tuple(sorted(names, key=DRAFTER_NAMES.index))
        if names and self._policy and (method == "auto" or self._policy.everywhere):
            return self._under(self._policy, names), MethodReport(method, effective, reason)
        drafter = self._combination(names) if len(names) > 1 else self._made[names[0]] if names else None
        return drafter, MethodReport(method, effective, reason)

    def controller(self, method: str) -> AutoController | None:
        """Return the controller that decides for a method; None where every round drafts."""
        drafter, _ = self.choose(method)
        return drafter if isinstance(drafter, AutoController) else None

    def _automatic(self) -> tuple[str, ...]:
        """What `auto` takes of what is there."""
        models = [name for name in _AUTOMATIC_MODELS if name in self._made]
        return tuple(name for name in (*models[:1], "suffix") if name in self._made)

    def _under(self, policy: AutoConfig, names: tuple[str, ...]) -> AutoController:
        """The drafters of these names under the policy; made once, for it goes on learning."""
        if names not in self._guarded:
            for name in names:
                self._made[name].warm_up()
            costs, ledger = policy.costs, LossLimit(policy.terms)
            able = self._target.capabilities
            combined = CombinedDrafter(
                [self._growing(self._made[name], policy) for name in names],
                able.tree,
                limits=PassLimits(able.max_width, able.max_branches if able.tree else 1),
                curve=costs.v,
                may_lose=lambda: ledger.may_lose_seconds(costs.plain_seconds),
                may_try=lambda: ledger.may_try_seconds(costs.plain_seconds),
            )
            self._guarded[names] = AutoController(
                combined,
                ledger,
                costs,
                kind_of=self._kind_of,
                ahead=self._ahead,
                notes=policy.notes("+".join(names)) if policy.notes else None,
            )
        return self._guarded[names]

    def _kind_of(self, tokens: Sequence[int]) -> str:
        """The kind of text that a prompt's end is."""
        return kind_of("".join(map(self._piece, tokens[-_LOOKED_AT_TOKENS:])))

    def _growing(self, drafter: Drafter, policy: AutoConfig) -> Drafter:
        """A draft model's drafter, so that its drafts are as long as pays; others as they are."""

        def growth(able: Capabilities) -> TreeGrowth:
            limits = PassLimits.of(self._target.capabilities, able)
            return AdaptiveTreeGrowth(limits, policy.costs.v, siblings=1)

        if policy.grows and isinstance(drafter, BudgetedDrafter):
            return drafter.with_growth(growth)
        return drafter

    def _combination(self, names: tuple[str, ...]) -> CombinedDrafter:
        """The drafters of these names together; made once, for it learns which of them is worth asking."""
        if names not in self._combined:
            able = self._target.capabilities
            self._combined[names] = CombinedDrafter(
                [self._made[name] for name in names],
                able.tree,
                limits=PassLimits(able.max_width, able.max_branches if able.tree else 1),
                curve=self._curve,
            )
        return self._combined[names]

    def chain_model(self, method: str) -> LanguageModel | None:
        """The draft model whose chains this method proposes as they stand, if there is one."""
        held = self._policy is not None and self._policy.everywhere  # then they end where it pays
        return self._chains if method == "model" and not held else None

    def reset(self) -> None:
        """Let every drafter give up what it holds of the last text."""
        for drafter in self._made.values():
            drafter.reset()

    def interrupt(self, enabled: bool) -> None:
        """Pass an interrupt on to every drafter."""
        for drafter in self._made.values():
            drafter.interrupt(enabled)

    def close(self) -> None:
        """Free every drafter."""
        for guarded in self._guarded.values():
            guarded.keep()
        for drafter in self._made.values():
            drafter.close()


# The end of a prompt tells what kind of text it is.
_LOOKED_AT_TOKENS = 512
_NEVER = MissingDrafter("this target has no such drafter", "choose another method")
