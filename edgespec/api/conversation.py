"""A conversation with a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from edgespec.api.stream import ReplyStream
from edgespec.attachments.reading import ImageSource, as_image
from edgespec.chat.message import Message, PlacedImage, reply_message, with_system
from edgespec.chat.prompt import ContextFull
from edgespec.chat.reply_start import messages_to_answer
from edgespec.decode.reply import Reply
from edgespec.errors import OptionError, TemplateError

__all__ = ["Chat", "message_of"]


class _Runtime(Protocol):
    """The `Runtime` methods that `Chat` uses."""

    def count_tokens(self, messages: Sequence[Message]) -> int: ...

    @property
    def stream_messages(self) -> Callable[..., ReplyStream]: ...


class Chat:
    """A conversation with a loaded model. Created by `Runtime.chat`.

    Attributes:
        system: Instructions for the model. Changes take effect on the next turn.
        messages: The user and assistant messages, in order. Do not modify the list during a reply.
        dropped_messages: Number of old messages left out of the last turn's prompt because the context was
            full.
    """

    def __init__(
        self,
        runtime: _Runtime,
        system: str | None = None,
        messages: Sequence[Message] = (),
        context_full: ContextFull = "slide",
    ) -> None:
        self.system: str | None = system
        self.messages: list[Message] = list(messages)
        self.dropped_messages: int = 0
        self._runtime = runtime
        self._context_full = context_full
        # Number of context tokens in use, or None if they have not been counted yet.
        self._used_tokens: int | None = None if self.messages else 0

    @property
    def context_used_tokens(self) -> int:
        """Number of context tokens occupied by the last turn's prompt and reply.

        Before the first turn, this is the token count of the initial messages, which can exceed the context,
        or 0 if the chat template rejects them.
        """
        if self._used_tokens is None:
            with suppress(TemplateError):
                return self._runtime.count_tokens(with_system(self.system, self.messages))
        return self._used_tokens or 0

    def stream(self, text: str, images: Sequence[ImageSource] = (), **options: Any) -> ReplyStream:
        """Send a message and stream the reply.

        The reply is appended to `messages` when it ends. If it is cancelled, the text generated so far is
        kept. If it fails, or is cancelled before its first word, the conversation is left unchanged.

        Args:
            text: The user's message.
            images: Images that precede the message. See `Runtime.stream`.
            **options: See `edgespec.ReplyArguments`. `progress` and `processors` work as in
                `Runtime.stream_tokens`.

        Raises:
            AttachmentError, CapabilityError: The model cannot use an image.
            ContextFullError: The message does not fit in the context.
            OptionError: An option is unknown or has an invalid value.
            TemplateError: The chat template rejects the conversation.
        """
        placed = tuple(PlacedImage(as_image(image)) for image in images)
        return self._answer([*self.messages, Message("user", text, images=placed)], options)

    def ask(self, text: str, **options: Any) -> Reply:
        """Send a message and return the finished reply. Takes the same arguments as `stream`."""
        return self.stream(text, **options).wait()

    def regenerate(self, **options: Any) -> ReplyStream:
        """Generate a new reply to the last user message. Raises OptionError if there is no user message."""
        return self._answer(self.messages[: self._last_user_index() + 1], options)

    def edit_last(self, text: str, **options: Any) -> ReplyStream:
        """Replace the last user message and generate a reply to it. Raises OptionError if there is none."""
        return self._answer([*self.messages[: self._last_user_index()], Message("user", text)], options)

    def continue_reply(self, **options: Any) -> ReplyStream:
        """Continue the last reply where it stopped, or answer the last message if it has no reply yet.

        Use this for a reply that was interrupted or reached its maximum length. The stream yields only the
        new text, which is appended to the last message when the stream ends. With the same settings and
        seed, the result is the same as an uninterrupted reply, provided that the text so far tokenizes back
        to the same tokens.

        Args:
            **options: See `stream`.

        Raises:
            ContextFullError: The reply fills the context.
            OptionError: There is no message, or an option is unknown or has an invalid value.
            TemplateError: The chat template rejects the conversation.
        """
        messages, reply_start = messages_to_answer(self.messages)
        return self._answer(messages, options, reply_start)

    def clear(self) -> None:
        """Remove all messages except the system prompt."""
        self.messages = []
        self.dropped_messages = self._used_tokens = 0

    def _last_user_index(self) -> int:
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i].role == "user":
                return i
        raise OptionError(
            "there is no user message to answer", "send a message first", code="messages_invalid"
        )

    def _answer(self, messages: list[Message], options: dict[str, Any], reply_start: str = "") -> ReplyStream:
        before = self.messages, self.dropped_messages, self._used_tokens

        def on_end(reply: Reply | None) -> None:
            if reply is None or (
                reply.finish_reason == "cancelled" and not (reply.answer or reply.reasoning)
            ):
                self.messages, self.dropped_messages, self._used_tokens = before
            else:
                self.messages = [*messages, message_of(reply, written_before)]
                self._used_tokens = prompt_tokens + len(reply.tokens)

        stream = self._runtime.stream_messages(
            with_system(self.system, messages),
            reply_start=reply_start,
            context_full=self._context_full,
            on_end=on_end,
            **options,
        )
        # `on_end` must not refer to `stream`, because that would create a reference cycle.
        prompt_tokens, written_before = stream.prompt_tokens, stream.reply_start
        self.messages, self.dropped_messages = messages, stream.dropped_messages
        self._used_tokens = prompt_tokens
        return stream


def message_of(reply: Reply, written_before: str = "") -> Message:
    """Return the message for a reply that continues the text in `written_before`.

    If the reply ended early, its tool calls may be incomplete, so they are kept as text that the model can
    continue.
    """
    message = reply_message(written_before + reply.text)
    if not reply.tool_calls or reply.finish_reason != "stop":
        return message
    answer = reply_message(written_before).content + reply.answer
    return replace(message, content=answer, tool_calls=reply.tool_calls)
