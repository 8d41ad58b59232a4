"""The runtime on the embedded pair: the same tokens, cancelled at any instant, closed at any moment."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest

import edgespec
from edgespec import Reply, Runtime
from edgespec.backends import llamacpp
from edgespec.backends.base import LanguageModel, LoadOptions
from edgespec.errors import (
    BackendError,
    BusyError,
    ClosedError,
    ContextFullError,
    EdgespecError,
    OptionError,
    TemplateError,
)
from edgespec.methods import Drafters
from edgespec.sameness import read_prompts
from tests.backends.tiny_models import CHATML, write_llama
from tests.tables import PROMPT, near, runtime, table

METHODS = ("model", "ngram", "model+ngram")
HOWTO = "How do I list files by size?"
REPEATS = "Repeat this: `tar -xzf archive.tar.gz` and `tar -czf archive.tar.gz` and `tar -tzf archive.tar.gz`"
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
SAMPLING = {
    f"T {temperature}{', penalties' if penalties else ''}": {"temperature": temperature} | penalties
    for temperature in (0.0, 0.7, 1.2)
    for penalties in ({}, PENALTIES)
}


@pytest.fixture(scope="module")
def demo() -> Iterator[Runtime]:
    with edgespec.load("demo") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def plain(demo: Runtime) -> Callable[..., Reply]:
    """Plain replies, each made once."""
    made: dict[str, Reply] = {}

    def reply(prompt: str, **options: Any) -> Reply:
        key = repr((prompt, sorted(options.items())))
        if key not in made:
            made[key] = demo.generate(prompt, method="none", **options)
        return made[key]

    return reply


def equal(got: Reply, expected: Reply) -> None:
    assert got.tokens == expected.tokens
    assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)


class TestTheSameTokens:
    @pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
    @pytest.mark.parametrize("method", METHODS)
    def test_every_draft_length(
        self, demo: Runtime, plain: Callable[..., Reply], method: str, sampling: dict[str, Any]
    ) -> None:
        for prompt, draft_length in product((HOWTO, REPEATS), range(1, 17)):
            options: dict[str, Any] = {"seed": 7, "max_tokens": 40} | sampling
            equal(
                demo.generate(prompt, method=method, draft_length=draft_length, **options),
                plain(prompt, **options),
            )

    @pytest.mark.parametrize("branches", [(2,), (4,), (3, 2), (2, 2, 2), (1, 4)], ids=str)
    def test_every_tree(self, plain: Callable[..., Reply], branches: tuple[int, ...]) -> None:
        with edgespec.load("demo", draft_branches=branches) as tree:
            for sampling, method, draft_length in product(
                SAMPLING.values(), ("model", "model+ngram"), (1, 2, 3, 5)
            ):
                options: dict[str, Any] = {"seed": 8, "max_tokens": 32} | sampling
                equal(
                    tree.generate(HOWTO, method=method, draft_length=draft_length, **options),
                    plain(HOWTO, **options),
                )

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_beyond_the_length_where_plain_attention_changes_its_kernel(
        self, demo: Runtime, plain: Callable[..., Reply], temperature: float
    ) -> None:
        prompt = "Tell me about `tar`. " * 30
        forever = {
            token: -math.inf for token in range(demo.target.vocab_size) if demo.vocabulary.is_end(token)
        }
        for method in METHODS:
            options: dict[str, Any] = {
                "seed": 3,
                "max_tokens": 400,
                "temperature": temperature,
                "logit_bias": forever,
            }
            got = demo.generate(prompt, method=method, draft_length=6, **options)
            assert got.stats.prompt_tokens + len(got.tokens) > 512
            equal(got, plain(prompt, **options))

    def test_to_the_end_of_the_context(self) -> None:
        with edgespec.load("demo", context=256, draft_branches=(3,)) as small:
            ends = [t for t in range(small.target.vocab_size) if small.vocabulary.is_end(t)]
            forever = dict.fromkeys(ends, -math.inf)
            replies = [
                small.generate(HOWTO, method=method, draft_length=7, seed=1, logit_bias=forever)
                for method in ("none", *METHODS)
            ]
        for reply in replies:
            equal(reply, replies[0])
            assert reply.finish_reason == "length"
            assert reply.stats.prompt_tokens + len(reply.tokens) == 257

    @pytest.mark.parametrize("acceptance", ["invariant", "rejection"])
    @pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
    def test_a_draft_equal_to_the_target_is_accepted_always(
        self, acceptance: str, temperature: float
    ) -> None:
        with edgespec.load("demo", "demo", kv_type="q8_0") as twins:
            ends = [t for t in range(twins.target.vocab_size) if twins.vocabulary.is_end(t)]
            for draft_length in (1, 4, 9):
                reply = twins.generate(
                    HOWTO,
                    method="model",
                    draft_length=draft_length,
                    acceptance=acceptance,
                    temperature=temperature,
                    max_tokens=60,
                    seed=2,
                    logit_bias=dict.fromkeys(ends, -math.inf),
                )
                assert reply.stats.acceptance_rate == 1.0
                assert reply.stats.target_passes == math.ceil(60 / (draft_length + 1))

    @pytest.mark.long
    @pytest.mark.parametrize("branches", [(), (3, 2)], ids=str)
    def test_every_embedded_prompt(self, branches: tuple[int, ...]) -> None:
        from edgespec.sameness import verify

        with edgespec.load("demo", draft_branches=branches) as pair:
            report = verify(
                pair,
                read_prompts(),
                methods=METHODS,
                temperatures=(0.0, 0.7, 0.8, 1.2),
                draft_lengths=(1, 2, 3, 4, 5, 7, 8, 12, 16),
                max_tokens=256,
                seed=11,
            )
        for result in report.methods.values():
            assert (result.identical, result.violations) == (len(read_prompts()), 0)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_seed_repeats_and_another_does_not(self, demo: Runtime, temperature: float) -> None:
        for acceptance in ("invariant", "rejection"):
            options: dict[str, Any] = {"temperature": temperature, "acceptance": acceptance, "max_tokens": 32}
            one, again = (demo.generate(HOWTO, seed=5, **options) for _ in range(2))
            other = demo.generate(HOWTO, seed=6, **options)
            assert one.tokens == again.tokens
            assert (one.tokens == other.tokens) == (temperature == 0.0)


def rounds_of(stream: edgespec.ReplyStream, count: int) -> int:
    """Take at most `count` pieces; how many there were."""
    taken = 0
    for _ in stream:
        taken += 1
        if taken == count:
            break
    return taken


class TestCancel:
    """After a cancel at any instant the next reply is that of a runtime that never heard of it."""

    OPTIONS: ClassVar[dict[str, Any]] = {
        "seed": 4,
        "max_tokens": 48,
        "temperature": 0.8,
        "method": "model+ngram",
    }

    def after(self, demo: Runtime, plain: Callable[..., Reply], prompt: str = REPEATS) -> None:
        options = {name: value for name, value in self.OPTIONS.items() if name != "method"}
        expected = plain(prompt, **options)
        equal(demo.generate(prompt, **self.OPTIONS), expected)

    @pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
    def test_between_rounds(self, demo: Runtime, plain: Callable[..., Reply], count: int) -> None:
        stream = demo.stream(REPEATS, **self.OPTIONS)
        rounds_of(stream, count)
        stream.cancel()
        assert sum(piece.token_count for piece in stream) <= 6
        assert stream.reply.finish_reason == "cancelled"
        whole = plain(REPEATS, **{n: v for n, v in self.OPTIONS.items() if n != "method"})
        assert stream.reply.tokens == whole.tokens[: len(stream.reply.tokens)]
        self.after(demo, plain)

    def test_before_it_began(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        stream = demo.stream(REPEATS, **self.OPTIONS)
        stream.cancel()
        assert list(stream) == []
        assert stream.reply.finish_reason == "cancelled"
        assert stream.reply.tokens == ()
        self.after(demo, plain)

    def test_after_its_end(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        stream = demo.stream(REPEATS, **self.OPTIONS)
        for _ in stream:
            pass
        reason = stream.reply.finish_reason
        stream.cancel()
        demo.cancel()
        assert stream.reply.finish_reason == reason
        self.after(demo, plain)

    @pytest.mark.parametrize("delay", [0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.04])
    @pytest.mark.parametrize("through", ["stream", "runtime"])
    def test_from_another_thread(
        self, demo: Runtime, plain: Callable[..., Reply], delay: float, through: str
    ) -> None:
        long_prompt = "What does `ls` do? " * 40
        stream = demo.stream(long_prompt, **self.OPTIONS)
        timer = threading.Timer(delay, stream.cancel if through == "stream" else demo.cancel)
        timer.start()
        for _ in stream:
            pass
        timer.join()
        whole = plain(long_prompt, **{n: v for n, v in self.OPTIONS.items() if n != "method"})
        if stream.reply.finish_reason != "cancelled":
            assert stream.reply.tokens == whole.tokens
        assert stream.reply.tokens == whole.tokens[: len(stream.reply.tokens)]
        self.after(demo, plain)
        self.after(demo, plain, long_prompt)

    def test_a_cancel_of_one_reply_is_not_one_of_the_next(
        self, demo: Runtime, plain: Callable[..., Reply]
    ) -> None:
        first = demo.stream(HOWTO, **self.OPTIONS)
        next(first)
        first.close()
        first.cancel()
        self.after(demo, plain)

    def test_a_stream_dropped_without_a_word(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        stream = demo.stream(HOWTO, **self.OPTIONS)
        next(stream)
        del stream
        gc.collect()
        self.after(demo, plain)

    @pytest.mark.parametrize("count", [0, 1, 4])
    def test_closing_a_stream(self, demo: Runtime, plain: Callable[..., Reply], count: int) -> None:
        stream = demo.stream(HOWTO, **self.OPTIONS)
        if count:
            rounds_of(stream, count)
        stream.close()
        stream.close()
        assert list(stream) == []
        assert stream.reply.finish_reason == "cancelled"
        self.after(demo, plain)

    @pytest.mark.long
    def test_at_very_many_instants(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        for i in range(300):
            stream = demo.stream(REPEATS if i % 2 else "What does `ls` do? " * 30, **self.OPTIONS)
            timer = threading.Timer(0.0004 * (i % 150), stream.cancel)
            timer.start()
            for _ in stream:
                pass
            timer.join()
            self.after(demo, plain)


class TestOneAtATime:
    def test_a_second_reply_is_refused_and_the_first_goes_on(
        self, demo: Runtime, plain: Callable[..., Reply]
    ) -> None:
        options: dict[str, Any] = {"seed": 1, "max_tokens": 24}
        first = demo.stream(HOWTO, **options)
        next(first)
        second = demo.stream(REPEATS, **options)
        with pytest.raises(BusyError):
            next(second)
        with pytest.raises(EdgespecError, match="not finished"):
            _ = second.reply
        with pytest.raises(BusyError), demo.borrowed_target():
            pass
        for _ in first:
            pass
        equal(first.reply, plain(HOWTO, **options))

    def test_many_threads(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        """Each gets its reply or hears that the runtime is busy; none gets another's."""
        options: dict[str, Any] = {"seed": 1, "max_tokens": 16}
        expected = {prompt: plain(prompt, **options).tokens for prompt in (HOWTO, REPEATS)}
        wrong: list[object] = []
        served = threading.Event()

        def ask(prompt: str) -> None:
            for _ in range(6):
                try:
                    if demo.generate(prompt, **options).tokens != expected[prompt]:
                        wrong.append(prompt)
                    served.set()
                except BusyError:
                    pass
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=ask, args=[prompt]) for prompt in (HOWTO, REPEATS) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert served.is_set()

    def test_a_borrowed_target_comes_back_clean(self, demo: Runtime, plain: Callable[..., Reply]) -> None:
        with demo.borrowed_target() as target:
            target.prefill([5, 6, 7])
            with pytest.raises(BusyError):
                demo.generate(HOWTO)
        equal(demo.generate(HOWTO, seed=1, max_tokens=24), plain(HOWTO, seed=1, max_tokens=24))


