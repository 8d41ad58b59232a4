"""One target, its drafters and their memory, wired together: the public API."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any

from edgespec.backends.base import LanguageModel, ModelFacts, Progress, Vocabulary
from edgespec.chat.conversation import Chat, ContextFull
from edgespec.chat.message import Message
from edgespec.chat.prompt import PromptBuilder
from edgespec.chat.template import ChatTemplate
from edgespec.checks import whole_number
from edgespec.engine.sampling import SamplingParams
from edgespec.engine.stats import Stats
from edgespec.errors import ClosedError, ContextFullError, OptionError, TemplateError
from edgespec.memory import resident_bytes
from edgespec.methods import Drafters
from edgespec.reply import MethodReport, Reply
from edgespec.session import Request, Session
from edgespec.stream import ReplyStream

__all__ = ["Runtime"]

DEFAULT_DRAFT_LENGTH = 4
MAX_DRAFT_LENGTH = 64
ACCEPTANCES = ("invariant", "rejection")
_NO_LIMIT = (1 << 63) - 1


class Runtime:
    """A loaded target with its drafters. Made by `edgespec.load`.

    One reply at a time: another one raises BusyError. `cancel` may be called from any thread.
    `method` reports what runs by default; every reply reports its own.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None,
        drafters: Drafters,
        *,
        method: str = "auto",
        draft_length: int | None = None,
        acceptance: str = "invariant",
        notice: str = "",
    ) -> None:
        vocabulary = target.vocabulary
        self.target: ModelFacts = replace(target.facts, notice=notice) if notice else target.facts
        self.draft: ModelFacts | None = draft.facts if draft else None
        self.vocabulary: Vocabulary = vocabulary
        self._template: ChatTemplate | TemplateError | None = None
        if vocabulary.chat_template:
            try:
                self._template = ChatTemplate(
                    vocabulary.chat_template, vocabulary.start_text, vocabulary.end_text
                )
            except TemplateError as error:
                # The model can still be used without it: say so when the template is needed.
                self._template = error
        self.method: MethodReport = drafters.choose(method)[1]
        self._draft_length = (
            DEFAULT_DRAFT_LENGTH if draft_length is None else _checked_draft_length(draft_length)
        )
        self._acceptance = _checked_acceptance(acceptance)
        self._session = Session(target, drafters)

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, None when it has none. Raises TemplateError when it is broken."""
        if isinstance(self._template, TemplateError):
            raise self._template
        return self._template

    @property
    def context_tokens(self) -> int:
        """How many tokens prompt and reply may have together."""
        return self.target.context_tokens

    def memory_bytes(self) -> int:
        """The memory this process holds now."""
        return resident_bytes()

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

        max_tokens: None goes on to the end of the context. seed: None draws one; the reply tells it.
        on_end: called once with the reply, or None when it failed. progress: of the prefill.
        """
        if self._session.closed:
            raise ClosedError("the runtime is closed", "load the model again")
        if not tokens:
            raise OptionError("the prompt is empty", "give at least one word")
        if len(tokens) > self.context_tokens:
            raise ContextFullError(
                f"the prompt is {len(tokens)} tokens long and the context holds {self.context_tokens}",
                f"shorten it or use --context {len(tokens) // 256 * 256 + 512}",
            )
        if max_tokens is not None:
            whole_number("max_tokens", max_tokens, 1, _NO_LIMIT)
        if seed is not None:
            whole_number("seed", seed, 0, _NO_LIMIT)
        foreign = [token for token in tokens if not 0 <= token < self.target.vocab_size]
        if foreign:
            raise OptionError(
                f"the prompt holds the token {foreign[0]} and the model has {self.target.vocab_size}",
                "use the tokens of this model's own vocabulary",
            )
        report = self.method if method is None else self._session.drafters.choose(method)[1]
        request = Request(
            tokens=tuple(tokens),
            params=_sampling_params(sampling),
            seed=secrets.randbits(32) if seed is None else seed,
            max_tokens=max_tokens or self.context_tokens,
            stop=_checked_stop(stop),
            method=report.requested,
            draft_length=_checked_draft_length(draft_length)
            if draft_length is not None
            else self._draft_length,
            acceptance=self._acceptance if acceptance is None else _checked_acceptance(acceptance),
        )
        stats = Stats(plain_step_seconds=self._session.plain_step_seconds)
        if self.draft:
            stats.draft_weight_bytes, stats.draft_kv_bytes = self.draft.weight_bytes, self.draft.kv_bytes
        return ReplyStream(
            self._session,
            request,
            self.target.name,
            self.draft.name if self.draft else None,
            report,
            stats,
            on_end=on_end,
            progress=progress,
        )

    def borrowed_target(self) -> AbstractContextManager[LanguageModel]:
        """The target itself, for measurements: no reply can start meanwhile, and its cache starts empty.

        Leave it before anything else is asked of the runtime. Raises BusyError, ClosedError.
        """
        return self._session.borrowed_target()

    def cancel(self) -> None:
        """End the running reply within one round, from any thread."""
        self._session.cancel()

    def close(self) -> None:
        """Stop what runs and free the models. Closing again does nothing."""
        self._session.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sampling_params(sampling: dict[str, Any]) -> SamplingParams:
    for name in sampling:
        if name not in SamplingParams.names():
            near = difflib.get_close_matches(name, SamplingParams.names(), 1)
            raise OptionError(
                f"option {name!r} is unknown",
                f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SamplingParams.names())}",
            )
    return SamplingParams(**sampling)


def _checked_stop(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
        raise OptionError(f"stop is {stop!r}", "give texts of at least one character")
    return tuple(stop)


def _checked_draft_length(value: int) -> int:
    return whole_number("draft_length", value, 1, MAX_DRAFT_LENGTH, ", or method none")


def _checked_acceptance(value: str) -> str:
    if value not in ACCEPTANCES:
        raise OptionError(f"acceptance is {value!r}", f"choose {' or '.join(ACCEPTANCES)}")
    return value
