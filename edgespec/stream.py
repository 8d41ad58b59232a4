"""The `ReplyStream` class, which yields the text of a reply as it is generated."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from edgespec.backends.base import Progress
from edgespec.chat.text import ReplyText
from edgespec.engine.loop import FinishReason
from edgespec.engine.stats import Stats
from edgespec.errors import EdgespecError
from edgespec.memory import peak_bytes
from edgespec.reply import MethodReport, Reply, TextChunk
from edgespec.request import Request
from edgespec.session import Session

__all__ = ["ReplyStream"]


class ReplyStream:
    """Iterator over the text chunks of a reply.

    Generation starts with iteration and runs in the iterating thread. Iterate in one thread only. `cancel`
    can be called from any thread.

    Attributes:
        stats: Statistics of the reply, updated after every target pass.
        prompt_tokens: Number of tokens in the prompt.
        dropped_messages: Number of oldest messages left out of the prompt because the context is full.
    """

    def __init__(
        self,
        session: Session,
        request: Request,
        on_end: Callable[[Reply | None], None],
        progress: Progress | None = None,
    ) -> None:
        self.stats = Stats(target_step_seconds=session.target_step_seconds)
        self.prompt_tokens = len(request.tokens)
        self.dropped_messages = 0
        self._method = session.drafters.choose(request.method)[1]
        self._session = session
        self._request = request
        self._on_end = on_end
        self._progress = progress
        self._reply: Reply | None = None
        vocabulary = session.target.vocabulary
        self._text = ReplyText(vocabulary.piece, vocabulary.is_end, request.stop)
        self._tokens: list[int] = []
        self._finish_reason: FinishReason = "cancelled"
        self._started = False
        self._cancelled = False
        self._chunks = self._generate()

    def __iter__(self) -> Iterator[TextChunk]:
        return self

    def __next__(self) -> TextChunk:
        self._started = True
        return next(self._chunks)

    @property
    def method(self) -> MethodReport:
        """The drafting method of this reply and its speed-up so far."""
        if self._reply or not self.stats.target_passes:
            return self._method
        return self._session.report(self._request.method)

    @property
    def reply(self) -> Reply:
        """The finished reply. Raises EdgespecError if the stream has not ended."""
        if self._reply is None:
            raise EdgespecError("the reply is not finished", "iterate over the stream to its end first")
        return self._reply

    def wait(self) -> Reply:
        """Generate the rest of the reply and return the finished reply."""
        for _ in self:
            pass
        return self.reply

    def cancel(self) -> None:
        """End the reply after the current target pass. The text generated so far is kept."""
        self._cancelled = True
        self._session.cancel(self._request)

    def close(self) -> None:
        """Stop generating. The tokens generated so far stay in the KV cache."""
        self._chunks.close()
        if not self._started:
            self._started = True
            self._finish(failed=False)

    def _generate(self) -> Generator[TextChunk]:
        text = self._text
        failed = False
        steps = self._session.run(
            self._request,
            is_stop=text.feed,
            is_cancelled=lambda: self._cancelled,
            stats=self.stats,
            progress=self._progress,
        )
        try:
            for step in steps:
                self._tokens.extend(step.tokens)
                self._finish_reason = step.finish_reason or self._finish_reason
                texts, accepted = text.drain(), step.accepted
                if texts[:accepted]:
                    yield TextChunk("".join(texts[:accepted]), len(texts[:accepted]), True)
                if texts[accepted:]:
                    yield TextChunk("".join(texts[accepted:]), len(texts[accepted:]), False)
            if rest := text.finish():
                yield TextChunk(rest, 0, False)
        except Exception:
            failed = True
            raise
        finally:
            text.finish()
            steps.close()
            self._finish(failed)

    def _finish(self, failed: bool) -> None:
        self.stats.peak_memory_bytes = peak_bytes()
        if not failed:
            self._method = self.method
            self._reply = Reply(
                text=self._text.text,
                tokens=tuple(self._tokens),
                finish_reason=self._finish_reason,
                seed=self._request.seed,
                target=self._session.target.facts.name,
                draft=self._session.draft.facts.name if self._session.draft else None,
                method=self._method,
                stats=self.stats,
            )
        self._on_end(self._reply)
