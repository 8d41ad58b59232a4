"""Race a method against plain decoding: generate one reply with each from the same prompt and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from edgespec.api.sharing.base import ChatReply
from edgespec.bench.constants import (
    CHECK_TOKENS,
    EQUAL_SPEEDS,
    MAX_DRIFT,
    MAX_PASS_RATIO,
    WARM_UP_TOKENS,
)
from edgespec.decode.reply import Reply
from edgespec.errors import CancelledError, OptionError
from edgespec.model.base import Progress
from edgespec.options.methods import CHAT, TERMS, Wording
from edgespec.system.files import format_rate

__all__ = ["DEFAULT_RACE_TOKENS", "Lane", "Race", "RaceChunk", "StartReply", "check_race", "run_race"]

# Default maximum length of each reply in tokens, which is long enough to show a difference in speed.
DEFAULT_RACE_TOKENS = 200


StartReply = Callable[..., ChatReply]


@dataclass(frozen=True, slots=True)
class RaceChunk:
    """A piece of a raced reply.

    Attributes:
        seconds: Time at which the piece was generated, in seconds since the start of the reply.
        text: The text to show.
        token_count: Number of tokens.
        accepted: Whether the tokens are accepted draft tokens.
    """

    seconds: float
    text: str
    token_count: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Lane:
    """One reply of a race, with the time at which each piece was generated."""

    method: str
    chunks: tuple[RaceChunk, ...]
    reply: Reply

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def seconds(self) -> float:
        """Duration of the reply in seconds, including the draft model's prompt processing."""
        return self.chunks[-1].seconds if self.chunks else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_at(self.seconds) / self.seconds if self.seconds else 0.0

    def tokens_at(self, seconds: float) -> int:
        """Return the number of tokens generated in the first `seconds` seconds."""
        return sum(chunk.token_count for chunk in self.chunks if chunk.seconds <= seconds)

    def seconds_until(self, tokens: int) -> float:
        """Return how many seconds it took to generate the first `tokens` tokens."""
        done = 0
        for chunk in self.chunks:
            done += chunk.token_count
            if done >= tokens:
                return chunk.seconds
        return self.seconds

    def to_json(self) -> dict[str, object]:
        """Return the reply in the format of `generate --json`, including its measured speed."""
        speed = {"race_seconds": self.seconds, "race_tokens_per_second": self.tokens_per_second}
        return self.reply.to_json() | speed


