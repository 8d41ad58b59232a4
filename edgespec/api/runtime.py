"""The public `Runtime` class: a loaded target model and its drafters."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NoReturn, Unpack, cast

from edgespec.api.conversation import Chat
from edgespec.api.embedding import Embedding, tokenize_texts
from edgespec.api.requests import MessagesPrompt, Prompt, Replies, ReplyRequest, TextPrompt, TokensPrompt
from edgespec.api.stream import ReplyStream
from edgespec.chat.message import Message, as_message
from edgespec.chat.prompt import ContextFull, PromptBuilder, build_single_prompt, check_context_full
from edgespec.chat.reasoning import opening_marker
from edgespec.chat.reply_text import ReplySplitter, stop_searches
from edgespec.chat.template import ChatTemplate, TemplateSettings, missing_template
from edgespec.chat.tool_calls.grammar import AnswerRule, arguments_grammar
from edgespec.chat.tool_calls.parser import CallSyntax
from edgespec.chat.tool_calls.tool_set import ToolChoice, ToolSet, as_tool_set
from edgespec.constraints.compiler import ConstraintCompiler
from edgespec.constraints.matcher import Constraint
from edgespec.decode.drafter_set import DrafterSet, ReplyKind
from edgespec.decode.reply import MethodReport, Reply, exactness_for
from edgespec.decode.request import (
    ReplySettings,
    Request,
    StreamArguments,
    check_prompt,
    checked_tokens,
    default_max_tokens,
)
from edgespec.decode.session import Session, SessionModels, SessionPool, check_process
from edgespec.engine.processors import MinTokens
from edgespec.errors import CapabilityError, ClosedError, ContextFullError, OptionError, TemplateError
from edgespec.memory.budget import resident_bytes
from edgespec.memory.constants import DEFAULT_RESERVE_BYTES
from edgespec.memory.plan import MemoryPlan, MemoryUse
from edgespec.memory.prefix_cache.cache import PrefixCache, PrefixCacheUsage
from edgespec.methods.base import LoadedHead
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.target_costs import TargetCosts
from edgespec.model.base import LanguageModel, LoadOptions, Progress, Vocabulary
from edgespec.model.image import Image
from edgespec.model.image_tokens import PreparedImage, text_tokens
from edgespec.model.model_facts import Exactness, ModelFacts
from edgespec.options.reply_options import REPLY_OPTIONS
from edgespec.options.settings import ReplyArguments
from edgespec.store.installed import RecommendedSetting
from edgespec.store.speedup_estimate import AcceptanceRecorder
from edgespec.system.files import MappedFiles

__all__ = ["Runtime"]

_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"method": "auto", "draft_length": None, "acceptance": "invariant"}
)


class Runtime(Replies[ReplyStream]):
    """A loaded target model with its drafters. Created by `edgespec.load`.

    A runtime generates up to `parallel` replies at a time, each in its caller's thread. Starting more
    raises BusyError. To serve several callers, use a `RequestQueue`. `cancel` and `close` can be called
    from any thread. A child process created with `os.fork` cannot use its parent's runtime: methods
    that use the models raise EdgespecError there.

    Attributes:
        vocabulary: The target's tokenizer.
        method: The default drafting method.
        plan: The memory plan that was made before loading.
        recommended_sampling: Sampling settings recommended by the target's makers, with their sources.
            Replies use them by default.

    Args:
        defaults: Default values of reply options, including `method`.
        recommended: See `recommended_sampling`.
        prefix_cache: Caches the KV segments of prompts. If None, nothing is cached.
        record: Records the draft model's acceptance rate. If None, nothing is recorded.
        mapped: The models' memory-mapped files, which must not change during a reply.
        more_models: The models and drafters for each additional concurrent reply.
        other_template: Whether Ollama has its own template for the target, in a format that edgespec
            cannot use.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None,
        drafters: DrafterSet,
        *,
        defaults: Mapping[str, Any] = _DEFAULTS,
        recommended: Mapping[str, RecommendedSetting] = MappingProxyType({}),
        costs: TargetCosts | None = None,
        notice: str = "",
        plan: MemoryPlan | None = None,
        prefix_cache: PrefixCache | None = None,
        record: AcceptanceRecorder | None = None,
        mapped: MappedFiles | None = None,
        unadapted_acceptance: float | None = None,
        more_models: Sequence[SessionModels] = (),
        other_template: bool = False,
    ) -> None:
        self._target, self._draft, self._notice = target, draft, notice
        self.plan: MemoryPlan | None = plan
        self._costs = costs or TargetCosts(target, LoadOptions())
        reserve_bytes = plan.budget.reserve_bytes if plan else DEFAULT_RESERVE_BYTES
        first = Session(target, drafters, prefix_cache, draft, reserve_bytes, unadapted_acceptance)
        others = [
            Session(
                models.target,
                models.drafters,
                prefix_cache
                and prefix_cache.for_model(models.target, [head.state for head in models.drafters.heads]),
                models.draft,
                reserve_bytes,
                unadapted_acceptance,
                first.target_step_seconds,
            )
            for models in more_models
        ]
        self._sessions, self._session = SessionPool([first, *others]), first
        self.recommended_sampling: Mapping[str, RecommendedSetting] = recommended
        self._defaults = {name: setting.value for name, setting in recommended.items()} | dict(defaults)
        self._default_settings = ReplySettings.defaults(target.facts, self._defaults)
        self._record, self._mapped = record, mapped
        self.vocabulary: Vocabulary = target.vocabulary
        self.method: MethodReport = first.drafters.resolve(defaults["method"]).report
        source, vocabulary = self.vocabulary.chat_template, self.vocabulary
        # Builds the prompts of conversations. None if the model has no chat template.
        self._prompts: PromptBuilder | None = None
        self._other_template = other_template
        if source:
            template = ChatTemplate(source, vocabulary.bos_text, vocabulary.eos_text)
            self._prompts = PromptBuilder(template, vocabulary, first.cached_prefixes, target.prepare_image)
        self._constraints = ConstraintCompiler(self.vocabulary, target.facts.vocab_size)

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
        """The heads that draft for the target, if any."""
        return tuple(self._session.drafters.heads)

    @property
    def loss_limits(self) -> tuple[float, float] | None:
        """Maximum slowdown that drafting may cause, compared with plain decoding, or None if unlimited.

        With limits (r, n), a reply takes at most 1 + r times as long as with plain decoding, plus the time
        of n single-token passes.
        """
        return self._session.drafters.loss_limits

    @property
    def pass_costs(self) -> Mapping[int, float]:
        """Durations of target passes of 2, 4 and 8 tokens, relative to a single-token pass.

        Widths that the target does not support are left out. Empty if `auto` cannot draft, so that nothing
        was measured.
        """
        costs = self._session.drafters.live_costs
        max_width = self._target.facts.capabilities.max_width
        return {width: costs.curve.v(width) for width in (2, 4, 8) if width <= max_width} if costs else {}

    @property
    def parallel(self) -> int:
        """Number of replies that can be generated concurrently."""
        return len(self._sessions.sessions)

    @property
    def context_tokens(self) -> int:
        """Maximum combined length of prompt and reply, in tokens.

        The allocated context, `target.context_tokens`, can be smaller, and grows when needed.
        """
        return self._session.context.limit_tokens

    @cached_property
    def _end_tokens(self) -> list[int]:
        size = self._session.target.facts.vocab_size
        return [token for token in range(size) if self.vocabulary.is_end(token)]

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, or None if it has none."""
        return self._prompts.template if self._prompts else None

    @property
    def why_no_template(self) -> str:
        """Why the model cannot reply to messages and what to do, or empty if it has a chat template."""
        return "" if self._prompts else str(self._missing_template())

    def _missing_template(self) -> TemplateError:
        return missing_template(self._target.facts.name, other_template=self._other_template)

    def _prompt_builder(self) -> PromptBuilder:
        """Return the builder of conversations' prompts. Raises TemplateError without a chat template."""
        if self._prompts is None:
            raise self._missing_template()
        return self._prompts

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the available drafters. A method can combine several of them, such as `model+suffix`."""
        return self._session.drafters.names

    def check_options(self, **options: Unpack[StreamArguments]) -> None:
        """Check the options of a reply without starting it. See `stream_tokens` for the arguments.

        Raises:
            OptionError: An option is unknown, or its value is invalid.
        """
        self.check_constraint(self.checked_request(TokensPrompt((), ""), options))

    def check_template(self) -> None:
        """Check that the model has a working chat template. Raises TemplateError otherwise."""
        self._prompt_builder().template.compile()

    def has_thinking_switch(self) -> bool:
        """Return whether the chat template has an option that turns reasoning on or off.

        Raises:
            TemplateError: The template is broken.
        """
        return self.template is not None and self.template.has_thinking_switch()

    def check_constraint(self, request: ReplyRequest) -> None:
        """Compile the constraint of a reply. Raises OptionError if it is invalid or no text satisfies it."""
        if request.settings.constraint:
            self._constraints.check(request.settings.constraint)

    def method_for(self, method: str) -> MethodReport:
        """Report which drafters a method uses with this target. Raises OptionError if one is unavailable."""
        return self._session.drafters.resolve(method).report

    def exactness_for(
        self, *, acceptance: str | None = None, temperature: float | None = None
    ) -> Exactness | None:
        """Report whether replies with these settings are identical to those of plain decoding, and why.

        Args:
            acceptance: The acceptance rule. Defaults to the one passed to `load`.
            temperature: The temperature. Defaults to the one recommended for the target.
        """
        defaults = self._default_settings
        return exactness_for(
            self._session.target.facts.exactness,
            acceptance=defaults.acceptance if acceptance is None else acceptance,
            temperature=defaults.params.temperature if temperature is None else temperature,
        )

    def reply_defaults(self, method: str | None = None) -> ReplyArguments:
        """Return default values for the reply options whose defaults depend on the loaded models.

        Args:
            method: The reply's method, which determines `draft_length`. Defaults to the method passed to
                `load`.

        Returns:
            `method`, `acceptance`, `max_tokens`, `draft_length` (0 if the method drafts nothing), and the
            sampling settings recommended for the target, such as `temperature`.

        Raises:
            OptionError: The method is unknown or unavailable.
        """
        defaults = self._default_settings
        drafters = self._session.drafters
        resolved = drafters.resolve(defaults.method if method is None else method)
        chooses_length = drafters.chooses_length(resolved)
        sampling = {name: getattr(defaults.params, name) for name in self.recommended_sampling}
        return ReplyArguments(
            **cast(ReplyArguments, sampling),
            method=resolved.report.requested,
            acceptance=defaults.acceptance,
            max_tokens=default_max_tokens(self.context_tokens),
            draft_length=0 if chooses_length is None else defaults.max_draft_length(chooses_length),
        )

    def checked_request(
        self, prompt: Prompt, options: StreamArguments, on_end: Callable[[Reply | None], None] | None = None
    ) -> ReplyRequest:
        check_process(self._session.process_id)
        values: dict[str, Any] = {**options}
        progress, processors = values.pop("progress", None), values.pop("processors", ())
        prompt_logprobs = values.pop("prompt_logprobs", None)
        given = {name: v for name, v in values.items() if v is not None or name not in self._defaults}
        settings = self._default_settings.with_options(
            given, self._session.target.facts, self.context_tokens, prompt_logprobs
        )
        # Check the method now. The prompt and its tools also affect which drafters it uses.
        self._session.drafters.resolve(settings.method, ReplyKind(limited=settings.max_loss is not None))
        return ReplyRequest(prompt, settings, progress, tuple(processors), on_end)

    def submit(self, request: ReplyRequest) -> ReplyStream:
        try:
            match request.prompt:
                case TextPrompt() as prompt:
                    return self._stream_text(request, prompt)
                case MessagesPrompt() as prompt:
                    return self._stream_messages(request, prompt)
                case TokensPrompt() as prompt:
                    tokens = checked_tokens(prompt.tokens, self._session.target.facts)
                    return self._stream(request, tokens, prompt.reply_start, whole_text=True)
        except ContextFullError as error:
            if error.wanted_tokens is not None:
                advice = self._context_advice(error.prompt_tokens or 0, error.wanted_tokens)
                first, _, _ = error.next_step.partition(f" or use --context {error.wanted_tokens}")
                error.next_step = (first if advice.startswith(" or") else first.rstrip(",")) + advice
                error.args = (f"{error.what}; {error.next_step}",)
            raise

    def _context_advice(self, prompt_tokens: int, wanted_tokens: int) -> str:
        """Return the end of the advice for a prompt that does not fit: the context to use instead, if any."""
        trained = self._target.facts.trained_context_tokens
        if 0 < trained <= prompt_tokens:
            return f"; the model was trained for at most {trained:,} tokens"
        tokens = min(wanted_tokens, trained or wanted_tokens)
        if self.plan is not None and not self.plan.has_room_for_context(tokens):
            return f", or raise --memory and use --context {tokens}"
        return f" or use --context {tokens}"

    def _stream_text(self, request: ReplyRequest, prompt: TextPrompt) -> ReplyStream:
        built = build_single_prompt(
            self.vocabulary,
            None if prompt.raw else self.template,
            prompt.text,
            prompt.system,
            self.context_tokens,
            request.progress,
            TemplateSettings(thinking=request.settings.thinking),
            prompt.images,
            self._session.target.prepare_image,
        )
        return self._stream(
            request, built.tokens, opening_marker(built.text), whole_text=prompt.raw, images=built.images
        )

    def _stream_messages(self, request: ReplyRequest, prompt: MessagesPrompt) -> ReplyStream:
        settings, tools, on_end = request.settings, prompt.tools, request.on_end
        prompts = self._prompt_builder()

        def remember(reply: Reply | None) -> None:
            if reply and not self._session.is_closing:
                prompts.remember(built, reply.tokens)
            if on_end:
                on_end(reply)

        answer = None
        if tools.definitions and settings.constraint:
            answer = self._answer_rule(tools, settings.constraint)
        try:
            built = prompts.build_reply(
                prompt.messages,
                self.context_tokens,
                prompt.context_full,
                tools,
                TemplateSettings(tools.definitions, settings.thinking),
                prompt.reply_start,
                request.progress,
                answer,
            )
            if built.grammar:
                settings = replace(settings, constraint=Constraint("grammar", built.grammar))
            stream = self._stream(
                replace(request, settings=settings, on_end=remember),
                built.tokens,
                built.reply_start or opening_marker(built.text),
                built.syntax,
                calls_tool=bool(built.grammar and not answer),
                images=built.images,
            )
        except OptionError as error:
            if named := self._tool_error(error, tools, answer):
                raise named from None
            raise
        stream.dropped_messages = built.dropped_messages
        return stream

    def _answer_rule(self, tools: ToolSet, constraint: Constraint) -> AnswerRule:
        """Return the answer constraint for a reply that may be a tool call instead.

        Raises OptionError if the constraint is invalid, or if the reply must be a tool call.
        """
        if tools.required:
            raise OptionError(
                f"{constraint.option} cannot be used together with a tool_choice that requires a call",
                f"remove {constraint.option}, or use tool_choice `auto` or `none`",
                code="option_conflict",
            )
        return self._constraints.answer_rule(constraint)

    def _tool_error(
        self, error: OptionError, tools: ToolSet, answer: AnswerRule | None
    ) -> OptionError | None:
        """Return an error that names the tool whose schema caused a grammar error, or None if no tool did."""
        has_grammar = tools.required or tools.strict or answer
        for name, schema in tools.schemas.items() if has_grammar else ():
            if reason := self._refusal(schema, lenient=not tools.strict):
                return OptionError(
                    f"the parameters of the tool {name} cannot be enforced: {reason}",
                    error.next_step,
                    code="constraint_not_supported",
                )
        return None

    def _refusal(self, schema: Mapping[str, Any], *, lenient: bool) -> str:
        """Return why a tool's argument schema cannot be enforced, or an empty string if it can be."""
        try:
            self._constraints.check(Constraint("grammar", arguments_grammar(schema, lenient=lenient)))
        except OptionError as error:
            reason = error.what
        else:
            return ""
        try:
            # Prefer the error message for the schema itself, which is clearer and says where the problem is.
            self._constraints.check(Constraint("schema", json.dumps(schema)))
        except OptionError as error:
            reason = error.what
        return reason

    def count_tokens(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        thinking: str = "auto",
    ) -> int:
        """Return the number of tokens in the prompt. See `stream_messages` for the arguments.

        The number is approximate if it exceeds the context size. Raises OptionError or TemplateError.
        """
        check_process(self._session.process_id)
        checked = [as_message(number, message) for number, message in enumerate(messages, 1)]
        settings = TemplateSettings(
            as_tool_set(tools, tool_choice).definitions,
            REPLY_OPTIONS["thinking"].check("thinking", thinking),
        )
        return self._prompt_builder().count_tokens(checked, self.context_tokens, settings)

    def image_tokens(self, image: Image) -> int:
        """Return the number of prompt tokens that an image takes up.

        Raises:
            AttachmentError: The target cannot use this image.
            CapabilityError: The target cannot see images.
        """
        return len(self._session.target.prepare_image(image).tokens)

    def chat(
        self, system: str | None = None, messages: Sequence[Message] = (), context_full: ContextFull = "slide"
    ) -> Chat:
        """Start or continue a conversation.

        Args:
            system: Instructions for the model.
            messages: Initial messages of the conversation.
            context_full: What to do if the conversation does not fit in the context. `slide` drops its
                oldest turns, and `refuse` raises ContextFullError.

        Raises:
            OptionError: `context_full` has another value.
            TemplateError: The model has no chat template, or a broken one.
        """
        check_process(self._session.process_id)
        check_context_full(context_full)
        self.check_template()
        return Chat(self, system, messages, context_full)

    def _stream(
        self,
        request: ReplyRequest,
        tokens: Sequence[int],
        reply_start: str,
        syntax: CallSyntax | None = None,
        *,
        whole_text: bool = False,
        calls_tool: bool = False,
        images: tuple[PreparedImage, ...] = (),
    ) -> ReplyStream:
        """Stream the reply to a prompt.

        Args:
            request: The request.
            tokens: The prompt's tokens.
            reply_start: Text at the end of the prompt that belongs to the reply.
            syntax: The format in which the model writes tool calls, or None without tools.
            whole_text: Whether stop strings apply to the whole text rather than only to the answer.
            calls_tool: Whether the constraint is a grammar for tool calls.
            images: The images in the prompt.
        """
        if self._session.is_closing:
            raise ClosedError("the model is closed", "load the model again")
        if self._mapped:
            self._mapped.check()
        settings, processors = request.settings, request.processors
        check_prompt(tokens, self.context_tokens, images)
        if images and settings.prompt_logprobs is not None:
            raise OptionError(
                "cannot compute the log-probabilities of a prompt that contains images",
                "leave prompt_logprobs out, or remove the images",
                code="option_conflict",
            )
        if settings.min_tokens:
            processors = (*processors, MinTokens(self._end_tokens, settings.min_tokens))
        constraint = None
        if settings.constraint:
            constraint = self._constraints.processor(
                settings.constraint,
                text_tokens(tokens) if images else tokens,
                reply_start,
                text_may_precede=calls_tool,
            )
            processors = (constraint, *processors)
        # With a constraint, stop strings apply only to the answer, as the constraint itself does.
        splits = constraint is not None or not whole_text
        searches = stop_searches(
            settings.stop,
            partial(ReplySplitter, reply_start, syntax) if splits else None,
            constraint.may_end if constraint else None,
            single_call=syntax is not None and syntax.single,
        )

        def record(reply: Reply | None) -> None:
            # Count the drafts whose first token was accepted, to measure this model pair's acceptance rate.
            if reply and self._record and reply.method.effective == "model" and reply.stats.drafted_tokens:
                stats = reply.stats
                self._record.count(stats.drafted_per_position[0], stats.accepted_per_position[0])
            if request.on_end:
                request.on_end(reply)

        kind = ReplyKind(settings.constraint is not None, settings.max_loss is not None, bool(images))
        method = self._session.drafters.resolve(settings.method, kind)
        return ReplyStream(
            self._sessions,
            Request(tuple(tokens), settings, method, processors, images),
            record,
            request.progress,
            reply_start,
            syntax,
            searches,
        )

    def cancel(self) -> None:
        """Stop all replies in progress after the current target pass."""
        self._sessions.cancel()

    def measure_costs(self, progress: Progress | None = None) -> CostCurve:
        """Measure the target's verify costs for several pass widths, and save them for the next load.

        This first switches the target to the fastest number of CPU threads (see `thread_seconds`). The
        measurement takes about 12 seconds, or longer for a slow target.

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
        """Duration of a target step in seconds, for each CPU thread count that was tested."""
        return self._costs.thread_seconds

    @property
    def costs_notice(self) -> str:
        """Why measured verify costs could not be saved, or empty if there was no problem."""
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
        return self._session.cached_prefixes()

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        truncate: bool = False,
        progress: Progress | None = None,
    ) -> list[Embedding]:
        """Return an embedding for each text: a vector that represents its meaning, for example for search.

        Models trained for embeddings, such as Qwen3-Embedding, give good vectors. For other models, the
        vectors are averages over all tokens, which are less useful. Only GGUF models can embed texts. Like a
        reply, embedding occupies a session.

        Args:
            texts: The texts, as strings or token ids.
            truncate: Whether to drop the end of texts that do not fit in the context.
            progress: Called as the texts are processed. Returning False cancels the call.

        Raises:
            BusyError: A reply is running.
            CancelledError: `progress` returned False.
            CapabilityError: The model cannot embed texts.
            ContextFullError: A text does not fit in the context.
            OptionError: A text is empty or invalid.
        """
        check_process(self._session.process_id)
        tokens = tokenize_texts(texts, self.vocabulary, self.target, self.context_tokens, truncate, progress)
        vectors = self._sessions.embed(tokens, progress) if tokens else []
        return [Embedding.of(vector, len(each)) for vector, each in zip(vectors, tokens, strict=True)]

    @contextmanager
    def borrowed_target(self) -> Iterator[LanguageModel]:
        """Return a context manager that provides the target model with an empty KV cache.

        Use it for measurements. Replies raise BusyError until the `with` block ends.

        Raises:
            BusyError: A reply is running.
            ClosedError: The runtime was closed.
        """
        with self._sessions.borrowed_targets() as targets:
            yield targets[0]

    def borrowed_targets(self) -> AbstractContextManager[Sequence[LanguageModel]]:
        """Return a context manager that provides the target models of all concurrent replies.

        The models share one context and its forward passes. See `borrowed_target`.
        """
        return self._sessions.borrowed_targets()

    def clear_cache(self) -> None:
        """Clear the KV caches and the prefix cache, so that the next reply processes its whole prompt.

        Trained drafters and measured costs are kept. Raises BusyError or ClosedError.
        """
        self._sessions.clear_cache()

    def save_prefix_cache(self) -> None:
        """Save the prefix cache to disk if the runtime was loaded with an on-disk cache.

        The cache is also saved when the runtime is idle and when it is closed. A failed save raises no error,
        because unsaved prompts are simply processed again.
        """
        for session in self._sessions.sessions:
            session.save_prefix_cache()

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Run the idle work of the drafters, such as online training, in this thread.

        Idle work starts automatically once the runtime has been idle for a moment. A script that generates
        replies back to back can call this method between them. This method returns when the work is done,
        when `should_continue()` returns False, or when a reply starts in another thread.
        """
        for session in self._sessions.sessions:
            session.run_idle_work(should_continue)

    def close(self) -> None:
        """Stop the running replies and free the models. Further calls have no effect.

        In a forked child process, this has no effect at all, because the models belong to the parent.
        """
        if os.getpid() != self._session.process_id:
            return
        if self._prompts:
            self._prompts.template.close()
        self._sessions.close()
        if self._record:
            self._record.save()

    def __reduce__(self) -> NoReturn:
        """Raise an error, because a runtime cannot be pickled or copied."""
        raise CapabilityError(
            "a loaded model cannot be copied, saved or passed to another process",
            "load the model where it is needed, or share it between processes with `edgespec serve`",
        )

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
