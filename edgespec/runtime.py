"""The public `Runtime` class: a loaded target model that generates replies with its drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Unpack

from edgespec.backends.base import LanguageModel, LoadOptions, ModelFacts, Progress, Vocabulary
from edgespec.backends.mapped_files import MappedFiles
from edgespec.catalog.acceptance_history import AcceptanceRecorder
from edgespec.chat.message import Message, as_messages
from edgespec.chat.prompt import ContextFull, PromptBuilder, check_context_full
from edgespec.chat.template import ChatTemplate
from edgespec.conversation import Chat
from edgespec.costs.curve import CostCurve
from edgespec.costs.target_costs import TargetCosts
from edgespec.engine.stats import Stats
from edgespec.errors import ClosedError, OptionError, TemplateError
from edgespec.memory import MemoryPlan, resident_bytes
from edgespec.memory.budget import DEFAULT_RESERVE_BYTES
from edgespec.memory.prefix_cache import PrefixCache, PrefixCacheUsage
from edgespec.methods import DrafterSet
from edgespec.options import ReplyArguments
from edgespec.reply import MethodReport, Reply
from edgespec.request import MethodOptions, build_request
from edgespec.session import Session
from edgespec.stream import ReplyStream

__all__ = ["MemoryUse", "Runtime"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory currently used by a runtime.

    Attributes:
        weight_bytes: Size of the weights of target and draft model.
        kv_bytes: Current size of the KV caches of target and draft model.
        resident_bytes: Resident memory of the process, including the memory-mapped weights read so far.
        prefix_cache: Size and hits of the prefix cache.
        plan: The memory plan that was made before loading.
        context_tokens: Current size of the target's context.
        max_context_tokens: Maximum size to which the context may grow.
        available_bytes: Memory that other programs may still use.
        reclaimed_bytes: Total memory freed for other programs so far.
        last_reclaim: Description of the last time that memory was freed.
    """

    weight_bytes: int
    kv_bytes: int
    resident_bytes: int
    prefix_cache: PrefixCacheUsage
    plan: MemoryPlan | None = None
    context_tokens: int = 0
    max_context_tokens: int = 0
    available_bytes: int = 0
    reclaimed_bytes: int = 0
    last_reclaim: str = ""


_DEFAULTS = MethodOptions()


