"""Reply requests, which consist of a prompt and validated options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, Unpack

from edgespec.attachments.reading import ImageSource, as_image
from edgespec.chat.message import Message, as_messages
from edgespec.chat.prompt import ContextFull, check_context_full
from edgespec.chat.tool_calls.tool_set import ToolChoice, ToolSet, as_tool_set
from edgespec.decode.reply import Reply
from edgespec.decode.request import ReplySettings, StreamArguments
from edgespec.engine.processors import LogitsProcessor
from edgespec.model.base import Progress
from edgespec.model.image import Image

__all__ = ["MessagesPrompt", "Prompt", "Replies", "ReplyRequest", "TextPrompt", "TokensPrompt"]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A single user message, or text to continue verbatim if `raw` is set. See `Replies.stream`."""

    text: str
    system: str | None
    raw: bool
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class MessagesPrompt:
    """A conversation to continue. See `Replies.stream_messages`."""

    messages: Sequence[Message]
    tools: ToolSet
    reply_start: str
    context_full: ContextFull


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids to continue. See `Replies.stream_tokens`."""

    tokens: Sequence[int]
    reply_start: str


Prompt: TypeAlias = TextPrompt | MessagesPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class ReplyRequest:
    """A request for one reply, with validated options.

    Attributes:
        prompt: The prompt.
        settings: The validated options, with defaults filled in.
        progress: Called while the prompt is prepared. Returning False cancels the reply.
        processors: The caller's own logits processors.
        on_end: Called once, with the reply or with None if it failed.
    """

    prompt: Prompt
    settings: ReplySettings
    progress: Progress | None
    processors: tuple[LogitsProcessor, ...]
    on_end: Callable[[Reply | None], None] | None


class _Stream(Protocol):
    def wait(self) -> Reply: ...


_StreamT = TypeVar("_StreamT", bound=_Stream)


class Replies(ABC, Generic[_StreamT]):
    """The methods that request a reply, shared by `Runtime` and `RequestQueue`."""

    @abstractmethod
    def checked_request(
        self, prompt: Prompt, options: StreamArguments, on_end: Callable[[Reply | None], None] | None = None
    ) -> ReplyRequest:
        """Check a reply's options and return its request. Raises OptionError if an option is invalid."""

    @abstractmethod
    def submit(self, request: ReplyRequest) -> _StreamT:
        """Start the reply to a request, or queue it. Raises the same errors as `stream`."""

    def generate(
        self,
        prompt: str,
        *,
        system: str | None = None,
        raw: bool = False,
        images: Sequence[ImageSource] = (),
        **options: Unpack[StreamArguments],
    ) -> Reply:
        """Generate the reply to a prompt. See `stream` for the arguments and errors."""
        return self.stream(prompt, system=system, raw=raw, images=images, **options).wait()

    def stream(
        self,
        prompt: str,
        *,
        system: str | None = None,
        raw: bool = False,
        images: Sequence[ImageSource] = (),
        on_end: Callable[[Reply | None], None] | None = None,
        **options: Unpack[StreamArguments],
    ) -> _StreamT:
        """Stream the reply to a prompt.

        Args:
            prompt: The user's message, formatted with the chat template unless `raw` is set or the model
                has none.
            system: Instructions for the model.
            raw: Whether to continue the prompt verbatim, without the chat template.
            images: Images that precede the prompt: paths of PNG, JPEG, WebP or GIF files, their contents as
                bytes, or `Image` objects.
            on_end: Called once, with the reply or with None if it failed.
            **options: See `edgespec.ReplyArguments`. `progress`, `processors` and `prompt_logprobs` work as
                in `stream_tokens`.

        Raises:
            AttachmentError: An image cannot be read, or the model cannot use it.
            BusyError: Another reply is running or, in a queue, too many requests are waiting.
            ClosedError: The runtime or the queue was closed.
            ContextFullError: The prompt is longer than the context.
            OptionError: An option is unknown or its value is invalid.
            TemplateError: The chat template is broken, or there is a system prompt but no chat template.
        """
        text = TextPrompt(prompt, system, raw, tuple(map(as_image, images)))
        return self.submit(self.checked_request(text, options, on_end))

    def reply(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        context_full: ContextFull = "slide",
        **options: Unpack[StreamArguments],
    ) -> Reply:
        """Generate the reply to a list of messages. See `stream_messages` for the arguments."""
        return self.stream_messages(
            messages, tools=tools, tool_choice=tool_choice, context_full=context_full, **options
        ).wait()

    def stream_messages(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        reply_start: str = "",
        context_full: ContextFull = "slide",
        on_end: Callable[[Reply | None], None] | None = None,
        **options: Unpack[StreamArguments],
    ) -> _StreamT:
        """Stream the reply to a list of messages that contains the whole conversation.

        The KV cache of an earlier reply in the same conversation is reused.

        Args:
            messages: `Message` objects, or dictionaries with `role` (`system`, `user`, `assistant` or
                `tool`) and `content`. The last message must be from the user or a tool, unless all are from
                the system.
            tools: The tools that the model can call, as in OpenAI's API. If the chat template does not
                mention tools, the system prompt describes them.
            tool_choice: `auto` lets the model decide, `none` offers no tools, and `required` forces a
                single tool call. `{"type": "function", "function": {"name": NAME}}` forces a call to that
                tool. Tools and tool choices in other supported APIs' formats are also accepted. With
                `auto` and a constraint such as `schema`, the reply consists either of tool calls or of an
                answer that satisfies the constraint.
            reply_start: Text that the reply begins with, such as the start of an interrupted reply. The
                stream yields only what the model writes after it. Text without a reasoning marker such as
                `<think>` is part of the answer, so pass `stream.reply_start + reply.text` of an interrupted
                reply. An incomplete character at the end is omitted.
            context_full: What to do if the conversation does not fit in the context. `slide` drops its
                oldest turns, and `refuse` raises ContextFullError.
            on_end: Called once, with the reply or with None if it failed.
            **options: See `edgespec.ReplyArguments`. `progress`, `processors` and `prompt_logprobs` work as
                in `stream_tokens`.

        Raises:
            BusyError: Another reply is running or, in a queue, too many requests are waiting.
            ClosedError: The runtime or the queue was closed.
            ContextFullError: The conversation does not fit in the context.
            AttachmentError, CapabilityError: The model cannot use an image in the messages.
            OptionError: A message or an option is invalid.
            TemplateError: The model has no chat template, or the template rejects the messages.
        """
        check_context_full(context_full)
        prompt = MessagesPrompt(
            as_messages(messages), as_tool_set(tools, tool_choice), reply_start, context_full
        )
        return self.submit(self.checked_request(prompt, options, on_end))

    def stream_tokens(
        self,
        tokens: Sequence[int],
        *,
        reply_start: str = "",
        on_end: Callable[[Reply | None], None] | None = None,
        **options: Unpack[StreamArguments],
    ) -> _StreamT:
        """Stream the reply to a prompt given as token ids.

        Args:
            tokens: The prompt.
            reply_start: Text at the end of the prompt that belongs to the reply, such as `<think>`. It
                determines whether the reply starts with reasoning. Stop strings apply to the whole text, as
                with `raw`, unless the reply has a constraint.
            on_end: Called once, with the reply or with None if it failed.
            **options: See `edgespec.ReplyArguments`. In addition, `progress` is called while the prompt is
                prepared and during prefill, and can return False to cancel the reply. `processors` are
                custom logits processors (see `edgespec.engine.processors.LogitsProcessor`), which are
                applied before all others. Create new ones for every reply, because they are stateful. If
                `prompt_logprobs` is set to N, `Reply.prompt_logprobs` holds the log-probabilities of each
                prompt token and of the N most likely tokens at its position. The whole prompt is then
                processed, even if its start is cached, and `max_tokens` can be 0 to generate nothing.

        Raises:
            BusyError: Another reply is running or, in a queue, too many requests are waiting.
            ClosedError: The runtime or the queue was closed.
            ContextFullError: The prompt is longer than the context.
            OptionError: An option is unknown or its value is invalid.
        """
        return self.submit(self.checked_request(TokensPrompt(tokens, reply_start), options, on_end))
