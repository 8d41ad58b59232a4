"""Render a model's chat template in a child process, with limits on time, memory and output size."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.chat.message import Message
from edgespec.chat.template_quirks import (
    CONTENT_FORMS,
    PROBE_TEXT,
    PROBES,
    SourceQuirks,
    ToolSupport,
    accepted_variants,
    kinds_of,
)
from edgespec.chat.template_worker import (
    CPU_SECONDS,
    encode,
    memory_limit_bytes,
    output_limit_bytes,
    read_message,
    write_message,
)
from edgespec.chat.tool_calls.formats import call_form
from edgespec.errors import ClosedError, EdgespecError, TemplateError
from edgespec.model.base import Progress
from edgespec.system.child_process import ChildProcess
from edgespec.system.files import format_bytes
from edgespec.system.waiting import check_cancelled, wait_for

__all__ = ["DEFAULT_SETTINGS", "ChatTemplate", "TemplateSettings", "missing_template"]

# Maximum number of polls for a rendered prompt. Each waits 50 ms, so the limit is about 20 seconds.
_MAX_POLLS = 400


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
        self._process: _TemplateProcess | None = None
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
        error: TemplateError | None = None
        messages = self._tool_support.rewrite(messages, settings.tools)
        for variant in accepted_variants(messages, self._tool_support):
            kinds = kinds_of(variant)
            # The format does not matter for a message without text, such as a reply that only calls tools.
            forms = [
                self._content_form(kind, progress) or (None if message.content else "text")
                for kind, message in zip(kinds, variant, strict=True)
            ]
            if None in forms:
                error = error or TemplateError(
                    f"the model's chat template omits the text of {kinds[forms.index(None)]} messages",
                    "use another model, or `edgespec generate --raw`",
                )
                continue
            reply = self._try(variant, [form for form in forms if form], progress, settings)
            if "error" not in reply:
                return reply["text"]
            error = error or self._rejection(reply["message"], progress)
        assert error
        raise error

    def has_thinking_switch(self) -> bool:
        """Return whether the template has an option that turns reasoning on or off.

        Raises the same exceptions as `render`.
        """
        question = [Message("user", "Hello")]
        on, off = (self.render(question, None, TemplateSettings(thinking=each)) for each in ("on", "off"))
        return on != off

    def _rejection(self, reason: str, progress: Progress | None) -> TemplateError:
        """Return the error for rejected messages.

        The advice depends on whether the template rejects every chat or only this one, so probe it first.
        """
        form = self._content_form("user", progress) or "text"
        # Some templates require a system prompt.
        probes = [PROBES["user"], PROBES["system"]]
        if all("error" in self._try(each, [form] * len(each), progress, DEFAULT_SETTINGS) for each in probes):
            return TemplateError(
                f"the model's chat template rejects every message: {reason}",
                "use another model, or `edgespec generate --raw`",
                reason=reason,
            )
        return TemplateError(
            f"the model's chat template rejects these messages: {reason}",
            "change or shorten the chat",
            code="template_rejects_messages",
            reason=reason,
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
                # Some templates change the case of the text, or print a list of parts with Python's `repr`.
                prompt = reply.get("text", "").casefold()
                if PROBE_TEXT in prompt and f"'text': '{PROBE_TEXT}'" not in prompt:
                    found = form
                    break
                rejected = rejected or "error" in reply
            # A template that rejects the probe may still accept other messages, so default to plain text.
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

    def _started(self, progress: Progress | None) -> _TemplateProcess:
        """Return a running process that has compiled the template."""
        process = self._process
        if process is None or not process.alive:
            process = self._process = _TemplateProcess()
            if self._closed:
                process.close()
                raise ClosedError("the model is closed", "load the model again")
            reply = self._ask(process, {"source": self.source}, progress)
            if "error" in reply:
                process.close()
                raise TemplateError(
                    f"the model's chat template is broken: {reply['message']}",
                    "use another model, or `edgespec generate --raw`",
                )
        return process

    def _ask(
        self, process: _TemplateProcess, request: dict[str, object], progress: Progress | None
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


def missing_template(model_name: str, *, other_template: bool) -> TemplateError:
    """Return the error for using messages with a model that has no chat template.

    Args:
        model_name: The model's name.
        other_template: Whether Ollama has its own template for the model, in a format that edgespec cannot
            use.
    """
    hint = "continue plain text with `edgespec generate --raw`, or with /v1/completions of a server"
    if other_template:
        return TemplateError(
            f"{model_name} has no chat template: its GGUF file has none, and edgespec does not support the Go"
            " template in Ollama's manifest",
            f"use a GGUF file with a chat template, for example from Hugging Face, or {hint}",
            code="template_missing",
        )
    return TemplateError(
        f"{model_name} has no chat template", f"choose an instruct model, or {hint}", code="template_missing"
    )


class _TemplateProcess(ChildProcess):
    """A child process that compiles one chat template and renders it.

    Call `ask` from only one thread at a time, and `close` from any thread. `ChildProcess` describes when the
    process stops.

    Raises:
        TemplateError: The process cannot be started.
    """

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("template_worker.py"))
        try:
            super().__init__([script, *_import_folders()])
        except EdgespecError as error:
            raise TemplateError(
                f"the model's chat template cannot be used: {error.what}",
                f"{error.next_step}, or use `edgespec generate --raw`",
                code=error.code,
            ) from error

    def ask(self, request: dict[str, Any], progress: Progress | None = None) -> dict[str, str]:
        """Send a request to the child process and return its reply. Any exception stops the process.

        Raises:
            CancelledError: `progress` returned False.
            TemplateError: The template exceeded a limit.
        """
        data, polls = encode(request), 0

        def poll() -> None:
            nonlocal polls
            polls += 1
            check_cancelled(progress)
            if polls > _MAX_POLLS:
                raise _failure("rendering the prompt takes more than 20 seconds")
            if self.memory_bytes > memory_limit_bytes(len(data)):
                raise _failure(_too_much_memory(len(data)))

        try:
            reply = wait_for(lambda: self._exchange(data), poll)
            if reply is None:
                raise _failure(_exit_reason(self))
            match reply.get("error"):
                case "memory":
                    raise _failure(_too_much_memory(len(data)))
                case "output":
                    limit = format_bytes(output_limit_bytes(len(data)))
                    raise _failure(f"the rendered prompt exceeds {limit}")
                case "nesting":
                    raise _failure("the template's expressions or calls are nested too deeply")
            return reply
        except BaseException:
            self.close()
            raise

    def _exchange(self, data: bytes) -> dict[str, str] | None:
        """Send an encoded request. Return the reply, or None if it is too long or the process has exited."""
        with suppress(OSError, ValueError):
            write_message(self.stdin, data)
            if reply := read_message(self.stdout, output_limit_bytes(len(data))):
                return reply[0]
        return None


def _failure(reason: str) -> TemplateError:
    return TemplateError(
        f"the model's chat template cannot be used: {reason}",
        "use another model, or `edgespec generate --raw`",
        reason=reason,
    )


def _too_much_memory(request_bytes: int) -> str:
    return f"rendering the prompt takes more than {format_bytes(memory_limit_bytes(request_bytes))} of memory"


def _exit_reason(process: ChildProcess) -> str:
    process.close()
    if process.exceeded_cpu_limit:
        return f"rendering the prompt takes more than {CPU_SECONDS:g} seconds of CPU time"
    return f"the process that renders the prompt exited with status {process.wait(0)}"


def _import_folders() -> list[str]:
    """Return the folders that contain Jinja and its dependency MarkupSafe."""
    specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
    return [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
