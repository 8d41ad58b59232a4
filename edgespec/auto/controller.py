"""The policy of `auto`: guess while that pays, never lose more than was agreed, and say why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from edgespec.auto.active_replies import ACTIVE_REPLIES
from edgespec.auto.backoff import Backoff
from edgespec.auto.combined_drafter import CombinedDrafter
from edgespec.auto.explanation import DraftingStatus
from edgespec.auto.live_costs import LiveCosts
from edgespec.auto.loss_limit import LossLimit, LossLimits
from edgespec.drafters.array_store import ArrayStore
from edgespec.drafters.base import Drafter, MemoryUse
from edgespec.drafters.running_stats import RunningMean
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["AutoConfig", "AutoController", "ControllerReport"]

# After so many tokens without a plain step what one takes is measured again.
_REFRESH_TOKENS = 96
# Where asking is given up, so many rounds of plain decoding go by before one is looked at.
_CALM_ROUNDS = 15
# So much of what may be lost is staked on each of so many first rounds of a reply.
_STAKED, _STAKED_ROUNDS = 0.5, 2
# So many times dearer a level may be in a shorter draft.
_HARDLY = 1.25
# What drafting a token takes until it was measured, in plain steps.
_UNKNOWN_LEVEL = 0.3
# What was found out is saved after so long, when another reply begins, and at the end.
_SAVED_SECONDS = 60.0
# The worst seen lately fades by this share a round; it is never taken to be less than expected.
_FADING = 0.97
_FORGIVING = 0.995
# What a pass may cost, of what is expected, among more replies at once than were seen before.
_UNKNOWN_WORST = 2.0
# Where guesses lose, and are rarer than one for so many tokens, a reply is called plain.
_TOKENS_OF_A_TRY = 16


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """What decides for a target, round by round, whether and how far is drafted.

    terms: what a reply may lose. costs: of this target. notes: where it is kept, by the drafters' names, what
    they were found to be worth. everywhere: named drafters are held to it as well as `auto`. grows: draft
    models choose their lengths by what pays.
    """

    terms: LossLimits
    costs: LiveCosts
    notes: Callable[[str], ArrayStore] | None = None
    everywhere: bool = False
    grows: bool = True


@dataclass(frozen=True, slots=True)
class ControllerReport:
    """How a reply stands. plain_seconds: of a plain round now. credit_seconds: gained, less what was spent.

    worst_loss: the agreed bound, as a share of the plain time. speed_up: over plain decoding, by what plain
    rounds took; uncertainty: of that, one standard error. drafters: those that guess, beyond a try now and
    then. reason: in one line.
    """

    target_step_seconds: float
    credit_seconds: float
    worst_loss: float
    speed_up: float
    uncertainty: float
    drafters: tuple[str, ...]
    reason: str


class AutoController(Drafter):
    """Asks a drafter in those rounds only in which the ledger can bear the worst of it.

    A round in which it is not asked is one of plain decoding: nothing is drafted, computed or read for it.
    The first round of a run is plain, and one of every 96 tokens, to measure what a plain step takes.
    Before any other the ledger must be able to bear the worst that was seen lately: that says how deep the
    draft may be. Where asking does not pay it is given up for a while, and begun anew when it is tried again.

    ledger, costs: of this drafter alone; a CombinedDrafter inside may ask the ledger too. ahead: tells the
    target whether the next rounds are plain. clock: seconds. replies: how many are being made at once; what
    passes cost and whether asking pays are found out for each number of them.
    """

    chooses_length = True

    def __init__(
        self,
        drafter: CombinedDrafter,
        ledger: LossLimit,
        costs: LiveCosts,
        *,
        kind_of: Callable[[Sequence[int]], str] = lambda _: "",
        ahead: Callable[[bool], None] = lambda _: None,
        notes: ArrayStore | None = None,
        clock: Callable[[], float] = perf_counter,
        replies: Callable[[], int] = lambda: ACTIVE_REPLIES.replies,
    ) -> None:
        self.name = drafter.name
        self.ledger = ledger
        self.costs = costs
        self._drafter = drafter
        self._kind_of = kind_of
        self._ahead = ahead
        self._notes = notes
        self._saved_at = clock()
        self._clock = clock
        self._tokens: list[int] = []
        # Not measured yet in this run.
        self._since_plain = _REFRESH_TOKENS
        self._following = self._looked = self._asked = False
        # A round that began without `propose`, or that nobody looks at, is not timed.
        self._timed = False
        self._started = self._proposed = 0.0
        self._pass_seconds = 0.0
        self._width = 1
        # What a plain round takes beside its pass.
        self._beside = RunningMean()
        self._worst_level_seconds = _UNKNOWN_LEVEL * costs.plain_seconds
        self._level_seconds = RunningMean()
        self._worst_pass = 1.0
        self._count_replies, self._replies = replies, 1
        self._patience = Backoff()
        self._calm_rounds = 0
        self._patiences = {1: self._patience}
        self._worst_passes: dict[int, float] = {}
        self._spoke: dict[str, None] = {}
        self._asked_rounds = self._short_rounds = 0
        if notes:
            self._restore(notes)

    @property
    def plain_seconds(self) -> float:
        """What a plain round takes now."""
        return self.costs.plain_seconds + self._beside.value

    @property
    def may_lose_seconds(self) -> float:
        """What may be lost from here, if the reply went on plainly."""
        return self.ledger.may_lose_seconds(self.plain_seconds)

    @property
    def memory_use(self) -> MemoryUse:
        return self._drafter.memory_use

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self._drafter.parts

    def begin(self, tokens: Sequence[int]) -> None:
        if self._clock() - self._saved_at > _SAVED_SECONDS:
            self.keep()
        self._tokens = list(tokens)
        self._following = self._looked = self._asked = self._timed = False
        self.ledger.begin()
        self.costs.at(len(tokens))
        self._look_around()
        self._ahead(self._patience.over)
        self._drafter.turn_to(self._kind_of(tokens))
        self._spoke = {}
        self._asked_rounds = self._short_rounds = 0

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        if self._patience.over and self._calm_rounds < _CALM_ROUNDS:
            # On a target as small as that even looking on takes a share of a step.
            self._calm_rounds += 1
            return TokenTree.chain(self._tokens[-1])
        self._patience.pass_by(self._calm_rounds)
        self._calm_rounds = 0
        self._started, self._timed = self._clock(), True
        self._look_around()
        tree = TokenTree.chain(self._tokens[-1])
        levels = length = 0
        wants = self._wants()
        self._looked = wants and self.may_lose_seconds > 0.0
        if self._looked:
            if not self._following:
                self._drafter.begin(self._tokens)
                self._following = True
            levels = self._staked(draft_length, self.may_lose_seconds - self._drafter.reading_seconds)
            # Guesses that are looked up take no more than their rows.
            lookup = self._drafter.looks_up
            length = self._affordable(draft_length, self.may_lose_seconds, 0.0) if lookup else levels
        self._short_rounds += wants and levels == 0 < draft_length
        self._asked = length > 0
        if self._asked:
            self._asked_rounds += 1
            tree = self._cut(self._drafter.propose_within(sampler, acceptance, length, levels))
            if tree.drafted:
                self._spoke |= dict.fromkeys(self._drafter.contributors)
        self._proposed = self._clock()
        return tree

    def _look_around(self) -> None:
        """Others share the machine, or no longer do: go by what was found out then."""
        self._replies = self._count_replies()
        before, plain = self.costs.replies, self.costs.plain_seconds
        self.costs.among(self._replies)
        now = self.costs.replies
        if now == before:
            return
        self._worst_passes[before] = self._worst_pass
        self._worst_pass = self._worst_passes.get(now, _UNKNOWN_WORST)
        self._worst_level_seconds *= self.costs.plain_seconds / plain
        self._patience = self._patiences.setdefault(now, Backoff())
        self._following = self._following and not self._patience.over
        self._ahead(self._patience.over)

    def _wants(self) -> bool:
        """May this round be any other than a plain one?"""
        if self._since_plain >= _REFRESH_TOKENS or self.costs.doubted:
            return False
        return self._patience.asks()

    def _staked(self, draft_length: int, most: float) -> int:
        """How many levels are drafted, where so many seconds may be lost.

        At first a part of them is staked, where a level is hardly dearer in a shorter draft: a guess that
        fails is then not the last.
        """
        each = self._worst_level_seconds
        many = self._affordable(draft_length, most, each)
        if many and self.ledger.rounds < _STAKED_ROUNDS:
            few = self._affordable(many, _STAKED * most, each)
            if few and self._worst(few, each) * many <= _HARDLY * self._worst(many, each) * few:
                return few
        return many

    def _worst(self, levels: int, level_seconds: float) -> float:
        """What so many levels lose if all of it is wrong."""
        return levels * level_seconds + self._worst_extra(levels + 1)

    def _affordable(self, draft_length: int, most: float, level_seconds: float) -> int:
        """How many levels may be drafted, so that no more is lost if all of it is wrong."""
        for levels in range(draft_length, 0, -1):
            if self._worst(levels, level_seconds) <= most:
                return levels
        return 0

    def _worst_extra(self, rows: int) -> float:
        """What a pass of so many rows may take at worst, beyond a plain one; in seconds, 0 or more."""
        return max(self._worst_pass * self.costs.v(rows) - 1.0, 0.0) * self.costs.plain_seconds

    def _cut(self, tree: TokenTree) -> TokenTree:
        """As much of a draft as the ledger can still bear, after what it took to make.

        What was drawn by chance stays: how long and how wide a draft became depends on what was drawn, and
        a cut by that would bias rejection mode.
        """
        most = self.may_lose_seconds - (self._clock() - self._started)
        rows = tree.width
        while rows > 1 and tree.draft_probs[rows - 1] is None and self._worst_extra(rows) > most:
            rows -= 1
        return tree.pruned(1 << 62, 1 << 30, rows)

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if not self._timed:
            return
        self._pass_seconds = self._clock() - self._proposed
        self._width = tree.width
        if self._following:
            self._drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._tokens.extend(tokens)
        if self._following:
            self._drafter.commit(tokens)
        if tokens and self._timed:
            self._book(len(tokens), self._clock() - self._started)
        else:
            self.ledger.plain(len(tokens))
        self._timed = False

    def _book(self, tokens: int, seconds: float) -> None:
        """The round emitted so many tokens and took so long."""
        plain, asking = self.plain_seconds, self._proposed - self._started
        # What was read serves rounds to come, and says nothing of this one.
        reading = self._drafter.prefill_seconds if self._asked else 0.0
        expected = self.costs.seconds(self._width)
        # A pass during which a reply began or ended says nothing.
        disturbed = self._count_replies() != self._replies
        if not disturbed:
            self.costs.saw(self._width, self._pass_seconds)
        if not self._asked:
            self.costs.at(len(self._tokens))
            self._beside.add(seconds - self._pass_seconds - asking)
            # What was bad once is not held against it for ever.
            self._expect_of_a_level(self._worst_level_seconds * _FORGIVING)
            self._worst_pass = max(self._worst_pass * _FORGIVING, 1.0)
            self.ledger.plain(tokens)
            self._since_plain = 0
            if self._looked:
                self.ledger.charge(asking)
                self._patience.looked(asking / plain)
                self._go_on()
            return
        if self._width == 1:
            self.ledger.plain(tokens)
            self.ledger.charge(asking)
            self._since_plain = 0
            self._patience.silent((asking - reading) / plain)
        else:
            self.ledger.drafted(tokens, seconds, plain)
            self._since_plain += tokens
            self._patience.guessed(tokens - (seconds - reading) / plain)
            if not disturbed:
                self._worst_pass = max(self._worst_pass * _FADING, self._pass_seconds / expected, 1.0)
        levels = self._drafter.drafted_levels
        drafting = (asking - reading) / max(1, levels)
        if levels:
            self._level_seconds.add(drafting)
        self._expect_of_a_level(max(self._worst_level_seconds * _FADING, drafting))
        self._go_on()

    def _go_on(self) -> None:
        """Follow the text, unless asking is given up."""
        self._following = not self._patience.over
        self._ahead(self._patience.over)

    def _expect_of_a_level(self, worst_seconds: float) -> None:
        """Drafting a token may take so long, and no less than it usually does."""
        known = self._level_seconds
        usual = known.value if known.count else _UNKNOWN_LEVEL * self.costs.plain_seconds
        self._worst_level_seconds = max(worst_seconds, usual)

    def report(self) -> ControllerReport:
        """How the reply stands."""
        plain, ledger = self.plain_seconds, self.ledger
        plainly = max(ledger.tokens, 1) * plain
        speed_up = plainly / max(plainly - ledger.credit_seconds, 1e-9)
        # A try that failed leaves a reply plain.
        guesses = ledger.credit_seconds > 0.0 or ledger.rounds * _TOKENS_OF_A_TRY >= ledger.tokens
        return ControllerReport(
            plain,
            ledger.credit_seconds,
            ledger.worst_loss,
            speed_up,
            speed_up * self.costs.uncertainty,
            tuple(self._spoke) if guesses else (),
            self._reason(),
        )

    def _reason(self) -> str:
        plain = self.plain_seconds
        return DraftingStatus(
            name=self.name,
            drafts=self._following,
            gains=self.ledger.credit_seconds > 0.0,
            tokens=self.ledger.tokens,
            guessed=bool(self._spoke),
            asked=self._asked_rounds,
            held_back=self._short_rounds,
            guess_steps=(self._worst_level_seconds + self._worst_extra(2)) / plain,
            may_lose_steps=self.may_lose_seconds / plain,
            round_steps=self._patience.gain,
            plain_seconds=plain,
            replies=self._replies,
        ).reason

    def note(self) -> str:
        trouble = self._notes.notice if self._notes else ""
        return "; ".join(filter(None, (self._drafter.note(), trouble)))

    def interrupt(self, enabled: bool) -> None:
        self._drafter.interrupt(enabled)

    def close(self) -> None:
        self._drafter.close()

    def _restore(self, notes: ArrayStore) -> None:
        """Go on from what another run found out; with nothing where that makes no sense."""
        kept = notes.load()
        if not kept:
            return
        try:
            self.costs.restore(kept)
            self._drafter.restore_statistics(kept)
            self._patiences[1].restore(kept)
        except (KeyError, ValueError, TypeError):
            notes.notice = "what was found out about this pair is not readable; it is found out again"

    def keep(self) -> None:
        """Save what was found out, for another run; after a reply, now and then."""
        if self._notes:
            self._notes.save(
                {**self.costs.kept(), **self._drafter.saved_statistics(), **self._patiences[1].kept()}
            )
            self._saved_at = self._clock()
