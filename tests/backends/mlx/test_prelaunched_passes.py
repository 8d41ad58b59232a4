"""Tests of passes that are launched early, and of threads: their calls, and what they leave behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec import load
from edgespec.backends import mlx
from edgespec.backends.mlx.build_info import runs_on_cpu
from edgespec.backends.mlx.evaluation import reuse_stream
from edgespec.engine.acceptance import Acceptance, Invariant, RandomDraws, Rejection
from edgespec.engine.loop import decode
from edgespec.engine.noise import Noise
from edgespec.engine.processors import build_processors
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.mlx.conftest import in_thread, row
from tests.backends.mlx.tiny_checkpoints import write_checkpoint

histories = st.lists(
    st.tuples(
        st.sampled_from(["best", "best", "best", "draw", "other", "wide", "prefill", "truncate", "snapshot"]),
        st.integers(3, 200),
    ),
    min_size=1,
    max_size=14,
)


class TestRunAhead:
    """Passes launched early change no result, whichever call follows."""

    @pytest.mark.long
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(histories)
    def test_any_history_is_the_same_with_and_without_run_ahead(
        self, llama: LanguageModel, history: list[tuple[str, int]]
    ) -> None:
        np.testing.assert_array_equal(self.play(llama, history, False), self.play(llama, history, True))

    @staticmethod
    def play(model: LanguageModel, history: list[tuple[str, int]], ahead: bool) -> NDArray[np.float64]:
        model.truncate(0)
        model.run_ahead(ahead)
        tokens = [5, 6, 7]
        model.prefill(tokens)
        best, seen = 9, []
        for what, token in history:
            if what == "prefill":
                model.prefill([token, token + 1])
            elif what == "truncate":
                model.truncate(max(1, model.length - token % 5))
            elif what == "snapshot":
                model.restore(model.snapshot())
            elif what == "wide":
                model.verify(TokenTree.chain(best, [token, 4]))
                model.commit((1,))
            else:
                logits = model.verify(TokenTree.chain(token if what == "other" else best))
                params = SamplingParams(temperature=0.8 if what == "draw" else 0.0)
                best = Sampler(params, 1, range(model.length)).token(logits, 0)
                seen.append(logits.at(0, np.arange(model.vocabulary.size)))
                model.commit(())
        model.run_ahead(False)
        seen.append(row(model, TokenTree.chain(4)))
        return np.stack(seen)

    def test_run_ahead_stops_at_the_end_of_the_context(self, llama: LanguageModel) -> None:
        llama.truncate(0)
        llama.prefill([5] * 510)
        llama.run_ahead(True)
        for room in (2, 1):
            assert llama.free_tokens == room
            logits = llama.verify(TokenTree.chain(5))
            logits.best(0, 1)
            llama.commit(())
        assert llama.free_tokens == 0
        llama.run_ahead(False)


class TestPipelining:
    """The verify pass may be launched while the last drafted token is still being computed."""

    @pytest.fixture
    def pair(self, folder: Path) -> Iterator[tuple[Any, Any]]:
        write_checkpoint(folder / "pair target", "llama")
        # The draft model is the same model with fewer bits, so its drafts are often accepted, but not always.
        write_checkpoint(folder / "pair draft", "llama", quantisation=("affine", 4, 32))
        target = mlx.load(str(folder / "pair target"), "target", LoadOptions(context_tokens=256))
        draft = mlx.load(str(folder / "pair draft"), "draft", LoadOptions(context_tokens=256))
        yield target, draft
        draft.close()
        target.close()

    @pytest.mark.long
    @pytest.mark.parametrize("min_confidence", [0.0, 0.3])
    @pytest.mark.parametrize(
        ("temperature", "rule"), [(0.0, Invariant()), (0.8, Invariant()), (0.0, Rejection(RandomDraws(1)))]
    )
    def test_replies_stay_the_same_and_no_pass_is_run_twice(
        self, pair: tuple[Any, Any], temperature: float, rule: Acceptance, min_confidence: float
    ) -> None:
        target, draft = pair
        prompt = [5, 6, 7, 8]
        params = SamplingParams(temperature=temperature)

        def reply(drafter: ModelDrafter | None) -> tuple[list[int], Stats]:
            target.truncate(0)
            target.prefill(prompt[:-1])
            if drafter:
                drafter.begin(prompt)
            stats = Stats()
            steps = decode(
                target,
                drafter,
                rule,
                Sampler(params, 3, prompt),
                prompt[-1],
                vocab_size=target.facts.vocab_size,
                draft_length=3,
                max_tokens=60,
                is_stop=lambda token: False,
                is_cancelled=lambda: False,
                stats=stats,
            )
            return [token for step in steps for token in step.tokens], stats

        plain, _ = reply(None)
        target.pipeline_with(draft)
        runs = count_forwards(target)
        said, stats = reply(ModelDrafter(draft, target.facts.vocab_size, min_confidence=min_confidence))
        assert said == plain
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        if not min_confidence:
            assert len(runs) == 1 + stats.target_passes  # One more for the prompt.
        assert min(stats.draft_seconds, stats.verify_seconds, stats.sampling_seconds) >= 0

    def test_a_discarded_prelaunched_pass_leaves_nothing_behind(self, pair: tuple[Any, Any]) -> None:
        target, draft = pair
        target.prefill([5, 6, 7])
        expected = row(target, TokenTree.chain(9, [10]), 1)
        target.truncate(3)
        others: list[Callable[[], object]] = [
            lambda: target.truncate(3),
            lambda: target.restore(target.snapshot()),
            lambda: target.pipeline_with(None),
            lambda: row(target, TokenTree((9, 10, 11), (-1, 0, 0), (None,) * 3)),
            lambda: target.verify(TokenTree.chain(9)),
        ]
        for other in others:
            target.pipeline_with(draft)
            draft.truncate(0)
            draft.prefill([5, 6, 7])
            Sampler(SamplingParams(temperature=0.0), 1, [0] * 4).token(draft.verify(TokenTree.chain(9)), 0)
            assert target.caches.length == 5
            other()
            target.truncate(3)
            np.testing.assert_array_equal(row(target, TokenTree.chain(9, [10]), 1), expected)
            target.truncate(3)


def count_forwards(model: Any) -> list[int]:
    """Return a list to which the model's passes append their widths."""
    runs: list[int] = []
    passes = model._runner
    forward = passes._forward

    def counted(tokens: mx.array) -> mx.array:
        runs.append(tokens.size)
        return forward(tokens)

    passes._forward = counted
    return runs


