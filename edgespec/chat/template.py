"""Render a model's chat template in a sandbox, with limits on time and memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.chat.message import Message
from edgespec.chat.template_process import TemplateProcess
from edgespec.chat.template_quirks import (
    CONTENT_FORMS,
    PROBE_TEXT,
    PROBES,
    SourceQuirks,
    accepted_variants,
    kinds_of,
)
from edgespec.chat.tool_calls.as_text import ToolSupport
from edgespec.chat.tool_calls.formats import call_form
from edgespec.errors import ClosedError, TemplateError
from edgespec.model.base import Progress

__all__ = ["DEFAULT_SETTINGS", "ChatTemplate", "TemplateSettings"]


@dataclass(frozen=True)
class TemplateSettings:
    """A chat template's inputs other than the messages.

    Attributes:
        tools: The tools that the model may call, in the format of OpenAI's API.
        thinking: Whether the model should reason: `on`, `off`, or `auto` for the template's default.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: str = "auto"

    def variables(self) -> dict[str, object]:
        """Return the template variables, under every name that published templates use."""
        tools = list(self.tools) or None
        variables: dict[str, object] = {"tools": tools, "xml_tools": tools}
        if self.thinking != "auto":
            enabled = self.thinking == "on"
            variables |= {"enable_thinking": enabled, "thinking": enabled}
        if self.thinking == "off":
            # gpt-oss always reasons. With `low`, it reasons as little as possible.
            variables["reasoning_effort"] = "low"
        return variables


DEFAULT_SETTINGS = TemplateSettings()


class ChatTemplate:
    """Renders messages with a model's Jinja template. Can be used from any thread.

    Templates come with the model and can contain arbitrary code, so they are rendered in a sandboxed child
    process. The process starts on first use, which takes about 0.1 seconds, and stops on `close` or when this
    object is garbage-collected. If a template exceeds a limit, the process is killed, and the next use starts
    a new one.

    Args:
        source: Source code of the template.
        bos_text: Text of the start token, which templates call `bos_token`.
        eos_text: Text of the end token, which templates call `eos_token`.

    Attributes:
        call_form: The model's tool-call format.
        source: Source code of the template.
    """

    def __init__(self, source: str, bos_text: str, eos_text: str) -> None:
        self.call_form = call_form(source)
        self.source = source
        self._tool_support = ToolSupport(source, self.call_form)
        self._quirks = SourceQuirks(source)
        # The content format that the template expects, for each kind of message probed so far.
        self._forms: dict[str, str | None] = {}
        self._tokens = {"bos_token": bos_text, "eos_token": eos_text}
        self._lock = threading.Lock()
        self._process: TemplateProcess | None = None
        self._closed = False

    def compile(self, progress: Progress | None = None) -> None:
        """Start the process and compile the template, unless already done.

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
        error: TemplateError | None = None
        for variant in accepted_variants(messages, self._tool_support):
            kinds = kinds_of(variant)
            # The format does not matter for a message without text, such as a reply that only calls tools.
            forms = [
                self._content_form(kind, progress) or (None if message.content else "text")
                for kind, message in zip(kinds, variant, strict=True)
            ]
            if None in forms:
                error = error or TemplateError(
                    f"the model's chat template leaves out the text of {kinds[forms.index(None)]} messages",
                    "use `edgespec generate --raw` or another model",
                )
                continue
            reply = self._try(variant, [form for form in forms if form], progress, settings)
            if "error" not in reply:
                return reply["text"]
            error = error or self._rejection(reply["message"], progress)
        assert error
        raise error

    def _rejection(self, reason: str, progress: Progress | None) -> TemplateError:
        """Return the error for rejected messages, which says whether a different chat may help."""
        form = self._content_form("user", progress) or "text"
        # Some templates require a system prompt.
        probes = [PROBES["user"], PROBES["system"]]
        if all("error" in self._try(each, [form] * len(each), progress, DEFAULT_SETTINGS) for each in probes):
            return TemplateError(
                f"the model's chat template rejects every message: {reason}",
                "use `edgespec generate --raw` or another model",
            )
        return TemplateError(
            f"the model's chat template rejects these messages: {reason}",
            "change or shorten the chat",
            code="template_rejects_messages",
        )

    def _content_form(self, kind: str, progress: Progress | None) -> str | None:
        """Return the format in which the template expects the text of one kind of message.

        Returns:
            A key of `CONTENT_FORMS`, or None if the template omits the text in every format.
        """
        if kind not in self._forms:
            # The probe's other messages use the user message format, which is probed first.
            others = "text" if kind == "user" else self._content_form("user", progress) or "text"
            kinds, found, rejected = kinds_of(PROBES[kind]), None, False
            for form in CONTENT_FORMS:
                forms = [form if each == kind else others for each in kinds]
                reply = self._try(PROBES[kind], forms, progress, DEFAULT_SETTINGS)
                # Some templates change the case of the text or print a list of parts as Python's repr.
                prompt = reply.get("text", "").casefold()
                if PROBE_TEXT in prompt and f"'text': '{PROBE_TEXT}'" not in prompt:
                    found = form
                    break
                rejected = rejected or "error" in reply
            # A template that rejects the probe may accept other messages.
            self._forms[kind] = found or ("text" if rejected else None)
        return self._forms[kind]

    def _try(
        self,
        messages: Sequence[Message],
        forms: Sequence[str],
        progress: Progress | None,
        settings: TemplateSettings,
    ) -> dict[str, str]:
        """Render messages with their content in the given formats, and return the child process's reply."""
        request: dict[str, object] = {
            "messages": list(map(self._quirks.for_template, messages, forms)),
            "add_generation_prompt": True,
            **settings.variables(),
            **self._tokens,
        }
        with self._lock:
            return self._ask(self._started(progress), request, progress)

    def _started(self, progress: Progress | None) -> TemplateProcess:
        """Return a running process that has compiled the template."""
        process = self._process
        if process is None or not process.alive:
            process = self._process = TemplateProcess()
            if self._closed:
                process.close()
                raise ClosedError("the model is closed", "load the model again")
            reply = self._ask(process, {"source": self.source}, progress)
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
