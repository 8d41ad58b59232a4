"""The `ReplyStream` class, which yields the text of a reply as it is generated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from edgespec.chat.reasoning import piece_with_markers
from edgespec.chat.reply_text import (
    CallLimit,
    ReleasedText,
    ReplyParts,
    ReplySplitter,
    ReplyText,
    StopSearch,
    split_reply,
)
from edgespec.chat.tool_calls.parser import CallSyntax
from edgespec.decode.reply import MethodReport, Reply, TextChunk, TokenLogprobs, exactness_for
from edgespec.decode.request import Request
from edgespec.decode.session import SessionPool
from edgespec.engine.logits import TokenLogprob
from edgespec.engine.loop import FinishReason, Step
from edgespec.engine.stats import Stats
from edgespec.errors import BusyError, EdgespecError
from edgespec.memory.budget import peak_bytes
from edgespec.model.base import Progress
from edgespec.system.waiting import SignalEvent

__all__ = ["ReplyStream", "finished"]


def finished(reply: Reply | None) -> Reply:
    """Return the reply from a stream. Raises EdgespecError if the stream has not ended."""
    if reply is None:
        raise EdgespecError(
            "the reply is not finished", "iterate over the whole stream first", code="reply_unfinished"
        )
    return reply


class ReplyStream:
    """Iterator over a reply's text, in chunks.

    Generation starts with iteration and runs in the iterating thread. Iterate in one thread only. `cancel`
    and `close` can be called from any thread. A stream that is no longer referenced closes itself.

    Attributes:
        stats: Statistics of the reply, updated after every target pass.
        method: The drafting method of this reply and its speed-up so far. Replaced every few target passes.
        prompt_tokens: Number of tokens in the prompt.
        dropped_messages: Number of old messages left out of the prompt because the context is full.
        reply_start: Text at the end of the prompt that belongs to the reply, such as an opening `<think>`.
        prompt_logprobs: See `Reply.prompt_logprobs`. Complete before the stream yields text.
    """

    # Default for `__del__`, in case the constructor raises before there is a reply to end.
    _ended = True

    def __init__(
        self,
        sessions: SessionPool,
        request: Request,
        on_end: Callable[[Reply | None], None],
        progress: Progress | None = None,
        reply_start: str = "",
        syntax: CallSyntax | None = None,
        stop_searches: Sequence[StopSearch | CallLimit] = (),
    ) -> None:
        # Replaced by the reply's own session once the reply has started.
        self._session = session = sessions.first
        self._sessions = sessions
        self.stats = Stats(target_step_seconds=session.target_step_seconds)
        # The last report on the drafting, and the same with a note on adapters.
        self._report = self.method = request.method.report
        self.prompt_tokens = len(request.tokens)
        self.dropped_messages = 0
        self.reply_start = reply_start
        self._request, self._settings = request, request.settings
        self._on_end = on_end
        self._progress = progress
        self._reply: Reply | None = None
        self._vocabulary = vocabulary = session.target.vocabulary
        self._syntax = syntax
        markers = syntax.markers if syntax else frozenset()
        piece = partial(piece_with_markers, vocabulary, others=markers)
        self._text = ReplyText(piece, vocabulary.is_end, stop_searches)
        self._splitter = ReplySplitter(reply_start, syntax)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        # Log-probabilities of tokens that could still turn out to be part of a stop string.
        self._undecided_logprobs: deque[TokenLogprobs] = deque()
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._finish_reason: FinishReason = "cancelled"
        self._cancelled = SignalEvent()
        self._steps: Iterator[Step] | None = None
        self._chunks: deque[TextChunk] = deque()
        # Identifies the call that is reading or closing the stream. A lock could stay locked if Ctrl-C
        # interrupted the program between `acquire` and `try`.
        self._call: object | None = None
        self._call_lock = threading.RLock()  # Reentrant for signal handlers. See `Session`.
        self._ended = False

    def __iter__(self) -> Iterator[TextChunk]:
        return self

    def __next__(self) -> TextChunk:
        while not self._chunks:
            if self._ended:
                raise StopIteration
            call = object()
            try:
                if not self._begin(call):
                    raise BusyError(
                        "another thread is reading this reply", "read each reply in a single thread"
                    )
                self._read_step()
            finally:
                if self._call is call:
                    self._call = None
        return self._chunks.popleft()

    @property
    def reply(self) -> Reply:
        """The finished reply. Raises EdgespecError if the stream has not ended."""
        return finished(self._reply)

    @property
    def _is_cut(self) -> bool:
        return self._finish_reason == "length"

    def wait(self) -> Reply:
        """Generate the rest of the reply and return it."""
        for _ in self:
            pass
        return self.reply

    def cancel(self) -> None:
        """End the reply after the current target pass. The text generated so far is kept."""
        self._cancelled.set()
        self._session.cancel(self._request)

    def close(self) -> None:
        """Stop generating. The tokens generated so far stay in the KV cache."""
        call = object()
        try:
            if self._begin(call):
                self._chunks.clear()
                self._finish(failed=False)
            else:
                self.cancel()
        finally:
            if self._call is call:
                self._call = None

    def __del__(self) -> None:
        # Do not wait for the lock, because garbage collection may run in a thread that already holds it.
        ended = False
        try:
            ended = self._ended or self._finish(failed=False, wait=False)
        finally:
            # Python ignores exceptions here, so also end the reply later if Ctrl-C interrupted its end.
            if not ended:
                self._session.end_later(self.close)

    def _begin(self, call: object) -> bool:
        """Let a call read or close the stream, unless another call is doing so. The caller resets `_call`."""
        with self._call_lock:
            if self._call is None:
                self._call = call
            return self._call is call

    def _read_step(self) -> None:
        try:
            if self._steps is None:
                self._session = self._sessions.start(self._request)
                self._steps = self._session.steps(
                    self._request,
                    is_stop=self._text.feed,
                    is_cancelled=self._cancelled.is_set,
                    stats=self.stats,
                    progress=self._progress,
                )
            step = self._session.next_step(self._steps)
            self._publish(self._session.published_report)
            if step is None:
                rest = self._text.finish()
                parts = self._splitter.finish(rest.text, cut=self._is_cut)
                chunks = _text_chunks([rest.text], [parts], False, 0, [self._certain_logprobs(rest)])
                self._chunks.extend(
                    chunk
                    for chunk in chunks
                    if chunk.text or chunk.raw_text or chunk.tool_call or chunk.logprobs
                )
                self._finish(failed=False)
            else:
                self._add(step)
        except BaseException as error:
            # A reply stopped by Ctrl-C counts as cancelled rather than failed, and keeps its text.
            self._finish(failed=isinstance(error, Exception))
            raise

    def _publish(self, report: MethodReport) -> None:
        """Replace `method` if there is a new report."""
        if report is not self._report:
            self._report = report
            notes = self._adapter_note(report), report.note
            self.method = replace(report, note=" · ".join(filter(None, notes)))

    def _adapter_note(self, report: MethodReport) -> str:
        """Return a note on the acceptance rate of a draft model that runs without the target's adapters."""
        drafted = self.stats.drafted_per_position
        if not any(self._settings.adapter_scales) or report.effective != "model" or not drafted:
            return ""
        rate, usual = self.stats.accepted_per_position[0] / drafted[0], self._session.unadapted_acceptance
        compared = "" if usual is None else f", compared with {usual:.0%} without an adapter"
        accepted = f"{rate:.0%} of the first tokens in its drafts were accepted{compared}"
        return f"the draft model runs without the adapter; {accepted}"

    def _add(self, step: Step) -> None:
        if step.prompt_logprobs is not None:
            first = TokenLogprob(self._request.tokens[0], 0.0, ())
            self.prompt_logprobs = tuple(map(self._with_text, (first, *step.prompt_logprobs)))
        self._tokens.extend(step.tokens)
        self._finish_reason = step.finish_reason or self._finish_reason
        released, accepted = self._text.drain(), step.accepted
        self._undecided_logprobs.extend(self._with_text(each) for each in step.logprobs)
        texts = [each.text for each in released]
        logprobs = [self._certain_logprobs(each) for each in released]
        for part, is_draft in ((slice(accepted), True), (slice(accepted, None), False)):
            split = [self._splitter.feed(text) for text in texts[part]]
            self._chunks.extend(_text_chunks(texts[part], split, is_draft, 1, logprobs[part]))

    def _certain_logprobs(self, released: ReleasedText) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens whose text has been released."""
        count = min(released.tokens, len(self._undecided_logprobs))
        logprobs = [self._undecided_logprobs.popleft() for _ in range(count)]
        if logprobs and released.cut_bytes:
            raw = logprobs[-1].raw[: -released.cut_bytes]
            logprobs[-1] = replace(logprobs[-1], raw=raw, text=raw.decode("utf-8", "replace"))
        self._logprobs.extend(logprobs)
        return logprobs

    def _with_text(self, logprob: TokenLogprob) -> TokenLogprobs:
        vocabulary = self._vocabulary

        def described(token: int, value: float, top: tuple[TokenLogprobs, ...] = ()) -> TokenLogprobs:
            raw = vocabulary.raw_piece(token)
            return TokenLogprobs(
                token, raw.decode("utf-8", "replace"), value, top, raw, vocabulary.is_end(token)
            )

        top = tuple(described(token, value) for token, value in logprob.top)
        return described(logprob.token, logprob.logprob, top)

    def _finish(self, failed: bool, *, wait: bool = True) -> bool:
        if self._ended:
            return True
        if self._tokens and self._finish_reason == "cancelled":
            # The loop did not get to its last report.
            self._publish(self._session.report())
        # If the start was interrupted, it is unknown which session it reserved.
        sessions = self._sessions.sessions if self._steps is None else [self._session]
        if not all(session.end(self._request, wait=wait) for session in sessions):
            return False
        self._ended = True
        self._certain_logprobs(self._text.finish())
        self.stats.peak_memory_bytes = peak_bytes()
        if not failed:
            text = self._text.text
            split = split_reply(text, self.reply_start, self._syntax, cut=self._is_cut)
            self._reply = Reply(
                text=text,
                tokens=tuple(self._tokens),
                finish_reason=self._finish_reason,
                seed=self._settings.seed,
                target=self._session.target.facts.name,
                draft=self._session.draft.facts.name if self._session.draft else None,
                method=self.method,
                stats=self.stats,
                reasoning=split.reasoning,
                answer=split.answer,
                tool_calls=split.tool_calls,
                logprobs=tuple(self._logprobs),
                prompt_logprobs=self.prompt_logprobs,
                context_full=self._finish_reason == "length"
                and len(self._tokens) < self._settings.max_tokens,
                heads=tuple(head.name for head in self._session.drafters.heads),
                stop_string=self._text.stop_string,
                exactness=exactness_for(
                    self._session.target.facts.exactness,
                    acceptance=self._settings.acceptance,
                    temperature=self._settings.params.temperature,
                ),
            )
        self._on_end(self._reply)
        return True


def _text_chunks(
    texts: Sequence[str],
    split: Sequence[ReplyParts],
    accepted: bool,
    tokens_per_text: int,
    logprobs: Sequence[Sequence[TokenLogprobs]],
) -> Iterator[TextChunk]:
    start = 0
    for parts in _runs(split):
        end, reasoning = start + len(parts), parts[0].in_reasoning
        shown = "".join(part.reasoning if reasoning else part.answer for part in parts)
        raw = "".join(texts[start:end])
        values = tuple(value for each in logprobs[start:end] for value in each)
        calls = parts[-1].calls
        # A delta without an id continues an earlier call, which comes before the text.
        continued = [delta for delta in calls if not delta.id]
        yield from (TextChunk("", 0, accepted, tool_call=delta) for delta in continued)
        yield TextChunk(shown, tokens_per_text * len(parts), accepted, reasoning, raw, values)
        if reasoning and (answer := "".join(part.answer for part in parts)):
            yield TextChunk(answer, 0, accepted)
        yield from (TextChunk("", 0, accepted, tool_call=delta) for delta in calls if delta.id)
        start = end


def _runs(split: Sequence[ReplyParts]) -> Iterator[list[ReplyParts]]:
    """Group consecutive parts that can share a chunk. A part with tool calls ends its group."""
    run: list[ReplyParts] = []
    for part in split:
        if run and (run[-1].calls or run[-1].in_reasoning != part.in_reasoning):
            yield run
            run = []
        run.append(part)
    if run:
        yield run