@dataclass(frozen=True, slots=True)
class Race:
    """A finished race.

    Attributes:
        plain: The reply from plain decoding, which was generated first.
        other: The reply from the other method.
        drift: How much the machine slowed down during the race. 0.2 means that the same tokens took 1.2 times
            as long after the race as before it. Negative if the machine became faster, and None if the
            replies were too short to tell.
    """

    plain: Lane
    other: Lane
    drift: float | None

    @property
    def speed_up(self) -> float:
        """Measured speed of the other method divided by that of plain decoding, or 0 if a reply is empty."""
        plain = self.plain.tokens_per_second
        return self.other.tokens_per_second / plain if plain else 0.0

    @property
    def is_same_text(self) -> bool:
        return self.plain.reply.tokens == self.other.reply.tokens and self.plain.text == self.other.text

    @property
    def is_fair(self) -> bool:
        """Whether the machine's speed was stable enough to compare the replies."""
        return (self.drift is None or abs(self.drift) <= MAX_DRIFT) and not self._is_impossible

    @property
    def _is_impossible(self) -> bool:
        """Whether the speed-up is too large to be explained by the accepted tokens."""
        possible = self.other.reply.stats.tokens_per_target_pass or 1.0
        return self.has_accepted and self.speed_up > MAX_PASS_RATIO * possible

    @property
    def is_faster(self) -> bool:
        # Without accepted tokens, a method can only be faster because of other programs or the order of the
        # runs.
        return self.is_fair and self.has_accepted and self.speed_up > 1 + EQUAL_SPEEDS

    @property
    def has_accepted(self) -> bool:
        """Whether any tokens drafted by the other method were accepted."""
        return self.other.reply.stats.accepted_tokens > 0

    def headline(self) -> str:
        """Return a sentence saying which method was faster, or that the race was not fair."""
        return self._headline(TERMS, self.other.reply.method.reason)

    def chat_headline(self) -> str:
        """Return the headline in the simpler wording used in chats."""
        method = self.other.reply.method
        return self._headline(CHAT, method.chat_reason or method.reason)

    def _headline(self, words: Wording, reason: str) -> str:
        name, plain, other = self.other.method, self.plain.tokens_per_second, self.other.tokens_per_second
        speeds = f"{format_rate(other, 1)} instead of {format_rate(plain, 1)} tokens per second"
        if not self.is_fair:
            drift = self.drift or 0.0
            change = (
                "faster" if self._is_impossible else f"{abs(drift):.0%} {'slower' if drift > 0 else 'faster'}"
            )
            return (
                f"The comparison was not fair, because the machine became {change} during the race. Close"
                " other"
                f" programs and race again. (Measured: {speeds}.)"
            )
        if self.is_faster:
            return f"{words.subject(name)} was {self.speed_up:.2f}x as fast as {words.without}: {speeds}."
        if not self.other.reply.stats.drafted_tokens:
            return (
                f"{name} {words.drafted} no tokens here, so any difference in speed comes from the machine:"
                f" {speeds}. Reason for not {words.drafting}: {reason}."
            )
        if self.speed_up > 1 + EQUAL_SPEEDS:
            return (
                f"No {words.drafted} tokens of {name} were accepted, so its higher speed comes from the"
                f" machine: {speeds}."
            )
        if self.speed_up < 1 - EQUAL_SPEEDS:
            result = f"{words.subject(name)} was slower here ({self.speed_up:.2f}x)"
        else:
            result = f"{words.subject(name)} was no faster here"
        return f"{result}: {speeds}. {self._explanation(words)}"

    def _explanation(self, words: Wording) -> str:
        """Explain in complete sentences why drafting was not faster than plain decoding."""
        reply = self.other.reply
        stats, limits = reply.stats, reply.method.loss_limits
        text = (
            f"The model accepted {stats.accepted_tokens:,} of {stats.drafted_tokens:,} {words.drafted}"
            " tokens, which was not enough to save time."
        )
        if self.speed_up >= 1 - EQUAL_SPEEDS or limits is None:
            return text
        rate, steps = limits
        text += (
            f" Trying {words.drafts} may slow a reply down by {rate:.0%} plus the time needed to generate"
            f" {steps:g} tokens."
        )
        if self.speed_up * (1 + rate + steps / max(1, len(reply.tokens))) < 1 - EQUAL_SPEEDS:
            text += " The difference is larger than that, so the rest is probably due to the machine."
        return text

    def remarks(self) -> list[str]:
        """Return sentences that say whether the replies are identical and how the race was run."""
        how = (
            f"The replies were generated one after the other, with the same seed ({self.plain.reply.seed}),"
            " and are shown at their measured speeds. Reading the prompt is not counted."
        )
        return [self._comparison(), how]

    def _comparison(self) -> str:
        if self.is_same_text:
            return "Both replies are identical."
        same = 0
        for mine, other in zip(self.plain.reply.tokens, self.other.reply.tokens, strict=False):
            if mine != other:
                break
            same += 1
        differ = f"The replies differ after {same} tokens."
        exactness = self.other.reply.exactness
        if exactness and not exactness.bits:
            reason = exactness.reason
            differ += f" {reason[0].upper()}{reason[1:]}."
        return (
            f"{differ} To find out whether only rounding caused this, run `edgespec verify --methods"
            f" {self.other.method}`."
        )

    def to_json(self) -> dict[str, object]:
        """Return the race in the format of `race --json`."""
        return {
            "same_text": self.is_same_text,
            "speed_up": self.speed_up,
            "faster": self.is_faster,
            "fair": self.is_fair,
            "drift": self.drift,
            "summary": [self.headline(), *self.remarks()],
            "plain": self.plain.to_json(),
            "other": self.other.to_json(),
        }


