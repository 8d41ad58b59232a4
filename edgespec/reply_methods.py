"""The methods of a `Runtime` that generate replies from prompts, messages or tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from edgespec.backends.base import Progress, Vocabulary
from edgespec.backends.mapped_files import MappedFiles
from edgespec.catalog.acceptance_history import AcceptanceRecorder
from edgespec.chat.message import Message, as_message, as_messages
from edgespec.chat.message_prompts import MessagePrompts
from edgespec.chat.prompt import ContextFull, check_context_full
from edgespec.chat.reasoning import opening_marker
from edgespec.chat.single_prompt import build_single_prompt
from edgespec.chat.template import ChatTemplate, TemplateSettings
from edgespec.chat.tool_calls.parser import CallSyntax
from edgespec.chat.tool_calls.tool_set import ToolChoice, ToolSet, as_tool_set
from edgespec.constraints import ConstraintCompiler
from edgespec.conversation import Chat
from edgespec.engine.processors import LogitsProcessor
from edgespec.errors import ClosedError, OptionError
from edgespec.options import ReplyArguments
from edgespec.reply import MethodReport, Reply
from edgespec.reply_options import CONSTRAINT_NAMES, REPLY_OPTIONS
from edgespec.request import StreamArguments, build_request, check_options, defaults_for
from edgespec.session_pool import SessionPool
from edgespec.stream import ReplyStream

__all__ = ["ReplyMethods"]

_NO_TOOLS = ToolSet()


class ReplyMethods:
    """The base class of `Runtime`. Its methods generate replies and check their options.

    Args:
        sessions: The sessions that generate the replies.
        defaults: Default values of reply options, including `method`.
        record: Records the acceptance rate of the draft model. None records nothing.
        mapped: The memory-mapped files of the models, which must not change during a reply.
    """

    def __init__(
        self,
        sessions: SessionPool,
        defaults: Mapping[str, Any],
        record: AcceptanceRecorder | None,
        mapped: MappedFiles | None,
    ) -> None:
        self._sessions, self._session = sessions, sessions.first
        self._defaults, self._record, self._mapped = defaults, record, mapped
        target = self._session.target
        self.vocabulary: Vocabulary = target.vocabulary
        self.method: MethodReport = self._session.drafters.report(defaults["method"])
        source, vocabulary = self.vocabulary.chat_template, self.vocabulary
        template = ChatTemplate(source, vocabulary.bos_text, vocabulary.eos_text) if source else None
        self._prompts = MessagePrompts(vocabulary, template, self._session.cached_prefixes)
        self._constraints = ConstraintCompiler(self.vocabulary, target.facts.vocab_size)

    @property
    def parallel(self) -> int:
        """Number of replies that can be generated at once."""
        return len(self._sessions.sessions)

    @property
    def context_tokens(self) -> int:
        """Maximum length of prompt and reply in tokens.

        The allocated context, `target.context_tokens`, can be smaller, and grows when needed.
        """
        return self._session.context.limit_tokens

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, or None if it has none."""
        return self._prompts.template

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the available drafters. A method can combine several of them, such as `model+suffix`."""
        return self._session.drafters.names

    def check_options(
        self,
        *,
        progress: Progress | None = None,  # noqa: ARG002
        processors: Sequence[LogitsProcessor] = (),  # noqa: ARG002
        **options: Unpack[ReplyArguments],
    ) -> None:
        """Check the options of a reply without starting it. See `stream_tokens` for the arguments.

        Raises:
            OptionError: An option is unknown, or its value is invalid.
        """
        _, values = check_options(self._session.target.facts, self._with_defaults(options))
        self._session.drafters.check(values["method"], limited=values["max_loss"] is not None)
        if values["constraint"]:
            self._constraints.check(values["constraint"])

    def _with_defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: v for name, v in options.items() if v is not None or name not in self._defaults}
        return {**self._defaults, **given}

    def method_for(self, method: str) -> MethodReport:
        """Report which drafters a method uses with this target. Raises OptionError if one is unavailable."""
        return self._session.drafters.report(method)

    def reply_defaults(self, method: str | None = None) -> ReplyArguments:
        """Return the default values of the reply options whose defaults depend on the loaded models.

        Args:
            method: The reply's method, which determines `draft_length`. Defaults to the method passed to
                `load`.

        Returns:
            `method`, `acceptance`, `max_tokens` and `draft_length`, which is 0 if the method drafts nothing.

        Raises:
            OptionError: The method is unknown or unavailable.
        """
        values = self._with_defaults({"method": method})
        drafter, _ = self._session.drafters.choose(values["method"])
        adapts = drafter.chooses_length if drafter else None
        return defaults_for(values, adapts, self.context_tokens)

    def generate(
        self, prompt: str, *, system: str | None = None, raw: bool = False, **options: Unpack[StreamArguments]
    ) -> Reply:
        """Generate the reply to one prompt.

        Args:
            prompt: The user's message, formatted with the chat template unless `raw` is set or the model has
                none.
            system: Instructions for the model.
            raw: Whether to continue the prompt verbatim, without the chat template.
            **options: See `edgespec.ReplyArguments`. `progress` and `processors` as in `stream_tokens`.

        Raises:
            BusyError: Another reply is running.
            ContextFullError: The prompt is longer than the context.
            OptionError: An option is unknown or its value is invalid.
            TemplateError: The chat template is broken, or there is a system prompt but no chat template.
        """
        return self.stream(prompt, system=system, raw=raw, **options).wait()

    def stream(
        self,
        prompt: str,
        *,
        system: str | None = None,
        raw: bool = False,
        on_end: Callable[[Reply | None], None] | None = None,
        **options: Unpack[StreamArguments],
    ) -> ReplyStream:
        """Stream the reply to one prompt. See `generate` and `stream_tokens` for the arguments."""
        built = build_single_prompt(
            self.vocabulary,
            None if raw else self.template,
            prompt,
            system,
            self.context_tokens,
            options.get("progress"),
            _template_settings(options),
        )
        return self.stream_tokens(
            built.tokens, reply_start=opening_marker(built.text), on_end=on_end, **options
        )

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
    ) -> ReplyStream:
        """Stream the reply to a list of messages, which contains the whole conversation.

        Reuses the KV cache of an earlier reply in the same conversation.

        Args:
            messages: `Message` objects, or dictionaries with `role` (`system`, `user`, `assistant` or `tool`)
                and `content`. The last message must be from the user or a tool.
            tools: The tools that the model can call, as in OpenAI's API. If the chat template does not
                mention tools, the system prompt describes them.
            tool_choice: `auto` lets the model decide, `none` offers no tools, and `required` makes the reply
                one call. `{"type": "function", "function": {"name": NAME}}` makes it a call to that tool.
            reply_start: Text that the reply begins with, such as the start of an interrupted reply. The
                stream yields only what the model writes after it.
            context_full: What to do if the conversation does not fit the context. `slide` drops its oldest
                turns, `refuse` raises ContextFullError.
            on_end: Called once with the reply, or with None if it failed.
            **options: See `edgespec.ReplyArguments`. `progress` and `processors` as in `stream_tokens`.

        Raises:
            ContextFullError: The conversation does not fit the context.
            OptionError: A message or an option is invalid.
            TemplateError: The model has no chat template, or the template rejects the messages.
        """
        checked, tool_set = as_messages(messages), as_tool_set(tools, tool_choice)
        prompt, syntax, grammar = self._prompts.build(
            checked,
            self.context_tokens,
            context_full,
            tool_set,
            _template_settings(options, tool_set),
            reply_start,
            options.get("progress"),
        )
        if grammar:
            options = _with_grammar(options, grammar)

        def remember(reply: Reply | None) -> None:
            if reply and not self._session.closed:
                self._prompts.remember(prompt, reply.tokens)
            if on_end:
                on_end(reply)

        written = prompt.reply_start or opening_marker(prompt.text)
        stream = self._stream(prompt.tokens, written, remember, syntax, **options)
        stream.dropped_messages = prompt.dropped_messages
        return stream

    def count_tokens(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        thinking: str = "auto",
    ) -> int:
        """Return the number of tokens in the prompt. See `stream_messages` for the arguments.

        The number is approximate if it exceeds the context. Raises OptionError or TemplateError.
        """
        checked = [as_message(number, message) for number, message in enumerate(messages, 1)]
        settings = _template_settings({"thinking": thinking}, as_tool_set(tools, tool_choice))
        return self._prompts.count_tokens(checked, self.context_tokens, settings)

    def chat(
        self, system: str | None = None, messages: Sequence[Message] = (), context_full: ContextFull = "slide"
    ) -> Chat:
        """Start or continue a conversation.

        Args:
            system: Instructions for the model.
            messages: Initial messages of the conversation.
            context_full: What to do if the conversation does not fit the context. `slide` drops its oldest
                turns, `refuse` raises ContextFullError.

        Raises:
            OptionError: `context_full` has another value.
            TemplateError: The model has no chat template, or a broken one.
        """
        check_context_full(context_full)
        self._prompts.check_template()
        return Chat(self, system, messages, context_full)

    def stream_tokens(
        self,
        tokens: Sequence[int],
        *,
        reply_start: str = "",
        on_end: Callable[[Reply | None], None] | None = None,
        progress: Progress | None = None,
        processors: Sequence[LogitsProcessor] = (),
        **options: Unpack[ReplyArguments],
    ) -> ReplyStream:
        """Stream the reply to a prompt given as token ids.

        Args:
            tokens: The prompt.
            reply_start: Text at the end of the prompt that belongs to the reply, such as `<think>`. It
                determines whether the reply starts with reasoning.
            on_end: Called once with the reply, or with None if it failed.
            progress: Called during prefill. Returning False cancels the reply.
            processors: Custom logits processors (see `edgespec.engine.processors.LogitsProcessor`), which are
                applied before all others. Create new ones for every reply, because they are stateful.
            **options: See `edgespec.ReplyArguments`.

        Raises:
            ClosedError: The runtime was closed.
            ContextFullError: The prompt is longer than the context.
            OptionError: An option is unknown or its value is invalid.
        """
        return self._stream(tokens, reply_start, on_end, None, progress, processors, **options)

    def _stream(
        self,
        tokens: Sequence[int],
        reply_start: str,
        on_end: Callable[[Reply | None], None] | None,
        syntax: CallSyntax | None,
        progress: Progress | None = None,
        processors: Sequence[LogitsProcessor] = (),
        **options: Unpack[ReplyArguments],
    ) -> ReplyStream:
        """Stream a reply whose tool calls have the given syntax. See `stream_tokens`."""
        if self._session.closed:
            raise ClosedError("the runtime is closed", "load the model again")
        if self._mapped:
            self._mapped.check()
        values = self._with_defaults(options)
        facts = self._session.target.facts
        request = build_request(tokens, facts, self.context_tokens, values, processors)
        self._session.drafters.check(request.method, limited=request.max_loss is not None)
        if request.constraint:
            constraint = self._constraints.processor(request.constraint, request.tokens, reply_start)
            request = replace(request, processors=(constraint, *request.processors))

        def record(reply: Reply | None) -> None:
            # Count the drafts whose first token was accepted, to measure this model pair's acceptance rate.
            if reply and self._record and reply.method.effective == "model" and reply.stats.drafted_tokens:
                stats = reply.stats
                self._record.count(stats.drafted_per_position[0], stats.accepted_per_position[0])
            if on_end:
                on_end(reply)

        return ReplyStream(self._sessions, request, record, progress, reply_start, syntax)

    def cancel(self) -> None:
        """Stop all replies in progress after the current target pass."""
        self._sessions.cancel()


def _template_settings(options: Mapping[str, Any], tools: ToolSet = _NO_TOOLS) -> TemplateSettings:
    thinking = REPLY_OPTIONS["thinking"]
    return TemplateSettings(
        tools.definitions, thinking.check("thinking", options.get("thinking", thinking.default))
    )


def _with_grammar(options: StreamArguments, grammar: str) -> StreamArguments:
    """Add the grammar that makes the reply a valid tool call. Raises OptionError if there is a constraint."""
    for name in CONSTRAINT_NAMES:
        if options.get(name):
            raise OptionError(
                f"{name} cannot be used together with strict tools or a tool_choice that requires a call",
                f"remove {name}, or use tool_choice auto or none",
            )
    return {**options, "grammar": grammar}