class TestClosing:
    def test_use_after_closing(self) -> None:
        runtime = edgespec.load("demo")
        chat = runtime.chat()
        runtime.close()
        runtime.close()
        runtime.cancel()
        for call in (
            lambda: runtime.generate(HOWTO),
            lambda: runtime.stream(HOWTO),
            lambda: runtime.generate(HOWTO, raw=True),
            lambda: runtime.stream_tokens([1, 2]),
            lambda: chat.ask("Hello"),
        ):
            with pytest.raises(ClosedError):
                call()
        assert chat.messages == []
        assert runtime.target.name == "demo"

    def test_while_a_stream_is_suspended(self) -> None:
        runtime = edgespec.load("demo")
        stream = runtime.stream(HOWTO, max_tokens=64)
        next(stream)
        runtime.close()
        with pytest.raises(ClosedError):
            list(stream)
        stream.close()

    def test_while_another_thread_decodes(self) -> None:
        runtime = edgespec.load("demo")
        started = threading.Event()
        ended: list[str] = []

        def work() -> None:
            try:
                for _ in runtime.stream("What does `ls` do? " * 20, max_tokens=600, temperature=1.2):
                    started.set()
                ended.append("done")
            except ClosedError:
                ended.append("closed")

        thread = threading.Thread(target=work)
        thread.start()
        started.wait(10)
        runtime.close()
        thread.join(10)
        assert ended in (["closed"], ["done"])

    @pytest.mark.parametrize("delay", [0.0, 0.03, 0.06])
    def test_a_program_may_end_while_a_thread_still_decodes(self, delay: float) -> None:
        code = f"""
import threading, time, edgespec
runtime = edgespec.load("demo")
started = threading.Event()
def work():
    while True:
        stream = runtime.stream("What does `ls` do? " * 40, max_tokens=500, temperature=1.2)
        started.set()
        for _ in stream:
            pass
threading.Thread(target=work, daemon=True).start()
started.wait()
time.sleep({delay})
threading.excepthook = lambda _: None
"""
        done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    def test_nothing_is_left_open_when_loading_fails(self, demo_target: Path, tmp_path: Path) -> None:
        for options in (
            {"draft_length": 0},
            {"draft_length": 65},
            {"method": "modle"},
            {"acceptance": "maybe"},
            {"draft_branches": (0,)},
            {"draft_confidence": 1.0},
            {"context": 0},
            {"threads": -1},
            {"kv_type": "f8"},
            {"flash_attention": "perhaps"},
        ):
            with pytest.raises(OptionError) as caught:
                edgespec.load("demo", **options)
            assert "\n" not in str(caught.value)