def check_race(method: str, options: Mapping[str, Any]) -> None:
    """Raise OptionError if a race is impossible with this method or these options."""
    if method == "none":
        raise OptionError("a race needs a method other than `none`", "use --method auto")
    if options.get("acceptance") == "rejection":
        raise OptionError(
            "a race compares replies token by token, so `acceptance` cannot be `rejection`",
            "set `acceptance` to `invariant`",
            code="option_conflict",
        )


def run_race(
    start: StartReply,
    options: Mapping[str, Any],
    *,
    method: str = "auto",
    progress: Progress = lambda _description, _fraction: True,
) -> Race:
    """Generate a reply with plain decoding and then one with `method`, and measure both.

    The replies are generated one after the other, so that they do not slow each other down. Before the race,
    each method generates a few tokens to warm up and to cache the prompt. After the race, plain decoding
    generates its first tokens again, to detect a change in the machine's speed.

    Args:
        start: Starts a reply to the prompt with the given options, such as `Chat.regenerate`.
        options: Options for both replies. If they contain no seed, a random one is used for both.
        method: The method to race against plain decoding.
        progress: Called with a description and the completed fraction. Returning False cancels the
            race.

    Raises:
        CancelledError: `progress` returned False.
        OptionError: A race is impossible with this method or one of the options.
    """
    check_race(method, options)
    runner = _Runner(start, dict(options), progress)
    warm = runner.run("warming up", method, 0.0, max_tokens=WARM_UP_TOKENS)
    runner.options["seed"] = warm.reply.seed
    runner.run("warming up", "none", 0.02, max_tokens=WARM_UP_TOKENS)
    plain = runner.run("generating a reply without the speed-up", "none", 0.04)
    other = runner.run(f"generating a reply with {method}", method, 0.5)
    tokens = min(CHECK_TOKENS, plain.tokens_at(plain.seconds))
    if tokens < CHECK_TOKENS // 2:
        return Race(plain, other, None)
    check = runner.run("checking the machine's speed", "none", 0.95, max_tokens=tokens)
    before = plain.seconds_until(tokens)
    return Race(plain, other, _drift(before, check.seconds))


def _drift(before_seconds: float, after_seconds: float) -> float | None:
    """Compute `Race.drift` from the times that the same tokens took before and after the race."""
    if not before_seconds or not after_seconds:
        return None
    if after_seconds >= before_seconds:
        return after_seconds / before_seconds - 1
    return 1 - before_seconds / after_seconds


class _Runner:
    """Generates the replies of a race, reporting progress to the caller."""

    def __init__(self, start: StartReply, options: dict[str, Any], progress: Progress) -> None:
        self.options = options
        self._start, self._progress = start, progress
        self._max_tokens = int(options.get("max_tokens") or DEFAULT_RACE_TOKENS)

    def run(self, description: str, method: str, done: float, *, max_tokens: int | None = None) -> Lane:
        """Generate one reply, reporting progress from the fraction `done` of the race onwards."""
        limit = min(max_tokens or self._max_tokens, self._max_tokens)
        self._report(description, done)
        options = self.options | {"method": method, "max_tokens": limit}
        began = perf_counter()
        stream = self._start(
            progress=lambda _description, _fraction: self._progress(description, done), **options
        )
        chunks: list[RaceChunk] = []
        tokens = 0
        try:
            for chunk in stream:
                seconds = perf_counter() - began
                chunks.append(RaceChunk(seconds, chunk.text, chunk.token_count, chunk.accepted))
                tokens += chunk.token_count
                if not self._progress(description, done + 0.45 * tokens / self._max_tokens):
                    stream.cancel()
        finally:
            stream.close()
        if stream.reply.finish_reason == "cancelled":
            raise CancelledError("the race was cancelled")
        return Lane(method, tuple(chunks), stream.reply)

    def _report(self, description: str, fraction: float) -> None:
        if not self._progress(description, fraction):
            raise CancelledError("the race was cancelled")
