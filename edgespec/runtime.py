"""The public `Runtime` class: a loaded target model and its drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from edgespec.backends.base import LanguageModel, LoadOptions, Progress
from edgespec.backends.mapped_files import MappedFiles
from edgespec.backends.model_facts import ModelFacts
from edgespec.catalog.acceptance_history import AcceptanceRecorder
from edgespec.costs.curve import CostCurve
from edgespec.costs.target_costs import TargetCosts
from edgespec.embedding import Embedding, tokenize_texts
from edgespec.memory import MemoryPlan, resident_bytes
from edgespec.memory.budget import DEFAULT_RESERVE_BYTES
from edgespec.memory.prefix_cache import PrefixCache, PrefixCacheUsage
from edgespec.memory.use import MemoryUse
from edgespec.methods import DrafterSet, LoadedHead
from edgespec.reply_methods import ReplyMethods
from edgespec.session import Session
from edgespec.session_pool import SessionModels, SessionPool

__all__ = ["Runtime"]


_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"method": "auto", "draft_length": None, "acceptance": "invariant"}
)


class Runtime(ReplyMethods):
    """A loaded target model with its drafters. Created by `edgespec.load`.

    A runtime generates up to `parallel` replies at a time, each in its caller's thread. Starting more raises
    BusyError. To serve several callers, use a `RequestQueue`. `cancel` and `close` can be called from any
    thread.

    Attributes:
        vocabulary: The target's tokenizer.
        method: The default drafting method.
        plan: The memory plan that was made before loading.

    Args:
        more_models: The models and drafters of each additional concurrent reply.
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
        more_models: Sequence[SessionModels] = (),
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
        super().__init__(SessionPool([first, *others]), defaults, record, mapped)

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
    def loss_limits(self) -> tuple[float, float] | None:
        """Maximum slowdown that drafting may cause, compared with plain decoding. None if unlimited.

        With limits (r, n), a reply takes at most 1 + r times as long as with plain decoding, plus the time of
        n single-token passes.
        """
        return self._session.drafters.loss_limits

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
        return self._session.cached_prefixes()

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
        occupies a session, as a reply does.

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
        replies back to back can call this method between them. This method returns when the work is done,
        when `should_continue()` returns False, or when a reply starts in another thread.
        """
        for session in self._sessions.sessions:
            session.run_idle_work(should_continue)

    def close(self) -> None:
        """Stop the running replies and free the models. Further calls have no effect."""
        self._prompts.close()
        self._sessions.close()
        if self._record:
            self._record.save()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
