"""One conversation: its messages, the prompt they make, and what no longer fits the context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from edgespec.backends.base import Vocabulary
from edgespec.chat.message import Message
from edgespec.chat.prompt import PromptBuilder, RenderedPrompt
from edgespec.chat.template import ChatTemplate
from edgespec.errors import ContextFullError, OptionError, TemplateError
from edgespec.reply import Reply
from edgespec.stream import ReplyStream

__all__ = ["Chat", "ContextFull"]

ContextFull = Literal["slide", "refuse"]

# A reply should have this much of the context left, or a quarter of it where that is less.
_REPLY_TOKENS = 512


class Host(Protocol):
    """What a conversation needs of a runtime."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def template(self) -> ChatTemplate | None: ...

    @property
    def context_tokens(self) -> int: ...

    def cached_prefixes(self) -> Iterable[Sequence[int]]: ...

    def stream_tokens(
        self, tokens: Sequence[int], *, on_end: Callable[[Reply | None], None] | None = None, **options: Any
    ) -> ReplyStream: ...


class Chat:
    """A conversation over a runtime. Made by `Runtime.chat`.

    messages: user and assistant in turn; do not change the list while a reply is being written.
    system: instructions for the model; a change takes effect with the next turn.
    context_full: what happens when the conversation outgrows the context. `slide`: the oldest turns are
    no longer shown to the model, half of the context at a time so that the cache serves the turns
    between; `dropped_messages` says how many. `refuse`: ContextFullError.
    """

    def __init__(
        self,
        host: Host,
        system: str | None = None,
        messages: Sequence[Message] = (),
        context_full: ContextFull = "slide",
    ) -> None:
        if context_full not in ("slide", "refuse"):
            raise OptionError(f"context_full is {context_full!r}", "choose slide or refuse")
        if host.template is None:
            raise TemplateError(
                "this model has no chat template",
                "choose an instruct model, or use `edgespec generate --raw`",
            )
        self.system = system
        self.messages = list(messages)
        self.dropped_messages = 0
        # None: to be told from the messages, when somebody asks.
        self._used_tokens: int | None = None if self.messages else 0
        self._host = host
        self._context_full = context_full
        self._prompts = PromptBuilder(host.template, host.vocabulary, host.cached_prefixes)

    @property
    def context_used_tokens(self) -> int:
        """What prompt and reply of the last turn take of the context.

        Before the first turn it is what the messages take that the conversation began with, which may be
        more than the context holds; 0 where the model's template refuses them.
        """
        if self._used_tokens is None:
            # By a builder of its own: the other one looks only once for what was read before.
            prompts = PromptBuilder(self._prompts.template, self._host.vocabulary)
            with suppress(TemplateError):
                return len(prompts.build(self._with_system(self.messages))[1])
        return self._used_tokens or 0

    def stream(self, text: str, **options: Any) -> ReplyStream:
        """Say something and stream the answer. Options as for `Runtime.generate`.

        The messages grow when the reply ends; a cancelled reply keeps what was produced, a failed one
        leaves the conversation as it was. Raises ContextFullError, OptionError, TemplateError.
        """
        return self._answer([*self.messages, Message("user", text)], options)

    def ask(self, text: str, **options: Any) -> Reply:
        """Say something and wait for the whole answer."""
        return _finished(self.stream(text, **options))

    def regenerate(self, **options: Any) -> ReplyStream:
        """Answer the last user message again. Raises OptionError when there is none."""
        return self._answer(self.messages[: self._last_user() + 1], options)

    def edit_last(self, text: str, **options: Any) -> ReplyStream:
        """Replace the last user message and answer it. Raises OptionError when there is none."""
        return self._answer([*self.messages[: self._last_user()], Message("user", text)], options)

    def clear(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages = []
        self.dropped_messages = self._used_tokens = 0

    def _last_user(self) -> int:
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i].role == "user":
                return i
        raise OptionError("there is no message to answer again", "say something first")

    def _answer(self, messages: list[Message], options: dict[str, Any]) -> ReplyStream:
        before = self.messages, self.dropped_messages, self._used_tokens
        prompt, dropped = self._fitting(messages)

        def on_end(reply: Reply | None) -> None:
            if reply is None or (reply.finish_reason == "cancelled" and not reply.text):
                self.messages, self.dropped_messages, self._used_tokens = before
                return
            self.messages = [*messages, Message("assistant", reply.text)]
            self._used_tokens = len(prompt[1]) + len(reply.tokens)
            self._prompts.remember(prompt, reply.tokens)

        stream = self._host.stream_tokens(prompt[1], on_end=on_end, **options)
        self.messages, self.dropped_messages, self._used_tokens = messages, dropped, len(prompt[1])
        return stream

    def _fitting(self, messages: list[Message]) -> tuple[RenderedPrompt, int]:
        """The prompt of the messages that fit, by the rule of `context_full`, and how many are left out."""
        context = self._host.context_tokens
        limit = context - min(_REPLY_TOKENS, context // 4)
        dropped = min(self.dropped_messages, len(messages) - 1)
        prompt = self._prompt(messages[dropped:])
        if len(prompt[1]) > limit and self._context_full == "refuse":
            raise ContextFullError(
                f"the chat is {len(prompt[1])} tokens long and the context holds {context}",
                "start a new chat, let it slide, or use a larger --context",
            )
        if len(prompt[1]) > limit:
            while len(prompt[1]) > context // 2 and dropped < len(messages) - 1:
                dropped += 1
                while messages[dropped].role != "user":
                    dropped += 1
                prompt = self._prompt(messages[dropped:])
        if len(prompt[1]) >= context:
            raise ContextFullError(
                f"the message is {len(prompt[1])} tokens long and the context holds {context}",
                f"shorten it or use --context {(len(prompt[1]) + _REPLY_TOKENS) // 256 * 256 + 256}",
            )
        return prompt, dropped

    def _prompt(self, messages: Sequence[Message]) -> RenderedPrompt:
        return self._prompts.build(self._with_system(messages))

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        return [*([Message("system", self.system)] if self.system else []), *messages]


def _finished(stream: ReplyStream) -> Reply:
    for _ in stream:
        pass
    return stream.reply
