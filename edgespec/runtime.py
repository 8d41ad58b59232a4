"""One target, its drafters and their memory, wired together: the public API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from edgespec.backends.base import LanguageModel, LoadOptions, ModelFacts, Progress, Vocabulary
from edgespec.backends.mapped_files import MappedFiles
from edgespec.catalog.acceptance_history import AcceptanceRecorder
from edgespec.chat.conversation import Chat, ContextFull
from edgespec.chat.message import Message
from edgespec.chat.prompt import PromptBuilder
from edgespec.chat.template import ChatTemplate
from edgespec.costs.curve import CostCurve
from edgespec.costs.target_costs import TargetCosts
from edgespec.engine.stats import Stats
from edgespec.errors import ClosedError, OptionError, TemplateError
from edgespec.memory import MemoryPlan, resident_bytes
from edgespec.memory.prefix_cache import PrefixCache, PrefixCacheUsage
from edgespec.methods import DrafterSet
from edgespec.reply import MethodReport, Reply
from edgespec.request import Defaults, make_request
from edgespec.session import Session
from edgespec.stream import ReplyStream

__all__ = ["MemoryUse", "Runtime"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a runtime takes, in bytes. kv_bytes: of the caches of target and draft, where they are now.

    resident_bytes: what the process holds, mapped weights included as far as they were read. plan: what was
    planned before anything was loaded. context_tokens: of the target's context as it is now, and most_ as it
    may become. available_bytes: what other programs may still take. reclaimed_bytes: what they were given
    back, all together; last_reclaim: what that was at last, in words.
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


_DEFAULTS = Defaults()


class Runtime:
    """A loaded target with its drafters. Made by `edgespec.load`.

    One reply at a time: another one raises BusyError. `cancel` may be called from any thread.
    `method` reports what runs by default; every reply reports its own. `plan` is what was planned to be in
    memory before anything was loaded.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None,
        drafters: DrafterSet,
        *,
        defaults: Defaults = _DEFAULTS,
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
                # The model can still be used without it: say so when the template is needed.
                self._template = error
        self.method: MethodReport = drafters.choose(defaults.method)[1]
        self.plan: MemoryPlan | None = plan
        self._record = record
        self._mapped = mapped
        self._defaults = defaults
        self._costs = costs or TargetCosts(target, LoadOptions())
        self._session = Session(target, drafters, prefix_cache, draft)

    @property
    def target(self) -> ModelFacts:
        """What is known about the target; its context and cache are as large as they are now."""
        facts = self._target.facts
        return replace(facts, notice=self._notice) if self._notice else facts

    @property
    def draft(self) -> ModelFacts | None:
        """The same of the draft model, None where there is none."""
        return self._draft.facts if self._draft else None

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, None when it has none. Raises TemplateError when it is broken."""
        if isinstance(self._template, TemplateError):
            raise self._template
        return self._template

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters a method may ask for."""
        return self._session.drafters.names

    def measure_costs(self, progress: Progress | None = None) -> CostCurve:
        """What verify passes of the target cost, measured thoroughly and kept for the next load.

        It takes ten seconds at most, or 12 plain steps where those are longer. progress: called when it
        begins; False cancels. Raises BusyError, CancelledError, ClosedError.
        """
        with self.borrowed_target():
            return self._costs.renew(progress, repeats=15, budget_seconds=10.0)

    @property
    def costs_notice(self) -> str:
        """What went wrong with keeping what passes cost; empty where it is kept."""
        return self._costs.notice

    def method_for(self, method: str) -> MethodReport:
        """What a method comes to with this target. Raises OptionError for one that cannot be used."""
        return self._session.drafters.choose(method)[1]

    @property
    def context_tokens(self) -> int:
        """How many tokens prompt and reply may have together.

        The context may be smaller still, as `target.context_tokens` tells: it grows when a text needs it.
        """
        return self._session.context.limit_tokens

    def memory_bytes(self) -> int:
        """The memory this process holds now."""
        return resident_bytes()

    def memory(self) -> MemoryUse:
        """What takes memory now, and what is kept of other texts than the last. May be asked at any time."""
        drafts = self.draft
        cache = self._session.prefix_cache
        return MemoryUse(
            weight_bytes=self.target.weight_bytes + (drafts.weight_bytes if drafts else 0),
            kv_bytes=self._session.target.facts.kv_bytes + (drafts.kv_bytes if drafts else 0),
            resident_bytes=resident_bytes(),
            prefix_cache=cache.use() if cache else PrefixCacheUsage(),
            plan=self.plan,
            context_tokens=self.target.context_tokens,
            max_context_tokens=self.context_tokens,
            available_bytes=self._session.memory_pressure.available(),
            reclaimed_bytes=self._session.memory_pressure.given_bytes,
            last_reclaim=self._session.memory_pressure.said,
        )

    def cached_prefixes(self) -> Iterable[Sequence[int]]:
        """The texts that are kept, as tokens: the very ones that were read and drawn."""
        cache = self._session.prefix_cache
        return [tokens.tolist() for tokens in cache.texts()] if cache else []

    def generate(self, prompt: str, *, system: str | None = None, raw: bool = False, **options: Any) -> Reply:
        """The whole reply to a prompt.

        prompt: rendered as a user message by the model's chat template unless `raw`, or unless the
        model has none. Options: max_tokens, seed, stop, method, draft_length, acceptance, and every field
        of SamplingParams. Raises OptionError for an unknown option, ContextFullError, BusyError.
        """
        stream = self.stream(prompt, system=system, raw=raw, **options)
        for _ in stream:
            pass
        return stream.reply

    def stream(
        self, prompt: str, *, system: str | None = None, raw: bool = False, **options: Any
    ) -> ReplyStream:
        """The reply to a prompt while it is written; options as for `generate`."""
        return self.stream_tokens(self._prompt_tokens(prompt, system, raw), **options)

    def _prompt_tokens(self, prompt: str, system: str | None, raw: bool) -> list[int]:
        if not isinstance(prompt, str):
            raise OptionError(f"the prompt is a {type(prompt).__name__}", "give a text")
        if system and (raw or self.template is None):
            raise TemplateError(
                "a system prompt needs the model's chat template",
                "leave --system out, or --raw, or use an instruct model",
            )
        if raw or self.template is None:
            return self.vocabulary.tokenize(prompt, special=True, start=True)
        messages = [Message("system", system)] if system else []
        return PromptBuilder(self.template, self.vocabulary).build([*messages, Message("user", prompt)])[1]

    def chat(
        self, system: str | None = None, messages: Sequence[Message] = (), context_full: ContextFull = "slide"
    ) -> Chat:
        """A conversation. Raises TemplateError when the model has no chat template."""
        return Chat(self, system, messages, context_full)

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
        **sampling: Any,
    ) -> ReplyStream:
        """The reply to a prompt of tokens.

        max_tokens: None ends it after 8,192, or with the context. seed: None draws one; the reply tells it.
        on_end: called once with the reply, or None when it failed. progress: of the prefill.
        """
        if self._session.closed:
            raise ClosedError("the runtime is closed", "load the model again")
        if self._mapped:
            self._mapped.check()
        how = self._defaults.but(method, draft_length, acceptance)
        report = self.method_for(how.method)
        request = make_request(
            tokens,
            self.target,
            how,
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
        )

    def _ended(self, reply: Reply | None, on_end: Callable[[Reply | None], None] | None) -> None:
        """A reply is over; what the draft model alone has guessed tells how good it is for this target."""
        if reply and self._record and reply.method.effective == "model" and reply.stats.drafted_tokens:
            stats = reply.stats
            self._record.count(stats.drafted_per_position[0], stats.accepted_per_position[0])
        if on_end:
            on_end(reply)

    def borrowed_target(self) -> AbstractContextManager[LanguageModel]:
        """The target itself, for measurements: no reply can start meanwhile, and its cache starts empty.

        Leave it before anything else is asked of the runtime. Raises BusyError, ClosedError.
        """
        return self._session.borrowed_target()

    def clear_cache(self) -> None:
        """Empty the caches: the next reply reads all of its prompt, as a first one does.

        What drafters have learnt and what was measured stays. Raises BusyError, ClosedError.
        """
        self._session.clear_cache()

    def save_prefix_cache(self) -> None:
        """Where texts are kept on disk, put there now what was read since.

        That happens by itself where nobody asks for a while, and at the end. Nothing is raised: what cannot
        be kept is read again.
        """
        self._session.save_prefix_cache()

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Let drafters that learn between replies use this time, in this thread.

        They do so by themselves where nobody asks for a while; a script whose replies follow one another at
        once can give them time here. It ends when they are done, when `should_continue()` returns False, or
        when another thread asks for a reply.
        """
        self._session.run_idle_work(should_continue)

    def cancel(self) -> None:
        """End the running reply within one round, from any thread."""
        self._session.cancel()

    def close(self) -> None:
        """Stop what runs and free the models. Closing again does nothing."""
        self._session.close()
        if self._record:
            self._record.keep()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