class TestThreads:
    @pytest.mark.long
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_load_use_and_close_in_different_threads(self, tmp_path: Path, dtype: str) -> None:
        """MLX evaluates an array only in the thread that created it, so no array may stay lazy."""
        models: list[LanguageModel] = []
        rows: list[NDArray[np.float64]] = []

        last = [9]

        def steps() -> None:
            model = models[0]
            model.verify(TokenTree((5, 6, 7, 8), (-1, 0, 0, 2), (None,) * 4))
            model.commit((2, 3))
            plain_step()

        def plain_step() -> None:
            # This thread launches a pass that the next thread asks for.
            logits = models[0].verify(TokenTree.chain(last[0]))
            last[:] = logits.best(0, 1, build_processors(SamplingParams(), []), Noise(1, 1))[0]
            rows.append(logits.at(0, np.arange(models[0].vocabulary.size)))
            models[0].commit(())

        path = write_checkpoint(tmp_path, "llama", dtype=dtype)
        # The memory limit prevents widening to float32.
        little = (path / "model.safetensors").stat().st_size * 3 // 2
        options = LoadOptions(context_tokens=64, memory_bytes=little)
        in_thread(lambda: models.append(mlx.load(str(path), "llama", options)))
        assert dtype in models[0].facts.description
        models[0].run_ahead(True)
        for work in (steps, plain_step, plain_step) * 3:
            in_thread(work)
        here, rows, last[:] = rows, [], [9]
        models[0].truncate(0)
        for work in (steps, plain_step, plain_step) * 3:
            work()
        np.testing.assert_array_equal(here, rows)
        in_thread(models[0].close)


@pytest.mark.skipif(not runs_on_cpu(), reason="MLX computes on the GPU")
@pytest.mark.long
def test_models_that_are_loaded_again_and_again_leave_no_threads() -> None:
    def load_and_close() -> None:
        with load("demo-mlx-draft", "none", method="none", context=256) as runtime:
            in_thread(lambda: runtime.generate("How do I list files?", max_tokens=2))

    in_thread(load_and_close)
    before = psutil.Process().num_threads()
    for _ in range(3):
        in_thread(load_and_close)
    # Each load used to leave about five threads behind. Another thread may start meanwhile.
    assert psutil.Process().num_threads() <= before + 2


@pytest.mark.skipif(not runs_on_cpu(), reason="MLX computes on the GPU")
def test_running_threads_have_different_streams() -> None:
    streams: list[str] = []
    both = threading.Barrier(2)

    def use() -> None:
        reuse_stream()
        streams.append(str(mx.default_stream(mx.cpu)))

    def use_together() -> None:
        use()
        both.wait(60)

    threads = [threading.Thread(target=use_together) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(streams)) == 2
    in_thread(use)
    assert streams[2] in streams[:2]