class Runtime:
    """A loaded target model with its drafters. Created by `edgespec.load`.

    A runtime generates one reply at a time and raises BusyError if asked for a second one. To serve several
    callers, use a `RequestQueue`. `cancel` and `close` may be called from any thread.

    Attributes:
        vocabulary: The target's tokenizer.
        method: The drafting method that is used by default.
        plan: The memory plan that was made before loading.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None,
        drafters: DrafterSet,
        *,
        defaults: MethodOptions = _DEFAULTS,
        costs: TargetCosts | None = None,
        notice: str = "",
        plan: MemoryPlan | None = None,
        prefix_cache: PrefixCache | None = None,
        record: AcceptanceRecorder | None = None,
        mapped: MappedFiles | None = None,
    ) -> None:
        vocabulary = target.vocabulary
        self._target, self._draft, self._notice = target, draft, notice
        self.vocabulary: Vocabulary = vocabulary
        self._template: ChatTemplate | TemplateError | None = None
        if vocabulary.chat_template:
            try:
                self._template = ChatTemplate(
                    vocabulary.chat_template, vocabulary.bos_text, vocabulary.eos_text
                )
            except TemplateError as error:
                # The model is usable without a chat template. Raise the error only when the template is
                # needed.
                self._template = error
        self.method: MethodReport = drafters.choose(defaults.method)[1]
        self.plan: MemoryPlan | None = plan
        self._record = record
        self._mapped = mapped
        self._defaults = defaults
        self._costs = costs or TargetCosts(target, LoadOptions())
        reserve_bytes = plan.budget.reserve_bytes if plan else DEFAULT_RESERVE_BYTES
        self._session = Session(target, drafters, prefix_cache, draft, reserve_bytes)
        self._prompts: PromptBuilder | None = None

    @property
    def target(self) -> ModelFacts:
        """Facts about the target, including the current size of its context and KV cache."""
        facts = self._target.facts
        return replace(facts, notice=self._notice) if self._notice else facts

    @property
    def draft(self) -> ModelFacts | None:
        """Facts about the draft model, or None if there is none."""
        return self._draft.facts if self._draft else None

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, or None if it has none. Raises TemplateError if it is broken."""
        if isinstance(self._template, TemplateError):
            raise self._template
        return self._template

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the available drafters, which methods may combine."""
        return self._session.drafters.names

    @property
    def context_tokens(self) -> int:
        """Maximum total length of prompt and reply, in tokens.

        The context starts smaller and grows as needed. `target.context_tokens` is its current size.
        """
        return self._session.context.limit_tokens

    @property
    def loss_limits(self) -> tuple[float, float] | None:
        """The loss limit: a share of the plain decoding time plus a number of target steps. May be None."""
        return self._session.drafters.loss_limits

    def method_for(self, method: str) -> MethodReport:
        """Return which drafters `method` uses with this target. Raises OptionError if it cannot be used."""
        return self._session.drafters.choose(method)[1]

    def measure_costs(self, progress: Progress | None = None) -> CostCurve:
        """Measure the cost of the target's verification passes and save the result for the next load.

        It takes at most 10 seconds, or 12 target steps if those take longer.

        Args:
            progress: Called when the measurement starts. Returning False cancels it.

        Raises:
            BusyError: A reply is running.
            CancelledError: `progress` returned False.
            ClosedError: The runtime was closed.
        """
        with self.borrowed_target():
            return self._costs.remeasure(progress, repeats=15, budget_seconds=10.0)

    @property
    def costs_notice(self) -> str:
        """The reason why measured costs could not be saved, or an empty string."""
        return self._costs.notice

    def memory_bytes(self) -> int:
        """Return the resident memory of this process in bytes."""
        return resident_bytes()

    def memory(self) -> MemoryUse:
        """Return the memory currently used by this runtime. May be called at any time from any thread."""
        drafts = self.draft
        cache = self._session.prefix_cache
        return MemoryUse(
            weight_bytes=self.target.weight_bytes + (drafts.weight_bytes if drafts else 0),
            kv_bytes=self._session.target.facts.kv_bytes + (drafts.kv_bytes if drafts else 0),
            resident_bytes=resident_bytes(),
            prefix_cache=cache.usage() if cache else PrefixCacheUsage(),
            plan=self.plan,
            context_tokens=self.target.context_tokens,
            max_context_tokens=self.context_tokens,
            available_bytes=self._session.memory_pressure.available(),
            reclaimed_bytes=self._session.memory_pressure.reclaimed_bytes,
            last_reclaim=self._session.memory_pressure.last_reclaim,
        )

    def cached_prefixes(self) -> Iterable[Sequence[int]]:
        """Return the token sequences in the prefix cache."""
        prefix_cache = self._session.prefix_cache
        return [tokens.tolist() for tokens in prefix_cache.sequences()] if prefix_cache else []

    def generate(
        self, prompt: str, *, system: str | None = None, raw: bool = False, **options: Unpack[ReplyArguments]
    ) -> Reply:
        """Generate the reply to one prompt.

        Args:
            prompt: The user's message. It is formatted with the chat template, unless `raw` is set or the
                model has no template.
            system: Instructions for the model.
            raw: Continue the prompt as it is, without the chat template.
            **options: See `edgespec.ReplyArguments`.

        Raises:
            BusyError: Another reply is running.
            ContextFullError: The prompt is longer than the context.
            OptionError: An option is unknown or its value is invalid.
            TemplateError: There is a system prompt but no chat template.
        """
        return self.stream(prompt, system=system, raw=raw, **options).wait()

    def stream(
        self, prompt: str, *, system: str | None = None, raw: bool = False, **options: Any
    ) -> ReplyStream:
        """Stream the reply to one prompt. Takes the arguments of `generate`."""
        if not isinstance(prompt, str):
            raise OptionError(f"the prompt is a {type(prompt).__name__}", "give a string")
        if raw or self.template is None:
            if system:
                raise TemplateError(
                    "a system prompt needs the model's chat template",
                    "leave --system out, or --raw, or use an instruct model",
                )
            return self.stream_tokens(self.vocabulary.tokenize(prompt, special=True, start=True), **options)
        messages = [Message("system", system)] if system else []
        built = PromptBuilder(self.template, self.vocabulary).build([*messages, Message("user", prompt)])
        return self.stream_tokens(built.tokens, **options)

    def reply(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        context_full: ContextFull = "slide",
        **options: Any,
    ) -> Reply:
        """Generate the reply to a list of messages. Takes the arguments of `stream_messages`."""
        return self.stream_messages(messages, context_full=context_full, **options).wait()

    def stream_messages(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        context_full: ContextFull = "slide",
        on_end: Callable[[Reply | None], None] | None = None,
        **options: Any,
    ) -> ReplyStream:
        """Stream the reply to a list of messages that contains the whole conversation.

        If the conversation continues an earlier one, its KV cache is reused. The caller need not keep
        anything between calls.

        Args:
            messages: `Message` objects, or dictionaries with `role` (`system`, `user` or `assistant`) and
                `content`. The last message is from the user.
            context_full: What to do if the conversation does not fit the context. `slide` drops its oldest
                turns, `refuse` raises ContextFullError.
            on_end: Called once with the reply, or with None if it failed.
            **options: Options of `stream_tokens`.

        Raises:
            ContextFullError: The conversation does not fit the context.
            OptionError: A message or an option is invalid.
            TemplateError: The model has no chat template, or the template rejects the messages.
        """
        builder = self._prompt_builder()
        prompt = builder.build_fitting(as_messages(messages), self.context_tokens, context_full)

        def remember(reply: Reply | None) -> None:
            if reply:
                builder.remember(prompt, reply.tokens)
            if on_end:
                on_end(reply)

        return self.stream_tokens(
            prompt.tokens, on_end=remember, dropped_messages=prompt.dropped_messages, **options
        )

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens in the prompt for these messages. Raises TemplateError."""
        return len(self._prompt_builder().build(messages).tokens)

    def chat(
        self, system: str | None = None, messages: Sequence[Message] = (), context_full: ContextFull = "slide"
    ) -> Chat:
        """Start or continue a conversation.

        Args:
            system: Instructions for the model.
            messages: Messages that the conversation begins with.
            context_full: What to do if the conversation does not fit the context. `slide` drops its oldest
                turns, `refuse` raises ContextFullError.

        Raises:
            OptionError: `context_full` has another value.
            TemplateError: The model has no chat template.
        """
        check_context_full(context_full)
        self._prompt_builder()  # This raises TemplateError if the model has no usable chat template.
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
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        method: str | None = None,
        draft_length: int | None = None,
        acceptance: str | None = None,
        on_end: Callable[[Reply | None], None] | None = None,
        progress: Progress | None = None,
        dropped_messages: int = 0,
        **sampling: Any,
    ) -> ReplyStream:
        """Stream the reply to a prompt given as token ids.

        Args:
            tokens: The prompt.
            max_tokens: Maximum length of the reply. Defaults to 8192 tokens, or to the rest of the context,
                if None.
            seed: Random seed. If None, one is chosen at random and reported in the reply.
            stop: Strings that end the reply.
            method: `auto`, `none`, or names of drafters joined by `+`.
            draft_length: Draft depth in tokens.
            acceptance: `invariant` or `rejection`.
            on_end: Called once with the reply, or with None if it failed.
            progress: Called during the prefill. Returning False cancels the reply.
            dropped_messages: Number to report as `ReplyStream.dropped_messages`.
            **sampling: Fields of `SamplingParams`, such as `temperature`.

        Raises:
            ClosedError: The runtime was closed.
            ContextFullError: The prompt is longer than the context.
            OptionError: An option is unknown or its value is invalid.
        """
        if self._session.closed:
            raise ClosedError("the runtime is closed", "load the model again")
        if self._mapped:
            self._mapped.check()
        method_options = self._defaults.override(method, draft_length, acceptance)
        report = self.method_for(method_options.method)
        request = build_request(
            tokens,
            self.target,
            method_options,
            context_tokens=self.context_tokens,
            max_tokens=max_tokens,
            seed=seed,
            stop=stop,
            sampling=sampling,
        )
        stats = Stats(target_step_seconds=self._session.target_step_seconds)
        return ReplyStream(
            self._session,
            request,
            self.target.name,
            self.draft.name if self.draft else None,
            report,
            stats,
            on_end=lambda reply: self._ended(reply, on_end),
            progress=progress,
            dropped_messages=dropped_messages,
        )

    def _ended(self, reply: Reply | None, on_end: Callable[[Reply | None], None] | None) -> None:
        """Add the outcome of a reply's first draft tokens to the acceptance record of this model pair."""
        if reply and self._record and reply.method.effective == "model" and reply.stats.drafted_tokens:
            stats = reply.stats
            self._record.count(stats.drafted_per_position[0], stats.accepted_per_position[0])
        if on_end:
            on_end(reply)

    def borrowed_target(self) -> AbstractContextManager[LanguageModel]:
        """Lend the target model, with an empty cache, for measurements. No reply can start in the meantime.

        Raises:
            BusyError: A reply is running.
            ClosedError: The runtime was closed.
        """
        return self._session.borrowed_target()

    def clear_cache(self) -> None:
        """Clear the KV caches and the prefix cache, so that the next reply processes its whole prompt.

        Trained drafters and measured costs are kept. Raises BusyError and ClosedError.
        """
        self._session.clear_cache()

    def save_prefix_cache(self) -> None:
        """Save the prefix cache to disk if the runtime was loaded with an on-disk cache.

        This also happens when the runtime is idle and when it closes. Failures raise no error: a prompt that
        could not be saved is simply processed again.
        """
        self._session.save_prefix_cache()

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Run the idle work of the drafters, such as online training, in this thread.

        Idle work starts automatically when the runtime has been idle for a moment. A script that generates
        replies without pauses can call this method between them. It returns when the work is done, when
        `should_continue()` returns False, or when a reply starts in another thread.
        """
        self._session.run_idle_work(should_continue)

    def cancel(self) -> None:
        """End the running reply after the current target pass."""
        self._session.cancel()

    def close(self) -> None:
        """Stop the running reply and free the models. May be called again."""
        self._session.close()
        if self._record:
            self._record.save()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
