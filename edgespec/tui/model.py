"""Protocols for the part of edgespec's public API that the terminal chat uses.

Both `edgespec.Runtime` and the scripted runtime used in tests implement them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from edgespec import MemoryUse, MethodReport, ModelFacts, Reply, Stats, TextChunk
    from edgespec.chat.message import Message

__all__ = ["ChatLike", "Load", "Progress", "RuntimeLike", "StreamLike"]

Progress = Callable[[str, float], bool]
"""Called with a description and the fraction done, from 0 to 1. Returning False cancels."""


class StreamLike(Protocol):
    """A reply that is being generated. Iterate in one thread; `cancel` may be called from any."""

    @property
    def stats(self) -> Stats:
        """Counts and times, updated during the reply."""

    @property
    def method(self) -> MethodReport:
        """The drafting method and its speed-up so far."""

    @property
    def reply(self) -> Reply:
        """The finished reply."""

    def __iter__(self) -> Iterator[TextChunk]:
        """Return the iterator over the text."""

    def cancel(self) -> None:
        """End the reply after the current target pass."""


class ChatLike(Protocol):
    """A conversation."""

    @property
    def system(self) -> str | None:
        """The system prompt."""

    @system.setter
    def system(self, text: str | None) -> None: ...

    @property
    def messages(self) -> Sequence[Message]:
        """The messages so far."""

    @property
    def context_used_tokens(self) -> int:
        """Number of tokens in the conversation."""

    @property
    def dropped_messages(self) -> int:
        """Number of oldest messages that no longer fit the context."""

    def stream(self, text: str, **options: Any) -> StreamLike:
        """Send a message and stream the reply."""

    def regenerate(self, **options: Any) -> StreamLike:
        """Answer the last message again."""

    def edit_last(self, text: str, **options: Any) -> StreamLike:
        """Replace the last user message and answer it."""


class RuntimeLike(Protocol):
    """A loaded model."""

    @property
    def target(self) -> ModelFacts:
        """The target."""

    @property
    def draft(self) -> ModelFacts | None:
        """The draft model, if there is one."""

    @property
    def method(self) -> MethodReport:
        """The default drafting method."""

    @property
    def context_tokens(self) -> int:
        """The context size."""

    @property
    def loss_limits(self) -> tuple[float, float] | None:
        """Limits on the time cost of guessing: a share of the reply's time plus a number of token times."""

    def method_for(self, method: str) -> MethodReport:
        """Return which drafters `method` uses with this target. Raises OptionError if it cannot be used."""

    def memory_bytes(self) -> int:
        """Return the resident memory of the process in bytes."""

    def memory(self) -> MemoryUse:
        """Return a breakdown of the memory currently used."""

    def chat(self, system: str | None = None, messages: Sequence[Message] = ()) -> ChatLike:
        """Start or continue a conversation."""

    def close(self) -> None:
        """Free the models."""


Load = Callable[[Progress], RuntimeLike]
