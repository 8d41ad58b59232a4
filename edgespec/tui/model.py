"""What the terminal chat needs of a runtime: the part of the public API it uses, as Protocols.

`edgespec.Runtime` fits them; so does a scripted stand-in that fails or stalls on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from edgespec import MemoryUse, MethodReport, ModelFacts, Reply, Stats, TextChunk
    from edgespec.chat.message import Message

__all__ = ["ChatLike", "Load", "Progress", "RuntimeLike", "StreamLike"]

Progress = Callable[[str, float], bool]
"""Called with what is being done and the fraction done, 0 to 1; returning False cancels."""


class StreamLike(Protocol):
    """A reply being written: iterated in one thread, cancelled from any."""

    @property
    def stats(self) -> Stats:
        """The live counts and times."""

    @property
    def method(self) -> MethodReport:
        """What guesses in this reply by now, why, and what that gains."""

    @property
    def reply(self) -> Reply:
        """The whole reply, once the iteration has ended."""

    def __iter__(self) -> Iterator[TextChunk]:
        """The chunks, in order."""

    def cancel(self) -> None:
        """Ask the reply to end within one round."""


class ChatLike(Protocol):
    """One conversation."""

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
        """How much of the context is taken."""

    @property
    def dropped_messages(self) -> int:
        """How many messages no longer fit the context."""

    def stream(self, text: str, **options: Any) -> StreamLike:
        """Say `text` and stream the answer."""

    def regenerate(self, **options: Any) -> StreamLike:
        """Answer the last message again."""

    def edit_last(self, text: str, **options: Any) -> StreamLike:
        """Replace the last user message and answer it."""


class RuntimeLike(Protocol):
    """A loaded model."""

    @property
    def target(self) -> ModelFacts:
        """The model whose words the user gets."""

    @property
    def draft(self) -> ModelFacts | None:
        """The draft model, if there is one."""

    @property
    def method(self) -> MethodReport:
        """How replies are sped up, and why so."""

    @property
    def context_tokens(self) -> int:
        """The size of the context."""

    def method_for(self, method: str) -> MethodReport:
        """What a method comes to here. Raises OptionError for one that cannot be used."""

    def memory_bytes(self) -> int:
        """Resident bytes of the process."""

    def memory(self) -> MemoryUse:
        """What takes memory, and what is kept of other chats."""

    def chat(self, system: str | None = None, messages: Sequence[Message] = ()) -> ChatLike:
        """Open a conversation."""

    def close(self) -> None:
        """Give everything back."""


Load = Callable[[Progress], RuntimeLike]
