"""Report a reply's speed-up and time saved, and explain why drafting is or is not in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from edgespec.methods.auto.constants import FAST_TARGET_SECONDS
from edgespec.options.methods import CHAT, TERMS, Wording

__all__ = ["ControllerReport", "DraftingStatus", "UnusedDrafter"]


class UnusedDrafter(NamedTuple):
    """A drafter that is loaded and runs a model, but has drafted nothing in a reply.

    Attributes:
        name: Name of the drafter, such as "model".
        token_cost: Time to draft a token, relative to a single-token target pass. 0 if unknown.
        acceptance_rate: Share of its drafts' first tokens that were accepted. None if not measured.
        speed_up: Expected speed with this drafter alone, relative to plain decoding. None if not measured.
    """

    name: str
    token_cost: float
    acceptance_rate: float | None
    speed_up: float | None


class ControllerReport(NamedTuple):
    """Report on how drafting affects the speed of a reply.

    Attributes:
        credit_seconds: Time saved so far. Negative if speculation has cost more than it saved.
        max_loss: Maximum time that speculation may cost, as a fraction of the plain decoding time.
        speed_up: Speed relative to plain decoding. None while the reply is too short to tell.
        uncertainty: Standard error of `speed_up`.
        drafters: Names of the drafters used. Empty if drafts were rare and saved no time.
        reason: A clause that says why drafts are or are not used.
        chat_reason: The same clause in simpler terms, for the chat.
        unused: The drafters that run a model but have drafted nothing in this reply.
    """

    target_step_seconds: float
    credit_seconds: float
    max_loss: float
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
