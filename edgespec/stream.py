"""A reply while it is written."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from edgespec.backends.base import Progress
from edgespec.chat.text import ReplyText
from edgespec.engine.loop import FinishReason, Step
from edgespec.engine.stats import Stats
from edgespec.errors import EdgespecError
from edgespec.memory import peak_bytes
from edgespec.reply import MethodReport, Reply, TextChunk
from edgespec.request import Request
from edgespec.session import Session

__all__ = ["ReplyStream"]

OnEnd = Callable[[Reply | None], None]


class ReplyStream:
    """An iterator of TextChunk. Iterate it in one thread; `cancel` may be called from any.

    `stats` is live; `reply` is there after the end. `on_end` gets the reply, or None when it failed.
    """

    def __init__(
        self,
        session: Session,
        request: Request,
        target: str,
        draft: str | None,
        method: MethodReport,
        stats: Stats,
        *,
        on_end: OnEnd | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.stats = stats
        self._method = method
        self._session = session
        self._request = request
        self._names = (target, draft)
        self._on_end = on_end
        self._progress = progress
        self._reply: Reply | None = None
        self._text = ReplyText(
            session.target.vocabulary.piece, session.target.vocabulary.is_end, request.stop
        )
        self._tokens: list[int] = []
        self._reason: FinishReason = "cancelled"
        self._started = False
        self._cancelled = False
        self._pieces = self._run()

    def __iter__(self) -> Iterator[TextChunk]:
        return self

    def __next__(self) -> TextChunk:
        self._started = True
        return next(self._pieces)

    @property
    def method(self) -> MethodReport:
        """What guesses in this reply, why, and what that gains: as it stands now."""
        if self._reply or not self.stats.target_passes:
            return self._method
        return self._session.report(self._request.how.method)

    @property
    def reply(self) -> Reply:
        """The finished reply. Raises EdgespecError before the end."""
        if self._reply is None:
            raise EdgespecError("the reply is not finished", "iterate the stream to its end first")
        return self._reply

    def cancel(self) -> None:
        """Ask for an end within one round; the reply keeps what was produced."""
        self._cancelled = True
        self._session.cancel(self._request)

    def close(self) -> None:
        """Give up the reply. What was emitted stays in the caches."""
        self._pieces.close()
        if not self._started:
            self._started = True
            self._end(failed=False)

    def _run(self) -> Generator[TextChunk]:
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
                self._reason = step.finish_reason or self._reason
                yield from _pieces(step, text.drain())
            if rest := text.finish():
                yield TextChunk(rest, 0, False)
        except Exception:
            failed = True
            raise
        finally:
            text.finish()
            steps.close()
            self._end(failed)

    def _end(self, failed: bool) -> None:
        self.stats.peak_memory_bytes = peak_bytes()
        target, draft = self._names
        if not failed:
            self._method = self.method
            self._reply = Reply(
                self._text.text,
                tuple(self._tokens),
                self._reason,
                self._request.seed,
                target,
                draft,
                self._method,
                self.stats,
            )
        if self._on_end:
            self._on_end(self._reply)


def _pieces(step: Step, texts: list[str]) -> Iterator[TextChunk]:
    """The text of one round, by who said it first: the drafter, then the target."""
    guessed, own = texts[: step.accepted], texts[step.accepted :]
    if guessed:
        yield TextChunk("".join(guessed), len(guessed), True)
    if own:
        yield TextChunk("".join(own), len(own), False)
