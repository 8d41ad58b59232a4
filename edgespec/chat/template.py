"""Render a model's chat template in a sandbox, with limits on time and memory."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from typing import Any

from edgespec.backends.base import Progress
from edgespec.chat.message import Message
from edgespec.chat.template_process import TemplateProcess
from edgespec.chat.tool_calls.as_text import ToolSupport
from edgespec.chat.tool_calls.calls import ToolCall, parse_object
from edgespec.chat.tool_calls.formats import call_form
from edgespec.errors import ClosedError, TemplateError

__all__ = ["DEFAULT_SETTINGS", "ChatTemplate", "TemplateSettings"]


@dataclass(frozen=True)
class TemplateSettings:
    """The inputs of a chat template besides the messages.

    Attributes:
        tools: The tools that the model may call, in the format of OpenAI's API.
        thinking: Whether the model should reason: `on`, `off`, or `auto` for the template's default.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: str = "auto"

    def variables(self) -> dict[str, object]:
        """Return the template's variables, under every name that published templates use for them."""
        tools = list(self.tools) or None
        variables: dict[str, object] = {"tools": tools, "xml_tools": tools}
        if self.thinking != "auto":
            enabled = self.thinking == "on"
            variables |= {"enable_thinking": enabled, "thinking": enabled}
        if self.thinking == "off":
            # gpt-oss cannot be prevented from reasoning. With `low`, it reasons as little as possible.
            variables["reasoning_effort"] = "low"
        return variables


DEFAULT_SETTINGS = TemplateSettings()


class ChatTemplate:
    """Renders messages with a model's Jinja template. Can be used from any thread.

    Templates come with the model and can contain any code, so they are rendered in a sandboxed child process.
    The process starts on first use, which takes about 0.1 seconds, and stops on `close` or when this object
    is garbage-collected. If a template exceeds a limit, the process is stopped, and the next use starts a new
    one.

    Args:
        source: Source code of the template.
        bos_text: Text of the start token, which templates call `bos_token`.
        eos_text: Text of the end token, which templates call `eos_token`.

    Attributes:
        call_form: How the model writes tool calls.
    """

    def __init__(self, source: str, bos_text: str, eos_text: str) -> None:
        self.call_form = call_form(source)
        self._source = source
        self._tool_support = ToolSupport(source, self.call_form)
        # Mistral's templates accept only tool call ids of nine characters.
        self._has_short_ids = bool(re.search(r"length\s*!=\s*9", source))
        # DeepSeek R1's templates treat a message without content as a tool call.
        self._empty_content = None if re.search(r"content['\"]\]\s+is none", source) else ""
        self._tokens = {"bos_token": bos_text, "eos_token": eos_text}
        self._lock = threading.Lock()
        self._process: TemplateProcess | None = None
        self._closed = False

    def compile(self, progress: Progress | None = None) -> None:
        """Start the process and compile the template, unless that is already done.

        Raises:
            CancelledError: `progress` returned False.
            ClosedError: The template was closed.
            TemplateError: The template is broken or exceeds a limit.
        """
        with self._lock:
            self._started(progress)

    def render(
        self,
        messages: Sequence[Message],
        progress: Progress | None = None,
        settings: TemplateSettings = DEFAULT_SETTINGS,
    ) -> str:
        """Return the prompt for the assistant's next reply.

        Args:
            messages: The conversation.
            progress: Called every 50 ms. Returning False cancels the call.
            settings: The template's other inputs, such as tools.

        Raises:
            CancelledError: `progress` returned False.
            ClosedError: The template was closed.
            TemplateError: The template is broken, rejects the messages, or exceeds a limit.
        """
        return self._render(self._tool_support.rewrite(messages, settings.tools), progress, settings)

    def has_thinking_switch(self) -> bool:
        """Return whether the template has an option that turns reasoning on or off.

        Raises the same exceptions as `render`.
        """
        question = [Message("user", "Hello")]
        on, off = (self.render(question, None, TemplateSettings(thinking=each)) for each in ("on", "off"))
        return on != off

    def _render(
        self, messages: Sequence[Message], progress: Progress | None, settings: TemplateSettings
    ) -> str:
        request: dict[str, object] = {
            "messages": [self._for_template(message) for message in messages],
            "add_generation_prompt": True,
            **settings.variables(),
            **self._tokens,
        }
        with self._lock:
            reply = self._ask(self._started(progress), request, progress)
        if "error" not in reply:
            return reply["text"]
        # Some templates require valid JSON arguments. Others accept a system message only at the start, such
        # as those of Qwen 3.5, or have no system role, such as Gemma's. Change one of these things at a time,
        # and try again.
        for change in (_with_valid_arguments, _without_later_system, _without_system):
            if changed := change(messages):
                return self._render(changed, progress, settings)
        raise TemplateError(
            f"the model's chat template rejects these messages: {reply['message']}",
            "change or shorten the chat",
        )

    def _for_template(self, message: Message) -> dict[str, Any]:
        if self._has_short_ids:
            message = _with_short_ids(message)
        rendered = message.for_template()
        if message.tool_calls and not message.content:
            rendered["content"] = self._empty_content
        return rendered

    def _started(self, progress: Progress | None) -> TemplateProcess:
        """Return a running process that has compiled the template."""
        process = self._process
        if process is None or not process.alive:
            process = self._process = TemplateProcess()
            if self._closed:
                process.close()
                raise ClosedError("the model is closed", "load the model again")
            reply = self._ask(process, {"source": self._source}, progress)
            if "error" in reply:
                process.close()
                raise TemplateError(
                    f"the model's chat template is broken: {reply['message']}",
                    "use `edgespec generate --raw` or another model",
                )
        return process

    def _ask(
        self, process: TemplateProcess, request: dict[str, object], progress: Progress | None
    ) -> dict[str, str]:
        try:
            return process.ask(request, progress)
        except TemplateError:
            if self._closed:
                raise ClosedError("the model was closed", "load the model again") from None
            raise

    def close(self) -> None:
        """Stop the child process, even while another thread is rendering. Repeated calls have no effect."""
        self._closed = True
        if self._process:
            self._process.close()


