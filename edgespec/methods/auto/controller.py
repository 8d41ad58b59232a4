"""Control drafting for `--method auto`: draft only while it saves time, and within `--max-loss`.

Concurrent replies slow each other down, so costs are tracked separately for each number of replies. The
controller also reports a reply's speed-up, and explains why drafting is or is not in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.backoff import Backoff
from edgespec.methods.auto.combined_drafter import CombinedDrafter, UnusedDrafter
from edgespec.methods.auto.constants import (
    FAST_TARGET_SECONDS,
    MIN_COMPARED_TOKENS,
    PAUSED_ROUNDS,
    REMEASURE_TOKENS,
    SAVE_INTERVAL_SECONDS,
    TOKENS_PER_RETRY,
)
from edgespec.methods.auto.live_costs import Conditions, LiveCosts
from edgespec.methods.auto.loss_limit import LossLimits, LossTracker, WorstCaseCosts
from edgespec.methods.base import Drafter, DrafterMemory
from edgespec.methods.running_stats import RunningMean
from edgespec.options.methods import CHAT, TERMS, Wording
from edgespec.system.facts import Facts

__all__ = [
    "ACTIVE_REPLIES",
    "AutoConfig",
    "AutoController",
    "ControllerReport",
    "DraftingStatus",
]

_KIND = "drafting"  # The kind under which the facts database stores the statistics.


# The ids of the sessions that are generating a reply. Changing a set is atomic. A lock could deadlock,
# because garbage collection can end a reply.
ACTIVE_REPLIES: set[int] = set()


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """Settings for a target's `AutoController`.

    Attributes:
        statistics_key: Given drafter names such as "model+suffix", returns the key under which to save their
            statistics, or an empty string to save none.
        controls_named: Whether to use the controller for all methods, not only for `auto`.
        adapts_length: Whether draft models choose their draft length in each round.
    """

    limits: LossLimits
    costs: LiveCosts
    statistics_key: Callable[[str], str] = lambda _: ""
    controls_named: bool = False
    adapts_length: bool = True


@dataclass(slots=True)
class _Round:
    """Timing of one round, which consists of a draft, a verify pass and a commit.

    Attributes:
        started: Start time of the round.
        was_considered: Whether drafting was neither paused nor ruled out by `--max-loss`.
        was_asked: Whether the drafters were asked for a draft.
        draft_done: Time at which the draft was complete.
        pass_seconds: Duration of the target's pass.
        other_tokens: Number of tokens in the target's pass that belong to other replies.
        width: Number of tokens in the target's pass.
    """

    started: float
    was_considered: bool = False
    was_asked: bool = False
    draft_done: float = 0.0
    pass_seconds: float = 0.0
    other_tokens: int = 0
    width: int = 1


class AutoController(Drafter):
    """Decides in each round whether and how far to draft, and keeps the reply within the loss limit.

    A round drafts only if all of these conditions hold. Otherwise it is a plain target step without any
    drafting or prefill.

    - The duration of a target step is known. It is measured at the start, and then at least once every 96
      tokens.
    - Drafting is not paused by the backoff.
    - The draft's worst case stays within the loss limit. This also limits the draft length.

    The combined drafter then decides by expected gain which drafters to run. Worst cases and backoffs are
    tracked separately for each number of concurrent replies and of CPU threads.

    Args:
        drafter: The combined drafters, which must not be shared with another controller.
        loss_tracker: Tracks the loss of each reply. It can be shared with `drafter`.
        costs: Live costs of the target's passes.
        text_kind: Returns the kind of text in a prompt.
        run_ahead: Called with True if the next rounds are target steps, which the target can prelaunch.
        statistics_key: Key under which to save the statistics. If empty, they are not saved.
        clock: Returns the time in seconds.
        count_replies: Returns the number of concurrent replies.
        count_threads: Returns the number of CPU threads used by the target's last pass.
    """

    chooses_length = True

    def __init__(
        self,
        drafter: CombinedDrafter,
        loss_tracker: LossTracker,
        costs: LiveCosts,
        *,
        text_kind: Callable[[Sequence[int]], str] = lambda _: "",
        run_ahead: Callable[[bool], None] = lambda _: None,
        statistics_key: str = "",
        clock: Callable[[], float] = perf_counter,
        count_replies: Callable[[], int] = lambda: len(ACTIVE_REPLIES),
        count_threads: Callable[[], int] = lambda: 0,
    ) -> None:
        self.name = drafter.name
        self.loss_tracker = loss_tracker
        self.costs = costs
        self._default_limits = loss_tracker.limits
        self._drafter = drafter
        self._text_kind = text_kind
        self._run_ahead = run_ahead
        self._facts, self._statistics_key, self._damage = Facts(), statistics_key, ""
        self._saved_at = clock()
        self._clock = clock
        self._count_replies, self._count_threads = count_replies, count_threads
        self._now = Conditions()
        self._tokens: list[int] = []
        self._tokens_since_target_step = REMEASURE_TOKENS
        self._is_drafting = False
        self._round: _Round | None = None
        # Mean time that a single-token round spends outside the target's pass, for example on sampling.
        self._overhead_seconds = RunningMean()
        # Worst-case costs of each drafter that runs a model, keyed by name. If there are no such drafters, a
        # single entry holds the costs of verify passes.
        passes = drafter.model_pass_seconds or {"": 0.0}
        self._worst_cases = {name: WorstCaseCosts(costs, seconds) for name, seconds in passes.items()}
        self._backoff = Backoff()
        self._backoffs = {costs.conditions: self._backoff}
        self._saved_backoff = self._backoff
        self._skipped_rounds = 0
        self._contributors: dict[str, None] = {}
        self._asked_rounds = self._unaffordable_rounds = 0
        self._load_statistics()

    @property
    def target_step_seconds(self) -> float:
        return self.costs.target_step_seconds + self._overhead_seconds.value

    @property
    def allowance_seconds(self) -> float:
        """Maximum time that the next draft may lose compared with plain decoding."""
        return self.loss_tracker.allowance_seconds(self.target_step_seconds)

    def limit_loss(self, rate: float | None) -> None:
        """Set the next reply's loss limit, as a fraction of its plain decoding time. None means the default.

        Call this before `begin`.
        """
        limits = self._default_limits
        self.loss_tracker.limits = limits if rate is None else limits._replace(rate=rate)

    @property
    def memory_use(self) -> DrafterMemory:
        return self._drafter.memory_use

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self._drafter.parts

    def begin(self, tokens: Sequence[int]) -> None:
        if self._clock() - self._saved_at > SAVE_INTERVAL_SECONDS:
            self.save_statistics()
        self._tokens = list(tokens)
        self._is_drafting, self._round = False, None
        self.loss_tracker.begin()
        # The first step after the prompt is slower even in plain decoding, so do not charge the extra time to
        # drafting.
        self.costs.last_width = 0
        self.loss_tracker.record_target_step(0, -self.costs.return_seconds)
        self.costs.set_context_tokens(len(tokens))
        self._follow_conditions()
        self._run_ahead(self._backoff.is_paused)
        self._drafter.select_text_kind(self._text_kind(tokens))
        self._contributors = {}
        self._asked_rounds = self._unaffordable_rounds = 0

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        tree = TokenTree.chain(self._tokens[-1])
        if self._backoff.is_paused and self._skipped_rounds < PAUSED_ROUNDS:
            self._skipped_rounds += 1
            return tree
        self._backoff.skip_rounds(self._skipped_rounds)
        self._skipped_rounds = 0
        this_round = self._round = _Round(self._clock())
        self._follow_conditions()
        must_measure = self._tokens_since_target_step >= REMEASURE_TOKENS or self.costs.needs_target_step
        if not must_measure and self._backoff.may_draft():
            lookup_length, model_lengths = self._affordable_lengths(this_round, draft_length)
            self._unaffordable_rounds += draft_length > 0 and not any(model_lengths.values())
            if lookup_length:
                this_round.was_asked = True
                self._asked_rounds += 1
                tree = self._drafter.propose_within(sampler, acceptance, lookup_length, model_lengths)
                tree = self._cut(tree, self.allowance_seconds - (self._clock() - this_round.started))
                if tree.drafted:
                    self._contributors |= dict.fromkeys(self._drafter.contributors)
        this_round.draft_done = self._clock()
        return tree

    def _affordable_lengths(self, this_round: _Round, draft_length: int) -> tuple[int, dict[str, int]]:
        """Return the maximum draft lengths for lookups and for each drafter that runs a model."""
        allowance = self.allowance_seconds
        if allowance <= 0.0:
            return 0, {}
        this_round.was_considered = True
        if not self._is_drafting:
            self._drafter.begin(self._tokens)
            self._is_drafting = True
        prefill_seconds = self._drafter.selector.planned_prefill_seconds
        lengths = {
            name: worst_case.model_draft_length(
                draft_length, allowance - prefill_seconds.get(name, 0.0), self.loss_tracker.draft_rounds
            )
            for name, worst_case in self._worst_cases.items()
        }
        if not self._drafter.has_lookup:
            return max(lengths.values()), lengths
        return self._pass_costs.affordable_length(draft_length, allowance, 0.0), lengths

    @property
    def _pass_costs(self) -> WorstCaseCosts:
        """Worst-case costs of verify passes, which are the same for all drafters."""
        return next(iter(self._worst_cases.values()))

    def _cut(self, tree: TokenTree, allowance_seconds: float) -> TokenTree:
        """Shorten a draft until rejecting all of it would cost at most `allowance_seconds`.

        Sampled tokens are never dropped, because the choice of tokens to drop would depend on the sampled
        values and bias rejection sampling.
        """
        width = tree.width
        while (
            width > 1
            and tree.draft_probs[width - 1] is None
            and self._pass_costs.extra_pass_seconds(width) > allowance_seconds
        ):
            width -= 1
        return tree.pruned(1 << 62, 1 << 30, width)

    def _current_conditions(self) -> Conditions:
        return Conditions(self._count_replies(), self._count_threads())

    def _follow_conditions(self) -> None:
        self._now = self._current_conditions()
        previous, step_seconds = self.costs.conditions, self.costs.target_step_seconds
        self.costs.set_conditions(self._now)
        if self.costs.conditions == previous:
            return
        for worst_case in self._worst_cases.values():
            worst_case.change_conditions(step_seconds)
        self._backoff = self._backoffs.setdefault(self.costs.conditions, Backoff())
        self._is_drafting = self._is_drafting and not self._backoff.is_paused
        self._run_ahead(self._backoff.is_paused)

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._round is None:
            return
        self._round.pass_seconds = self._clock() - self._round.draft_done
        self._round.width, self._round.other_tokens = tree.width, logits.other_tokens
        if self._is_drafting:
            self._drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._tokens.extend(tokens)
        if self._is_drafting:
            self._drafter.commit(tokens)
        if tokens and self._round:
            self._record_round(self._round, len(tokens), self._clock() - self._round.started)
        else:
            self.loss_tracker.record_target_step(len(tokens), self.costs.return_seconds)
            self.costs.last_width = 1
        self._round = None

    def _record_round(self, this_round: _Round, tokens: int, seconds: float) -> None:
        step_seconds = self.target_step_seconds
        draft_seconds = this_round.draft_done - this_round.started
        width, pass_seconds, other_tokens = this_round.width, this_round.pass_seconds, this_round.other_tokens
        own_pass_seconds = self.costs.comparable_seconds(pass_seconds, width, other_tokens)
        own_seconds = seconds - pass_seconds + own_pass_seconds
        if width == 1:
            self.loss_tracker.record_target_step(0, self.costs.return_seconds)
        # Ignore the pass duration if another reply began or ended during the pass, or if the number of
        # threads changed.
        if self._current_conditions() == self._now:
            self.costs.record_pass(width, pass_seconds, other_tokens)
        if not this_round.was_asked:
            self._record_target_step(this_round, tokens, seconds, step_seconds, draft_seconds)
            return
        # A prefill also benefits later drafts, so do not count its duration as drafting time.
        prefill_seconds = self._drafter.selector.prefill_seconds
        if width == 1:
            self.loss_tracker.record_target_step(tokens, draft_seconds)
            self._tokens_since_target_step = 0
            self._backoff.record_empty_draft((draft_seconds - prefill_seconds) / step_seconds)
        else:
            self.loss_tracker.record_draft_round(tokens, own_seconds, step_seconds)
            self._tokens_since_target_step += tokens
            self._backoff.record_draft(tokens - (own_seconds - prefill_seconds) / step_seconds)
        for name, worst_case in self._worst_cases.items():
            if self._drafter.model_name in (name, None):
                worst_case.record_draft(self._drafter.drafted_levels, draft_seconds - prefill_seconds)
        self._apply_backoff()

    def _record_target_step(
        self, this_round: _Round, tokens: int, seconds: float, step_seconds: float, draft_seconds: float
    ) -> None:
        self.costs.set_context_tokens(len(self._tokens))
        self._overhead_seconds.add(seconds - this_round.pass_seconds - draft_seconds)
        for worst_case in self._worst_cases.values():
            worst_case.record_target_step()
        self.loss_tracker.record_target_step(tokens, draft_seconds if this_round.was_considered else 0.0)
        self._tokens_since_target_step = 0
        if this_round.was_considered:
            self._backoff.record_unaffordable_draft(draft_seconds / step_seconds)
            self._apply_backoff()

    def _apply_backoff(self) -> None:
        self._is_drafting = not self._backoff.is_paused
        self._run_ahead(self._backoff.is_paused)

    def report(self) -> ControllerReport:
        """Report how much drafting speeds up the current or last reply."""
        step_seconds, loss_tracker = self.target_step_seconds, self.loss_tracker
        speed_up = loss_tracker.speed_up(step_seconds)
        shortest_loss = min(each.loss_seconds(1, each.level_seconds) for each in self._worst_cases.values())
        drafts_often = loss_tracker.draft_rounds * TOKENS_PER_RETRY >= loss_tracker.tokens
        status = DraftingStatus(
            name=self.name,
            is_drafting=self._is_drafting,
            is_faster=loss_tracker.credit_seconds > 0.0,
            tokens=loss_tracker.tokens,
            has_drafted=bool(self._contributors),
            asked_rounds=self._asked_rounds,
            unaffordable_rounds=self._unaffordable_rounds,
            draft_cost_steps=shortest_loss / step_seconds,
            allowance_steps=self.allowance_seconds / step_seconds,
            round_gain_steps=self._backoff.gain,
            target_step_seconds=step_seconds,
            replies=self._now.replies,
        )
        return ControllerReport(
            speed_up if loss_tracker.tokens >= MIN_COMPARED_TOKENS else None,
            speed_up * self.costs.uncertainty,
            tuple(self._contributors) if loss_tracker.credit_seconds > 0.0 or drafts_often else (),
            status.reason,
            status.chat_reason,
            self._drafter.unused_models(self._contributors, step_seconds),
        )

    def note(self) -> str:
        unsaved = self._facts.notice if self._statistics_key else ""
        return "; ".join(filter(None, (self._drafter.note(), self._damage or unsaved)))

    def _load_statistics(self) -> None:
        saved = self._facts.get(_KIND, self._statistics_key) if self._statistics_key else None
        if saved is None:
            return
        try:
            saved = {name: np.array(value, np.float64) for name, value in saved.items()}
            self.costs.restore_statistics(saved)
            self._drafter.restore_statistics(saved)
            self._saved_backoff.restore_statistics(saved)
        except (AttributeError, KeyError, ValueError, TypeError, OverflowError):
            self._damage = "the saved speed-up statistics are damaged; edgespec will collect them again"

    def save_statistics(self) -> None:
        if self._statistics_key:
            statistics = (self.costs, self._drafter, self._saved_backoff)
            saved = {name: v.tolist() for each in statistics for name, v in each.saved_statistics().items()}
            self._facts.put(_KIND, {self._statistics_key: saved})
            self._damage = ""
            self._saved_at = self._clock()


class ControllerReport(NamedTuple):
    """Report on how drafting affects the speed of a reply.

    Attributes:
        speed_up: Speed relative to plain decoding. None while the reply is too short to tell.
        uncertainty: Standard error of `speed_up`.
        drafters: Names of the drafters used. Empty if drafts were rare and saved no time.
        reason: A clause that says why drafts are or are not used.
        chat_reason: The same clause in simpler terms, for the chat.
        unused: The drafters that run a model but have drafted nothing in this reply.
    """

    speed_up: float | None
    uncertainty: float
    drafters: tuple[str, ...]
    reason: str
    chat_reason: str
    unused: tuple[UnusedDrafter, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftingStatus:
    """The state of drafting in one reply. Costs and gains are relative to a single-token target pass.

    Attributes:
        name: Name of the drafters, such as "model+suffix".
        is_drafting: Whether upcoming rounds may draft.
        is_faster: Whether speculation has saved time in this reply so far.
        tokens: Tokens emitted in this reply.
        has_drafted: Whether any draft of this reply was verified.
        asked_rounds: Number of rounds in which the drafters were asked for a draft.
        unaffordable_rounds: Number of rounds without a draft because of the loss limit.
        draft_cost_steps: Worst-case cost of the shortest draft.
        allowance_steps: How much time the next round may lose.
        round_gain_steps: Mean time saved in recent rounds in which the drafters were asked for a draft.
        replies: Number of replies that this process is generating concurrently.
    """

    name: str
    is_drafting: bool
    is_faster: bool
    tokens: int
    has_drafted: bool
    asked_rounds: int
    unaffordable_rounds: int
    draft_cost_steps: float
    allowance_steps: float
    round_gain_steps: float
    target_step_seconds: float
    replies: int = 1

    @property
    def reason(self) -> str:
        """Why drafts are or are not used, in fewer than 100 characters."""
        return self._explained(TERMS)

    @property
    def chat_reason(self) -> str:
        """`reason` in simpler terms, for the chat."""
        return self._explained(CHAT)

    def _explained(self, words: Wording) -> str:
        return self._reason(words) + (f" (with {self.replies} replies at once)" if self.replies > 1 else "")

    def _reason(self, words: Wording) -> str:
        drafting, measuring = words.drafting, f"first measuring the speed without {words.drafting}"
        if self.is_drafting and self.has_drafted and self.is_faster:
            return f"{drafting} saves time here"
        if not self.tokens:
            return measuring
        if self.target_step_seconds < FAST_TARGET_SECONDS and not self.is_faster:
            return f"this model is so fast that {drafting} would take more time than it saves"
        if self.unaffordable_rounds and self.draft_cost_steps > self.allowance_steps:
            if self.allowance_steps <= 0.0:
                what = drafting if self.has_drafted else f"preparing {words.drafts}"
                return f"{what} has already used up the extra time that a reply may take{words.limit}"
            cost, allowed = self.draft_cost_steps, self.allowance_steps
            return (
                f"a wrong {words.draft} could take as long as generating {cost:.1f} tokens; the limit is"
                f" {allowed:.1f}{words.limit}"
            )
        if self.is_drafting and self.has_drafted:
            return f"{drafting} is being tried, but has not saved time so far"
        if self.has_drafted:
            when = "no longer saves time" if self.is_faster else "does not save time"
            lost = _token_times(-self.round_gain_steps)
            return f"{drafting} {when}: each recent {words.draft} cost {lost}"
        if self.asked_rounds:
            tries = "1 try" if self.asked_rounds == 1 else f"{self.asked_rounds} tries"
            return f"in {tries}, no {words.draft} was likely to save time (tried: {words.sources(self.name)})"
        if self.round_gain_steps >= 0.0:
            return measuring
        return f"{drafting} has not saved time lately, so it is retried only now and then"


def _token_times(steps: float) -> str:
    return (
        f"{max(steps, 0.0):.0%} of the time that one token takes"
        if steps < 0.995
        else f"as much time as {steps:.1f} tokens"
    )
