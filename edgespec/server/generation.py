"""Generate the replies to one HTTP request, and yield them as asynchronous events."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edgespec import QueuedReply, Reply, RequestQueue, Stats, TextChunk
from edgespec.chat.message import Message, as_message
from edgespec.chat.reply_start import text_to_continue
from edgespec.chat.tool_calls.tool_set import ToolChoice, read_choice
from edgespec.decode.reply import TokenLogprobs
from edgespec.errors import CancelledError, OptionError
from edgespec.model.image import Image
from edgespec.server.models import LoadedModel

__all__ = ["ChatPrompt", "Generation", "GenerationRequest", "RawPrompt", "ReplyPart", "TokenPrompt"]

ReplyPart: TypeAlias = tuple[int, TextChunk | Reply]
"""A reply's index, with either a chunk of the reply or the finished reply."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages to reply to, in the form that `Runtime.stream_messages` accepts.

    Attributes:
        messages: The whole conversation.
        reply_start: Text that the reply begins with.
        tools: The tools that the model can call, as in OpenAI's API.
        tool_choice: See `Runtime.stream_messages`.
    """

    messages: Sequence[Mapping[str, Any]]
    reply_start: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
    ) -> ChatPrompt:
        """Create the prompt for a whole conversation.

        Trailing assistant messages become the start of the reply. If the last message is a system message, it
        becomes a user message, because models reply only to users and tools.

        Raises:
            OptionError: There is no message to reply to, or the last assistant messages are invalid or
                contain tool calls without results.
        """
        conversation = list(messages)
        replies: list[Message] = []
        while conversation and conversation[-1]["role"] == "assistant":
            replies.insert(0, as_message(len(conversation), conversation.pop()))
        if not conversation:
            raise OptionError(
                "the conversation has no message to reply to",
                "add a message with the role user",
                code="messages_invalid",
            )
        reply_start = text_to_continue(replies)
        if len(conversation) > 1 and conversation[-1]["role"] == "system":
            conversation[-1] = {**conversation[-1], "role": "user"}
        return cls(conversation, reply_start, tools, tool_choice)

    def submit(self, queue: RequestQueue, **options: Any) -> QueuedReply:
        """Queue a request for a reply to this prompt.

        If a tool call is required, drop the answer's schema, because there will be no answer. Some clients,
        such as Instructor, send both.
        """
        known = [str(tool["function"].get("name")) for tool in self.tools]
        if "schema" in options and read_choice(self.tool_choice, known).mode == "required":
            del options["schema"]
        return queue.stream_messages(
            self.messages,
            reply_start=self.reply_start,
            context_full="refuse",
            tools=self.tools,
            tool_choice=self.tool_choice,
            **options,
        )


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text to continue verbatim, without the chat template, optionally preceded by images."""

    text: str
    images: tuple[Image, ...] = ()

    def submit(self, queue: RequestQueue, **options: Any) -> QueuedReply:
        """Queue a request for a reply to this prompt."""
        return queue.stream(self.text, raw=True, images=self.images, **options)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to continue."""

    tokens: Sequence[int]

    def submit(self, queue: RequestQueue, **options: Any) -> QueuedReply:
        """Queue a request for a reply to this prompt."""
        return queue.stream_tokens(self.tokens, **options)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A reply to generate: its prompt, and its options as in `edgespec.ReplyArguments`."""

    prompt: ChatPrompt | RawPrompt | TokenPrompt
    options: Mapping[str, Any] = field(default_factory=dict)


class Generation:
    """The replies to one HTTP request. Created by `Service.generate`, which cancels unfinished ones on exit.

    Use only in the event loop. For each reply, a thread reads the `QueuedReply` and forwards its chunks.

    Attributes:
        model: The model that generates the replies.
        model_name: The name to report for the model in the response.
        loaded_ns: Time at which the model was ready, from `time.perf_counter_ns`.
    """

    def __init__(
        self,
        model: LoadedModel,
        requests: Sequence[GenerationRequest],
        on_end: Callable[[Reply | None], None],
        model_name: str = "",
    ) -> None:
        self.model, self.model_name = model, model_name or model.name
        self.loaded_ns = time.perf_counter_ns()
        self._loop = asyncio.get_running_loop()
        self._requests, self._on_end = requests, on_end
        self._received: asyncio.Queue[tuple[int, TextChunk | Reply | Exception]] = asyncio.Queue()
        self._cancelled = threading.Event()
        self._replies: list[QueuedReply] = []

    async def start(self) -> None:
        """Queue the requests. Raises the same errors as `RequestQueue.stream_messages`.

        Runs in a separate thread, because checking a constraint such as a JSON schema can take many seconds.
        asyncio has only a few threads, and all requests need them.
        """
        submitted: Future[None] = Future()
        # Mark the future as running, so that it is not cancelled together with the request.
        submitted.set_running_or_notify_cancel()

        def submit() -> None:
            try:
                self._submit()
            except BaseException as error:
                submitted.set_exception(error)
            else:
                submitted.set_result(None)

        threading.Thread(target=submit, name="edgespec-server-submit", daemon=True).start()
        await asyncio.wrap_future(submitted)
        for index, reply in enumerate(self._replies):
            threading.Thread(
                target=self._read, args=(index, reply), name="edgespec-server-reply", daemon=True
            ).start()

    def _submit(self) -> None:
        for request in self._requests:
            if self._cancelled.is_set():
                break
            reply = request.prompt.submit(
                self.model.queue, progress=self._should_continue, on_end=self._on_end, **request.options
            )
            self._replies.append(reply)
        if self._cancelled.is_set():
            self.cancel()

    async def events(self) -> AsyncIterator[ReplyPart]:
        """Yield the chunks of all replies as they arrive, and each finished reply after its last chunk.

        Raises:
            EdgespecError: A reply failed or was cancelled.
        """
        unfinished = len(self._replies)
        while unfinished:
            index, event = await self._received.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Reply) and event.finish_reason == "cancelled":
                raise CancelledError("the server stopped the reply")
            unfinished -= isinstance(event, Reply)
            yield index, event

    async def replies(self) -> list[Reply]:
        """Wait for all replies and return them in request order. Raises the same errors as `events`."""
        ended = {index: event async for index, event in self.events() if isinstance(event, Reply)}
        return [ended[index] for index in range(len(ended))]

    def stats(self, index: int) -> Stats:
        """Return the current statistics of a reply. `events` must already have yielded part of it."""
        stream = self._replies[index].stream
        assert stream is not None
        return stream.stats

    def prompt_logprobs(self, index: int) -> Sequence[TokenLogprobs]:
        """Return a reply's `prompt_logprobs`. `events` must already have yielded part of the reply."""
        stream = self._replies[index].stream
        assert stream is not None
        return stream.prompt_logprobs

    def cancel(self) -> None:
        """Cancel all replies, even during prefill. Has no effect on finished replies."""
        self._cancelled.set()
        for reply in list(self._replies):
            reply.cancel()

    def _should_continue(self, _description: str, _fraction: float) -> bool:
        return not self._cancelled.is_set()

    def _read(self, index: int, queued: QueuedReply) -> None:
        try:
            for chunk in queued:
                self._send(index, chunk)
            self._send(index, queued.reply)
        except Exception as error:
            self._send(index, error)

    def _send(self, index: int, event: TextChunk | Reply | Exception) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._received.put_nowait, (index, event))
