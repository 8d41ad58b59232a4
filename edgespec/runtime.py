"""The public `Runtime` class: a loaded target model and its drafters."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Unpack

from edgespec.backends.base import LanguageModel, LoadOptions, ModelFacts, Progress, Vocabulary
from edgespec.backends.mapped_files import MappedFiles
from edgespec.catalog.acceptance_history import AcceptanceRecorder
from edgespec.chat.message import Message, as_message, as_messages
from edgespec.chat.prompt import ContextFull, PromptBuilder, check_context_full
from edgespec.chat.reasoning import opening_marker
from edgespec.chat.single_prompt import build_single_prompt
from edgespec.chat.template import ChatTemplate, TemplateSettings
from edgespec.chat.tool_calls.grammar import tool_grammar
from edgespec.chat.tool_calls.parser import CallSyntax
from edgespec.chat.tool_calls.tool_set import ToolChoice, ToolSet, as_tool_set
from edgespec.constraints import ConstraintCompiler
from edgespec.conversation import Chat
from edgespec.costs.curve import CostCurve
from edgespec.costs.target_costs import TargetCosts
from edgespec.embedding import Embedding, tokenize_texts
from edgespec.engine.processors import LogitsProcessor
from edgespec.errors import ClosedError, OptionError, TemplateError
from edgespec.memory import MemoryPlan, resident_bytes
from edgespec.memory.budget import DEFAULT_RESERVE_BYTES
from edgespec.memory.prefix_cache import PrefixCache, PrefixCacheUsage
from edgespec.memory.use import MemoryUse
from edgespec.methods import DrafterSet, LoadedHead
from edgespec.options import ReplyArguments
from edgespec.reply import MethodReport, Reply
from edgespec.reply_options import CONSTRAINT_NAMES, REPLY_OPTIONS
from edgespec.request import StreamArguments, build_request, check_options, defaults_for
from edgespec.session import Session
from edgespec.session_pool import Place, SessionPool
from edgespec.stream import ReplyStream

__all__ = ["Runtime"]


_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"method": "auto", "draft_length": None, "acceptance": "invariant"}
)
_NO_TOOLS = ToolSet()


class Runtime:
    """A loaded target model with its drafters. Created by `edgespec.load`.

    A runtime generates up to `parallel` replies at a time, each in its caller's thread. A further one raises
    BusyError. To serve several callers, use a `RequestQueue`. `cancel` and `close` can be called from any
    thread.

    Attributes:
        vocabulary: The target's tokenizer.
        method: The default drafting method.
        plan: The memory plan that was made before loading.

    Args:
        more_places: What further replies that are generated at the same time use.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None,
        drafters: DrafterSet,
        *,
        defaults: Mapping[str, Any] = _DEFAULTS,
        costs: TargetCosts | None = None,
        notice: str = "",
        plan: MemoryPlan | None = None,
        prefix_cache: PrefixCache | None = None,
        record: AcceptanceRecorder | None = None,
        mapped: MappedFiles | None = None,
        unadapted_acceptance: float | None = None,
        more_places: Sequence[Place] = (),
    ) -> None:
        self._target, self._draft, self._notice = target, draft, notice
        self.vocabulary: Vocabulary = target.vocabulary
        self._template: ChatTemplate | None = None
        if template := self.vocabulary.chat_template:
            self._template = ChatTemplate(template, self.vocabulary.bos_text, self.vocabulary.eos_text)
        self.method: MethodReport = drafters.choose(defaults["method"])[1]
        self.plan: MemoryPlan | None = plan
        self._record = record
        self._mapped = mapped
        self._defaults = defaults
        self._costs = costs or TargetCosts(target, LoadOptions())
        reserve_bytes = plan.budget.reserve_bytes if plan else DEFAULT_RESERVE_BYTES
        self._session = Session(target, drafters, prefix_cache, draft, reserve_bytes, unadapted_acceptance)
        others = [
            Session(
                place.target,
                place.drafters,
                prefix_cache and prefix_cache.for_model(place.target),
                place.draft,
                reserve_bytes,
                unadapted_acceptance,
                self._session.target_step_seconds,
            )
            for place in more_places
        ]
        self._sessions = SessionPool([self._session, *others])
        self._prompts: PromptBuilder | None = None
        # A `PromptBuilder` must not be used by several threads at once.
        self._prompts_lock = threading.RLock()
        self._constraints = ConstraintCompiler(self.vocabulary, target.facts.vocab_size)

    @property
    def parallel(self) -> int:
        """Number of replies that can be generated at once."""
        return len(self._sessions.sessions)

    @property
    def target(self) -> ModelFacts:
        """Properties of the target, including its current context and KV cache sizes."""
        facts = self._target.facts
        return replace(facts, notice=self._notice) if self._notice else facts

    @property
    def draft(self) -> ModelFacts | None:
        """Properties of the draft model, or None if there is none."""
        return self._draft.facts if self._draft else None

    @property
    def heads(self) -> tuple[LoadedHead, ...]:
        """The heads that draft for the target. Empty if there are none."""
        return tuple(self._session.drafters.heads)

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, or None if it has none."""
        return self._template

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the available drafters, which methods can combine, and also with `grammar`."""
        return self._session.drafters.names

    @property
    def context_tokens(self) -> int:
        """Maximum length of prompt and reply in tokens.

        The allocated context, `target.context_tokens`, can be smaller, and grows when needed.
        """
        return self._session.context.limit_tokens

    @property
    def loss_limits(self) -> tuple[float, float] | None:
        """Maximum slowdown that drafting may cause, compared with plain decoding. None if unlimited.

        With limits (r, n), a reply takes at most 1 + r times as long as with plain decoding, plus the time of
        n single-token passes.
        """
        return self._session.drafters.loss_limits

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
        _, values = check_options(self.target, self._with_defaults(options))
        self._session.drafters.check(values["method"], limited=values["max_loss"] is not None)
        if values["constraint"]:
            self._constraints.check(values["constraint"])

    def _with_defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: v for name, v in options.items() if v is not None or name not in self._defaults}
        return {**self._defaults, **given}

    def method_for(self, method: str) -> MethodReport:
        """Report which drafters a method uses with this target. Raises OptionError if one is unavailable."""
        return self._session.drafters.choose(method)[1]

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

    def measure_costs(self, progress: Progress | None = None) -> CostCurve:
        """Measure how long the target takes to verify several tokens at once, and save it for the next load.

        Before that, the target is set to the fastest number of CPU threads (see `thread_seconds`). The
        measurement takes about 12 seconds, or longer for a target that generates few tokens per second.

        Args:
            progress: Called when the measurement starts. Returning False cancels it.

        Raises:
            BusyError: A reply is running.
            CancelledError: `progress` returned False.
            ClosedError: The runtime was closed.
        """
        with self.borrowed_target():
            self._costs.choose_threads(progress, again=True)
            return self._costs.remeasure(progress, repeats=15, budget_seconds=10.0)

    @property
    def thread_seconds(self) -> Mapping[int, float]:
        """Duration of a target step in seconds for each number of CPU threads that was compared."""
        return self._costs.thread_seconds

    @property
    def costs_notice(self) -> str:
        """The reason why measured verify costs could not be saved on disk. Empty if there was no problem."""
        return self._costs.notice

    def memory_bytes(self) -> int:
        """Return the resident memory of this process in bytes."""
        return resident_bytes()

    def memory(self) -> MemoryUse:
        """Return the memory currently used by this runtime. Can be called from any thread."""
        models = [self.target, *([self.draft] if self.draft else [])]
        cache, pressure = self._session.prefix_cache, self._session.memory_pressure
        return MemoryUse(
            weight_bytes=sum(model.weight_bytes for model in models),
            kv_bytes=self.parallel * sum(model.kv_bytes for model in models),
            resident_bytes=resident_bytes(),
            prefix_cache=cache.usage() if cache else PrefixCacheUsage(),
            plan=self.plan,
            context_tokens=self.target.context_tokens,
            max_context_tokens=self.context_tokens,
            available_bytes=pressure.available(),
            reclaimed_bytes=pressure.reclaimed_bytes,
            last_reclaim=pressure.last_reclaim,
        )

    def cached_prefixes(self) -> Iterable[Sequence[int]]:
        """Return the token sequences in the prefix cache."""
        cache = self._session.prefix_cache
        return [tokens.tolist() for tokens in cache.sequences()] if cache else []

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
                one call. `{"type": "function", "function": {"name": NAME}}` makes it a call of that tool.
            reply_start: Text with which the reply begins, such as the start of an interrupted reply. The
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
        builder = self._prompt_builder()
        fitting = as_messages(messages), self.context_tokens, context_full
        tool_set = as_tool_set(tools, tool_choice)
        settings, progress = _template_settings(options, tool_set), options.get("progress")
        syntax = None
        if tool_set.definitions:
            form = builder.template.call_form
            syntax = CallSyntax(form, tool_set.schemas, f"call_{secrets.token_hex(8)}")
            if grammar := tool_grammar(form, tool_set, self.vocabulary):
                options = _with_grammar(options, grammar)
        with self._prompts_lock:
            prompt = (
                builder.build_continued(*fitting, reply_start, progress, settings)
                if reply_start
                else builder.build_fitting(*fitting, progress, settings)
            )

        def remember(reply: Reply | None) -> None:
            if reply and not self._session.closed:
                with self._prompts_lock:
                    builder.remember(prompt, reply.tokens)
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
        with self._prompts_lock:
            return self._prompt_builder().count_tokens(checked, self.context_tokens, settings)

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        truncate: bool = False,
        progress: Progress | None = None,
    ) -> list[Embedding]:
        """Return a vector for each text that represents its meaning, for example to search in documents.

        Models that were trained for embeddings, such as Qwen3-Embedding, give good vectors. Those of other
        models are the mean over all tokens, and are less useful. Only GGUF models can embed texts. The work
        takes the place of a reply.

        Args:
            texts: The texts, each as a string or as token ids.
            truncate: Whether to drop the end of texts that do not fit in the context.
            progress: Called as the texts are processed. Returning False cancels the work.

        Raises:
            BusyError: A reply is running.
            CancelledError: `progress` returned False.
            CapabilityError: The model cannot embed texts.
            ContextFullError: A text does not fit in the context.
            OptionError: A text is empty or invalid.
        """
        tokens = tokenize_texts(texts, self.vocabulary, self.target, self.context_tokens, truncate, progress)
        vectors = self._sessions.embed(tokens, progress) if tokens else []
        return [Embedding.of(vector, len(each)) for vector, each in zip(vectors, tokens, strict=True)]

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
        self._prompt_builder().template.compile()
        return Chat(self, system, messages, context_full)

    def _prompt_builder(self) -> PromptBuilder:
        if self._prompts is None:
            if self.template is None:
                raise TemplateError(
                    "this model has no chat template",
                    "choose an instruct model, or use `edgespec generate --raw`",
                )
            self._prompts = PromptBuilder(self.template, self.vocabulary, self.cached_prefixes)
        return self._prompts

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
        request = build_request(tokens, self.target, self.context_tokens, values, processors)
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

    def borrowed_target(self) -> AbstractContextManager[LanguageModel]:
        """Return a context manager that provides the target model with an empty KV cache.

        Use it for measurements. Replies raise BusyError until the `with` block ends.

        Raises:
            BusyError: A reply is running.
            ClosedError: The runtime was closed.
        """
        return self._sessions.borrowed_target()

    def clear_cache(self) -> None:
        """Clear the KV caches and the prefix cache, so that the next reply processes its whole prompt.

        Keeps trained drafters and measured costs. Raises BusyError or ClosedError.
        """
        self._sessions.clear_cache()

    def save_prefix_cache(self) -> None:
        """Save the prefix cache to disk if the runtime was loaded with an on-disk cache.

        The cache is also saved when the runtime is idle and when it is closed. Failures raise no error,
        because an unsaved prompt is simply processed again.
        """
        for session in self._sessions.sessions:
            session.save_prefix_cache()

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Run the idle work of the drafters, such as online training, in this thread.

        Idle work starts automatically once the runtime has been idle for a moment. A script that generates
        replies back to back can call this method between them. It returns when the work is done, when
        `should_continue()` returns False, or when a reply starts in another thread.
        """
        for session in self._sessions.sessions:
            session.run_idle_work(should_continue)

    def cancel(self) -> None:
        """Stop all replies in progress after the current target pass."""
        self._sessions.cancel()

    def close(self) -> None:
        """Stop the running replies and free the models. Further calls have no effect."""
        if self._template:
            self._template.close()
        self._sessions.close()
        if self._record:
            self._record.save()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
