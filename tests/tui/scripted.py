"""A scripted runtime: it emits words at a set pace, fails or stalls, and reports fixed numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from edgespec import (
    Capabilities,
    Exactness,
    MemoryPlan,
    MemoryUse,
    MethodReport,
    ModelFacts,
    PrefixCacheUsage,
    Reply,
    Runtime,
    Stats,
    TextChunk,
)
from edgespec.chat.message import Message
from edgespec.chat.reasoning import ReasoningSplitter, split_reasoning
from edgespec.chat.template import ChatTemplate
from edgespec.decode.reply import exactness_for
from edgespec.decode.request import default_max_tokens
from edgespec.errors import CancelledError, OptionError
from edgespec.methods.base import LoadedHead
from edgespec.options.methods import parse_method
from edgespec.options.settings import ReplyArguments
from edgespec.store.catalogue import models_folder
from edgespec.store.download import Progress
from edgespec.store.installed import RecommendedSetting
from edgespec.tui.worker import Load

METHOD = MethodReport("auto", "model+suffix", "guesses while that pays")
LIVE = replace(METHOD, reason="guesses pay here", gain=0.617, gain_uncertainty=0.081)

MARKDOWN = (
    "Use `ls` to list files by size:\n\n"
    "```sh\nls -lS --human-readable\n```\n\n"
    "- `-S` sorts by size, largest first\n"
    "- `--human-readable` prints 1.5K, 2.3M\n\n"
    "Reverse the order with **`-r`**."
)

# A long reply. The chat would stop one that only repeats a word.
LONG_TEXT = "word " * 20 + "".join(f"word{number} " for number in range(2000))


def facts(name: str, *, notice: str = "") -> ModelFacts:
    """Facts of a made-up model."""
    return ModelFacts(
        name=name,
        path=str(models_folder() / f"{name}.gguf"),
        architecture="llama",
        description="llama 11M Q8_0",
        parameters=11_540_736,
        file_bytes=12_551_392,
        weight_bytes=12_551_392,
        kv_bytes=6_291_456,
        quantisation="Q8_0",
        trained_context_tokens=1024,
        context_tokens=1024,
        vocab_size=8192,
        chat_template=True,
        capabilities=Capabilities(rollback=True, tree=True),
        notice=notice,
    )


@dataclass
class Script:
    """The script of one reply: its text, its pace, and an error after some chunks."""

    text: str = MARKDOWN
    pause_seconds: float = 0.0
    error: BaseException | None = None
    error_after: int = 0
    dropped: int = 0
    gate: threading.Event | None = None
    ignores_cancel: bool = False
    busy_passes: int = 0


def made_up_stats(chunks: int) -> Stats:
    """Return fixed numbers, so that screenshots can be compared."""
    return Stats(
        prompt_tokens=48,
        cached_prompt_tokens=12,
        generated_tokens=chunks,
        target_passes=max(1, chunks // 3),
        drafted_tokens=40,
        accepted_tokens=29,
        drafted_per_position=[12, 11, 10, 7],
        accepted_per_position=[11, 9, 6, 3],
        draft_seconds=0.031,
        verify_seconds=0.128,
        rollback_seconds=0.0021,
        sampling_seconds=0.0093,
        overhead_seconds=0.0048,
        prefill_seconds=0.024,
        ttft_seconds=0.031,
        target_step_seconds=0.0081,
        ledger_credit_seconds=0.1,
        worst_case_loss=0.087,
        draft_weight_bytes=2_801_952,
        draft_kv_bytes=589_824,
        draft_other_bytes=52_000,
        peak_memory_bytes=141_000_000,
    )


class ScriptedStream:
    """The script's words as chunks, of which every third one is the target's own."""

    def __init__(self, script: Script, prompt_tokens: int, reply_start: str) -> None:
        self.script = script
        self.stats = Stats()
        self.method = LIVE
        self.prompt_tokens = prompt_tokens
        self.dropped_messages = script.dropped
        self.reply_start = reply_start
        self._cancelled = threading.Event()
        self._reply: Reply | None = None

    @property
    def reply(self) -> Reply:
        assert self._reply is not None
        return self._reply

    def cancel(self) -> None:
        self._cancelled.set()

    def __iter__(self) -> Iterator[TextChunk]:
        script = self.script
        words = script.text.replace(" ", " \0").split("\0")
        splitter = ReasoningSplitter(self.reply_start)
        said = ""
        for place, word in enumerate(words):
            if script.error is not None and place == script.error_after:
                raise script.error
            if script.gate is not None:
                while not script.gate.wait(0.005):
                    if self._cancelled.is_set():
                        break
            if self._cancelled.is_set() and not script.ignores_cancel:
                break
            said += word
            self.stats = made_up_stats(place + 1)
            part = splitter.feed(word)
            if part.in_reasoning:
                yield TextChunk(part.reasoning, 1, place % 3 != 2, True, word)
            if part.answer or not part.in_reasoning:
                yield TextChunk(part.answer, 1, place % 3 != 2, False, "" if part.in_reasoning else word)
            if script.pause_seconds:
                time.sleep(script.pause_seconds)
        cancelled = self._cancelled.is_set()
        self.stats = made_up_stats(len(words))
        self.stats.busy_passes = script.busy_passes
        reasoning, answer = split_reasoning(said, self.reply_start)
        self._reply = Reply(
            said,
            (),
            "cancelled" if cancelled else "stop",
            1234,
            "demo",
            "demo-draft",
            LIVE,
            self.stats,
            reasoning,
            answer,
        )


def _turns(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without the system prompt."""
    return [message for message in messages if message.role != "system"]