class Recording:
    """A model that notes how many tokens each prefill got; everything else it passes on."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.prefilled: list[int] = []

    def prefill(self, tokens: Sequence[int], progress: Any = None) -> None:
        self.prefilled.append(len(tokens))
        self._model.prefill(tokens, progress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class TestCacheReuse:
    @pytest.fixture
    def pair(self, demo_target: Path, demo_draft: Path) -> Iterator[tuple[Runtime, Recording, Recording]]:
        options = LoadOptions(context_tokens=1024)
        target: Any = Recording(llamacpp.load(str(demo_target), "target", options))
        draft: Any = Recording(llamacpp.load(str(demo_draft), "draft", options))
        with Runtime(target, draft, Drafters(target, draft)) as runtime:
            yield runtime, target, draft

    @pytest.mark.parametrize("method", ["model", "model+ngram"])
    def test_a_second_turn_prefills_only_what_is_new_in_both_caches(
        self, pair: tuple[Runtime, Recording, Recording], method: str
    ) -> None:
        runtime, target, draft = pair
        chat = runtime.chat(system="Be brief.")
        turns = [HOWTO, "And by name?", "What about hidden files?"]
        known = 0
        for turn in turns:
            target.prefilled.clear()
            draft.prefilled.clear()
            reply = chat.ask(turn, method=method, max_tokens=60, temperature=0.7, seed=2)
            new = reply.stats.prompt_tokens - known
            assert reply.stats.cached_prompt_tokens >= known - 1
            assert sum(target.prefilled) == reply.stats.prompt_tokens - reply.stats.cached_prompt_tokens - 1
            # The draft has besides to catch up with what other drafters guessed, a few tokens at a time.
            assert draft.prefilled[0] <= new + 2
            assert sum(draft.prefilled) <= new + 2 + len(reply.tokens)
            known = reply.stats.prompt_tokens + len(reply.tokens) - 1

    def test_the_same_prompt_again_prefills_nothing(self, pair: tuple[Runtime, Recording, Recording]) -> None:
        runtime, target, draft = pair
        runtime.generate(REPEATS, max_tokens=20, method="model")
        target.prefilled.clear()
        draft.prefilled.clear()
        reply = runtime.generate(REPEATS, max_tokens=20, method="model")
        assert reply.stats.cached_prompt_tokens == reply.stats.prompt_tokens - 1
        assert sum(target.prefilled) == 0
        assert sum(draft.prefilled) <= 1


class Failing:
    """A model that fails at its n-th pass from now on; 0 is never."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.at = 0

    def _count(self) -> None:
        self.at -= 1
        if self.at == 0:
            raise BackendError("the graphics card has left the building", "restart the machine")

    def prefill(self, tokens: Sequence[int], progress: Any = None) -> None:
        self._count()
        self._model.prefill(tokens, progress)

    def verify(self, tree: Any, first: int = 0) -> Any:
        self._count()
        return self._model.verify(tree, first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class TestFailingBackends:
    @pytest.mark.parametrize("who", ["target", "draft"])
    def test_the_reply_after_a_failure_is_right(self, who: str) -> None:
        target: Any = Failing(table(1))
        draft: Any = Failing(near(table(1), 2))
        with runtime(target, draft) as pair:
            expected = pair.generate(PROMPT, method="none", seed=1, max_tokens=30).tokens
            for at in range(1, 9):
                (target if who == "target" else draft).at = at
                with pytest.raises(BackendError, match="left the building"):
                    pair.generate(PROMPT, seed=1, max_tokens=30, method="model")
                (target if who == "target" else draft).at = 0
                assert pair.generate(PROMPT, seed=1, max_tokens=30).tokens == expected


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": -5}, "max_tokens"),
            ({"max_tokens": 1.5}, "max_tokens"),
            ({"max_tokens": True}, "max_tokens"),
            ({"seed": -1}, "seed"),
            ({"seed": "seven"}, "seed"),
            ({"method": "modle"}, "did you mean 'model'"),
            ({"method": ""}, "method ''"),
            ({"method": "model+model"}, "twice"),
            ({"draft_length": 0}, "draft_length"),
            ({"draft_length": 10**9}, "draft_length"),
            ({"acceptance": "always"}, "acceptance"),
            ({"acceptance": ""}, "acceptance"),
            ({"stop": [""]}, "stop"),
            ({"stop": [5]}, "stop"),
            ({"stop": 5}, "stop"),
            ({"temprature": 1.0}, "did you mean 'temperature'"),
            ({"temperature": -1.0}, "temperature"),
            ({"temperature": math.nan}, "temperature"),
            ({"top_k": 10**9}, "top_k"),
            ({"logit_bias": {0: math.nan}}, "logit_bias"),
        ],
    )
    def test_nonsense_is_refused_at_once_in_one_line(
        self, demo: Runtime, options: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(OptionError, match=says) as caught:
            demo.stream(HOWTO, **options)
        assert "\n" not in str(caught.value)
        assert caught.value.next_step

    def test_prompts_that_are_none(self, demo: Runtime) -> None:
        with pytest.raises(OptionError, match="prompt"):
            demo.stream_tokens([])
        with pytest.raises(OptionError, match="prompt"):
            demo.generate(None)  # type: ignore[arg-type]
        for token in (-1, demo.target.vocab_size):
            with pytest.raises(OptionError, match=f"token {token} "):
                demo.stream_tokens([3, token])

    def test_a_prompt_larger_than_the_context(self, demo: Runtime) -> None:
        with pytest.raises(ContextFullError, match="1024"):
            demo.generate("many words " * 5000)
        with pytest.raises(ContextFullError, match="1024"):
            demo.chat().ask("many words " * 5000)

    def test_a_prompt_as_large_as_the_context_gets_one_token(self, demo: Runtime) -> None:
        replies = {
            _drained(demo.stream_tokens([9] * 1024, method=method, seed=1)).tokens
            for method in ("none", *METHODS)
        }
        (tokens,) = replies
        assert len(tokens) == 1

    def test_methods_that_need_a_draft(self) -> None:
        with edgespec.load("demo", draft="none") as alone:
            assert alone.method.effective == "ngram"
            assert alone.draft is None
            with pytest.raises(OptionError, match="needs a draft model"):
                alone.generate(HOWTO, method="model")
            assert alone.generate(HOWTO, max_tokens=5).method.effective == "ngram"

    def test_progress_of_the_prefill_may_cancel(self, demo: Runtime) -> None:
        tokens = demo.vocabulary.tokenize("unheard of " * 50, special=False, start=True)
        stream = demo.stream_tokens(tokens, progress=lambda what, fraction: False)
        assert list(stream) == []
        assert stream.reply.finish_reason == "cancelled"


def _drained(stream: edgespec.ReplyStream) -> Reply:
    for _ in stream:
        pass
    return stream.reply


class TestReports:
    def test_a_reply_as_the_contract_has_it(self, demo: Runtime) -> None:
        reply = demo.generate(HOWTO, max_tokens=24, seed=3, method="model+ngram", draft_length=3)
        json = reply.to_json()
        assert set(json) == {
            "text", "tokens", "finish_reason", "seed", "target", "draft", "method", "stats",
        }  # fmt: skip
        assert json["method"] == {
            "requested": "model+ngram",
            "effective": "model+ngram",
            "reason": "asked for",
        }
        assert (json["target"], json["draft"], json["seed"]) == ("demo", "demo-draft", 3)
        stats: Any = json["stats"]
        assert set(stats) == {
            "prompt_tokens", "cached_prompt_tokens", "generated_tokens", "target_passes", "drafted_tokens",
            "accepted_tokens", "accepted_per_position", "drafted_per_position", "acceptance_rate",
            "tokens_per_target_pass", "draft_seconds", "verify_seconds", "rollback_seconds",
            "sampling_seconds", "overhead_seconds", "prefill_seconds", "ttft_seconds", "tpot_seconds",
            "tokens_per_second", "speedup_estimate", "draft_weight_bytes", "draft_kv_bytes",
            "peak_memory_bytes",
        }  # fmt: skip

    @pytest.mark.parametrize("method", ["none", *METHODS])
    def test_the_counts_add_up(self, demo: Runtime, method: str) -> None:
        stream = demo.stream(REPEATS, max_tokens=40, seed=3, method=method, draft_length=4)
        pieces = list(stream)
        reply, stats = stream.reply, stream.stats
        assert "".join(piece.text for piece in pieces) == reply.text
        assert sum(piece.token_count for piece in pieces) == len(reply.tokens) == stats.generated_tokens
        assert sum(p.token_count for p in pieces if p.accepted) == stats.accepted_tokens
        assert sum(stats.accepted_per_position) == stats.accepted_tokens
        assert sum(stats.drafted_per_position) == stats.drafted_tokens
        assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
        assert stats.target_passes + stats.accepted_tokens >= stats.generated_tokens
        if method == "none":
            assert stats.drafted_tokens == 0
            assert stats.acceptance_rate is None
            assert stats.target_passes == stats.generated_tokens

    def test_live_stats_can_be_read_while_it_runs(self, demo: Runtime) -> None:
        stream = demo.stream(HOWTO, max_tokens=30, seed=1)
        seen = [stream.stats.generated_tokens for _ in stream]
        assert seen == sorted(seen)
        assert seen[-1] == len(stream.reply.tokens)


class TestTemplates:
    def test_a_broken_template_spoils_only_what_needs_it(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "broken.gguf", template="{% for message in messages %}")
        with edgespec.load(str(path), None) as runtime:
            assert len(runtime.generate("the file", raw=True, max_tokens=3).tokens) <= 3
            for call in (lambda: runtime.generate("the file"), runtime.chat):
                with pytest.raises(TemplateError, match="broken"):
                    call()

    def test_a_model_without_one_takes_raw_text(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "base.gguf", template=None)
        with edgespec.load(str(path), None) as runtime:
            assert not runtime.target.chat_template
            runtime.generate("the file", max_tokens=3)
            with pytest.raises(TemplateError, match="no chat template"):
                runtime.chat()
            with pytest.raises(TemplateError, match="system prompt"):
                runtime.generate("the file", system="Be brief.")

    def test_characters_split_over_tokens_come_out_whole(self, tmp_path: Path) -> None:
        """A model with random weights says random bytes: the text must be the same in pieces and at once."""
        path = write_llama(tmp_path / "bytes.gguf", template=CHATML)
        with edgespec.load(str(path), None) as runtime:
            for seed in range(20):
                stream = runtime.stream("é🙂", max_tokens=60, seed=seed, temperature=2.0, top_k=0, top_p=1.0)
                text = "".join(piece.text for piece in stream)
                said = b"".join(runtime.vocabulary.piece(token) for token in stream.reply.tokens)
                assert text == stream.reply.text == said.decode("utf-8", "replace")


def test_a_runtime_opens_and_closes_again_and_again() -> None:
    for _ in range(5):
        with edgespec.load("demo") as runtime:
            assert runtime.generate(HOWTO, max_tokens=2).tokens
