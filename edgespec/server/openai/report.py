"""The fields that OpenAI's responses share: usage, timings, and a report on how the reply was sped up."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from typing_extensions import TypedDict

from edgespec import Exactness, Reply, Stats
from edgespec.server.generation import Generation
from edgespec.server.openai.fields import ChoiceFields
from edgespec.server.responses import server_sent_event

__all__ = [
    "ChoiceStream",
    "CompletionHead",
    "ExactnessReport",
    "IgnoredReport",
    "ReplyReport",
    "Timings",
    "Usage",
    "completion_head",
    "exactness_report",
    "report",
    "timings",
    "usage",
]


class PromptDetails(TypedDict):
    """Details about the prompt."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Details about the generated tokens. `completion_tokens` does not include rejected drafts."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Token counts of a request, as in OpenAI's API."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(TypedDict):
    """Total token counts and times for all replies to a request, under llama-server's field names."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None
    draft_n: int
    draft_n_accepted: int


class LossLimit(TypedDict):
    """An upper bound on the time that drafting can cost a reply.

    The reply takes at most `1 + share` times as long as with plain decoding, plus the time of `passes`
    passes.
    """

    share: float
    passes: float


class ExactnessReport(TypedDict):
    """Whether replies are identical to plain decoding.

    `effective` is `bits` if they are, and `rounding` if they can differ. `requested` is the value of the
    server's `exactness` option. `widths` lists the pass widths that agree bit for bit. `expected_speed` is
    the expected speed with only these widths, as a fraction of the speed with `off`.
    """

    requested: str
    effective: str
    reason: str
    widths: list[int]
    expected_speed: float | None


class IgnoredReport(TypedDict):
    """The fields of a request that had no effect."""

    ignored_fields: list[str]


class ReplyReport(TypedDict):
    """A report on how a reply was generated.

    `method` is a sentence that states the drafting method, its speed-up and why it is in use.
    `ignored_fields` lists the request fields that had no effect.
    """

    method: str
    drafters: str
    speed_up: float | None
    loss_limit: LossLimit | None
    note: str
    seed: int
    exactness: ExactnessReport | None
    ignored_fields: list[str]


def usage(replies: Sequence[Reply], per_prompt: int) -> Usage:
    """Return the token counts of a request.

    Args:
        replies: The replies, in the order of their prompts.
        per_prompt: Number of replies to each prompt. A prompt's tokens are counted only once.
    """
    return _usage_so_far([reply.stats for reply in replies], per_prompt)


def _usage_so_far(replies: Sequence[Stats], per_prompt: int = 1) -> Usage:
    prompts = replies[::per_prompt]
    prompt_tokens = sum(stats.prompt_tokens for stats in prompts)
    generated = sum(stats.generated_tokens for stats in replies)
    drafted = sum(stats.drafted_tokens for stats in replies)
    accepted = sum(stats.accepted_tokens for stats in replies)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_prompt_tokens for s in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def timings(replies: Sequence[Reply]) -> Timings:
    """Return the total token counts and times of all replies."""
    each = [reply.stats for reply in replies]
    cached = sum(stats.cached_prompt_tokens for stats in each)
    processed = sum(stats.prompt_tokens for stats in each) - cached
    decoded = sum(stats.decoded_tokens for stats in each)
    prefill_seconds = sum(stats.prefill_seconds for stats in each)
    decode_seconds = sum(stats.decode_seconds for stats in each)
    return {
        "cache_n": cached,
        "prompt_n": processed,
        "prompt_ms": 1000 * prefill_seconds,
        "prompt_per_second": processed / prefill_seconds if prefill_seconds else None,
        "predicted_n": sum(stats.generated_tokens for stats in each),
        "predicted_ms": 1000 * decode_seconds,
        "predicted_per_second": decoded / decode_seconds if decoded else None,
        "draft_n": sum(stats.drafted_tokens for stats in each),
        "draft_n_accepted": sum(stats.accepted_tokens for stats in each),
    }


def exactness_report(exactness: Exactness | None) -> ExactnessReport | None:
    """Return whether replies are identical to plain decoding, or None if unknown."""
    return cast(ExactnessReport, exactness.to_json()) if exactness else None


def report(reply: Reply, ignored_fields: list[str]) -> ReplyReport:
    """Return a report on how a reply was generated."""
    method = reply.method
    limits = method.loss_limits
    return {
        "method": method.summary,
        "drafters": method.effective,
        "speed_up": None if method.gain is None else 1 + method.gain,
        "loss_limit": {"share": limits[0], "passes": limits[1]} if limits else None,
        "note": method.note,
        "seed": reply.seed,
        "exactness": exactness_report(reply.exactness),
        "ignored_fields": ignored_fields,
    }


class CompletionHead(TypedDict):
    """The fields that identify a completion, in the response or in each event of a stream."""

    id: str
    object: str
    created: int
    model: str


def completion_head(prefix: str, kind: str, model: str) -> CompletionHead:
    """Return the head of a completion of the given kind, whose id starts with a prefix."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


class ChoiceStream:
    """Formats the events of a stream with one or more choices, each of which is a reply.

    Usage is normally included in the last event of the last choice, because many clients cannot handle an
    event without choices. If the client sets `include_usage`, usage is sent in such a separate event.

    Args:
        body: The request.
        head: The head of all events.
        generation: The replies.
        count: Number of choices.
    """

    def __init__(self, body: ChoiceFields, head: CompletionHead, generation: Generation, count: int) -> None:
        self._body, self._head, self._generation, self._count = body, head, generation, count
        self._replies: dict[int, Reply] = {}

    def event(self, index: int, choice: Mapping[str, Any], **more: Any) -> bytes:
        """Return the event for a part of a choice. `more` are fields of the event."""
        options = self._body.stream_options
        if options and options.continuous_usage_stats:
            more = {"usage": _usage_so_far([self._generation.stats(index)]), **more}
        shown = {"index": index, "finish_reason": None, **choice}
        return server_sent_event({**self._head, "choices": [shown], **more})

    def finish(self, index: int, choice: Mapping[str, Any], reply: Reply) -> Iterator[bytes]:
        """Yield the events that end a choice and, after the last one, the stream."""
        self._replies[index] = reply
        choice = {**choice, "edgespec": report(reply, self._body.ignored_fields())}
        if len(self._replies) < self._count:
            yield self.event(index, choice)
            return
        replies = [self._replies[at] for at in sorted(self._replies)]
        totals = {"usage": usage(replies, self._body.n or 1), "timings": timings(replies)}
        has_own_event = self._body.stream_options and self._body.stream_options.include_usage
        yield self.event(index, choice, **({} if has_own_event else totals))
        if has_own_event:
            yield server_sent_event({**self._head, "choices": [], **totals})
        yield server_sent_event("[DONE]")