class WordVocabulary:
    """Stands in for a tokenizer whose tokens are words."""

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        return [0] * len(text.split())

    def min_tokens(self, text: str) -> int:
        return len(text.split())


@dataclass
class ScriptedRuntime:
    """Stands in for a loaded model."""

    scripts: list[Script] = field(default_factory=list)
    target: ModelFacts = field(default_factory=lambda: facts("demo"))
    draft: ModelFacts | None = field(default_factory=lambda: facts("demo-draft"))
    heads: tuple[LoadedHead, ...] = ()
    method: MethodReport = METHOD
    context_tokens: int = 1024
    template: ChatTemplate | None = None
    vocabulary: WordVocabulary = field(default_factory=WordVocabulary)
    loss_limits: tuple[float, float] | None = (0.02, 2.0)
    pass_costs: dict[int, float] = field(default_factory=dict)
    asked: list[tuple[str | None, str, dict[str, Any]]] = field(default_factory=list)
    closed: bool = False
    plan: MemoryPlan | None = None
    recommended_sampling: dict[str, RecommendedSetting] = field(default_factory=dict)

    def has_thinking_switch(self) -> bool:
        return self.template is not None and self.template.has_thinking_switch()

    def method_for(self, method: str) -> MethodReport:
        if "lowbit" in parse_method(method):
            raise OptionError("method 'lowbit' cannot be used: demo has no copy with fewer bits", "make one")
        return MethodReport(method, method, "asked for")

    def exactness_for(
        self, *, acceptance: str | None = None, temperature: float | None = None
    ) -> Exactness | None:
        return exactness_for(
            self.target.exactness,
            acceptance=acceptance or "invariant",
            temperature=0.8 if temperature is None else temperature,
        )

    def reply_defaults(self, method: str | None = None) -> ReplyArguments:
        method = method or self.method.requested
        self.method_for(method)
        length = {"auto": 16, "none": 0}.get(method, 4)
        return ReplyArguments(
            method=method,
            acceptance="invariant",
            max_tokens=default_max_tokens(self.context_tokens),
            draft_length=length,
            **cast(ReplyArguments, {name: each.value for name, each in self.recommended_sampling.items()}),
        )

    def memory_bytes(self) -> int:
        return 123_000_000

    def memory(self) -> MemoryUse:
        kept = PrefixCacheUsage(3, 45_000_000, 4 << 30, 90_000_000, 2 << 30, 7, 12_345)
        return MemoryUse(12_551_392, 6_291_456, 123_000_000, kept)

    def check_template(self) -> None:
        pass

    def count_tokens(self, messages: Sequence[Message]) -> int:
        return 12 * len(_turns(messages))

    def stream_messages(
        self, messages: Sequence[Message], *, reply_start: str = "", **options: Any
    ) -> ScriptedStream:
        turns = _turns(messages)
        system = messages[0].content if len(turns) < len(messages) else None
        self.asked.append((system, messages[-1].content, options))
        script = self.scripts.pop(0) if self.scripts else Script()
        return ScriptedStream(script, 100 * (len(turns) + 1), reply_start)

    def close(self) -> None:
        self.closed = True


def as_runtime(runtime: ScriptedRuntime) -> Runtime:
    """The scripted runtime, with the type that the chat expects."""
    return cast("Runtime", runtime)


def loading(
    runtime: ScriptedRuntime,
    *,
    steps: int = 3,
    pause_seconds: float = 0.0,
    gate: threading.Event | None = None,
) -> Load:
    """A load function that takes some steps and minds a cancel, or ignores it and waits for `gate`."""

    def load(progress: Progress) -> Runtime:
        if gate is not None:
            gate.wait(60)
            return as_runtime(runtime)
        for step in range(steps):
            if not progress("Loading demo", step / steps):
                raise CancelledError("loading was cancelled")
            time.sleep(pause_seconds)
        return as_runtime(runtime)

    return load