def _with_short_ids(message: Message) -> Message:
    """Return the message with the ids of its tool calls shortened to nine characters."""
    return replace(
        message,
        tool_calls=tuple(replace(call, id=_short_id(call.id)) for call in message.tool_calls),
        tool_call_id=_short_id(message.tool_call_id) if message.role == "tool" else "",
    )


def _short_id(call_id: str) -> str:
    return call_id if len(call_id) == 9 else sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _with_valid_arguments(messages: Sequence[Message]) -> list[Message] | None:
    """Wrap invalid JSON arguments of tool calls in an object. Return None if all are valid."""

    def valid(call: ToolCall) -> ToolCall:
        if parse_object(call.arguments) is not None:
            return call
        return replace(call, arguments=json.dumps({"arguments": call.arguments}, ensure_ascii=False))

    changed = [
        replace(message, tool_calls=tuple(map(valid, message.tool_calls))) if message.tool_calls else message
        for message in messages
    ]
    return changed if changed != list(messages) else None


def _without_later_system(messages: Sequence[Message]) -> list[Message] | None:
    """Merge later system messages into user messages. Return None if there are no later system messages.

    System messages at the start are joined. Each later one is merged into the user message before or after
    it, because many templates require that roles alternate. The place of its text does not change, so that
    the cached prefix of the conversation remains valid.
    """
    if all(message.role != "system" for message in messages[1:]):
        return None
    leading = list(takewhile(lambda message: message.role == "system", messages))
    system = "\n\n".join(message.content for message in leading)
    changed = [Message("system", system)] if leading else []
    follows_system = False
    for message in messages[len(leading) :]:
        is_system = message.role == "system"
        moved = replace(message, role="user") if is_system else message
        if changed and changed[-1].role == moved.role == "user" and (is_system or follows_system):
            moved = replace(moved, content=f"{changed.pop().content}\n\n{moved.content}")
        changed.append(moved)
        follows_system = is_system
    return changed


def _without_system(messages: Sequence[Message]) -> list[Message] | None:
    """Move the system prompt into the first message. Return None if there is no system prompt."""
    if len(messages) < 2 or messages[0].role != "system":
        return None
    first = messages[1]
    return [replace(first, content=f"{messages[0].content}\n\n{first.content}"), *messages[2:]]
