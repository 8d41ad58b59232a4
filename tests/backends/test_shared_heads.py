"""Heads of concurrent replies: each drafts as if it were alone while another reply is being generated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.model import load, load_slots
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ClosedError, ContextFullError, MemoryBudgetError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import Head, LanguageModel, LoadOptions
from edgespec.model.hidden_states import HeadModel
from tests.backends.eagle1_targets import write_eagle1
from tests.backends.head_histories import ROUNDS, Round, check_history, first_logits
from tests.backends.residual_targets import GgufTarget
from tests.backends.tiny_heads import write_dflash, write_eagle
from tests.backends.tiny_models import write_gemma2, write_llama
from tests.backends.tiny_mtp_models import write_mtp_model
from tests.model.heads.residual_files import Layout
from tests.raising import raises

CONTEXT = 512
OPTIONS = LoadOptions(context_tokens=CONTEXT)
HYDRA = Layout("hydra", ".pt", grounded=True)
PREFIX = Layout("hydra", grounded=True, prefix=True, dropouts=True)


@dataclass(frozen=True)
class Pair:
    """A target and a head for it."""

    target: Path
    head: Head

    def load(self, slots: int = 2) -> list[LanguageModel]:
        options = LoadOptions(context_tokens=CONTEXT, parallel=slots, own_head=self.head.path is None)
        return list(load_slots(str(self.target), "target", options))


def _eagle(folder: Path, write: Callable[[Path], Path], layers: tuple[int, int, int]) -> Pair:
    target = write(folder / "target.gguf")
    return Pair(target, Head("eagle", write_eagle(folder / "head.gguf", layers=layers)))


def _dflash(folder: Path, **options: Any) -> Pair:
    target = write_llama(folder / "target.gguf", layers=3)
    head = write_dflash(folder / "head.gguf", layers=(0, 1, 3), block=6, mask=7, **options)
    return Pair(target, Head("dflash", head))


def _residual(folder: Path, layout: Layout) -> Pair:
    made = GgufTarget(folder)
    return Pair(made.path, Head(layout.method, made.head(layout)))


def _deep_llama(path: Path) -> Path:
    return write_llama(path, layers=3)


def _qwen2(path: Path) -> Path:
    return write_llama(path, architecture="qwen2", layers=3)


# Heads of all kinds. llama.cpp copies the hidden states of the first target, and a hook copies those of the
# second. The third has a sliding window.
KINDS: dict[str, Callable[[Path], Pair]] = {
    "eagle": lambda folder: _eagle(folder, _deep_llama, (0, 1, 2)),
    "eagle, hook": lambda folder: _eagle(folder, _qwen2, (1, 1, 2)),
    "eagle, window": lambda folder: _eagle(folder, write_gemma2, (1, 1, 1)),
    "eagle-1": lambda folder: Pair(
        _deep_llama(folder / "target.gguf"), Head("eagle", write_eagle1(folder / "head"))
    ),
    "mtp": lambda folder: Pair(write_mtp_model(folder / "target.gguf", "glm4moe"), Head("mtp")),
    "dflash": _dflash,
    "dspark": lambda folder: _dflash(folder, rank=8),
    "dflash 2": lambda folder: _dflash(folder, candidates=4),
    "medusa": lambda folder: _residual(folder, Layout("medusa")),
    "hydra": lambda folder: _residual(folder, HYDRA),
    "hydra++": lambda folder: _residual(folder, PREFIX),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return KINDS[request.param](tmp_path_factory.mktemp("heads"))


def head_of(target: LanguageModel, head: Head) -> HeadModel:
    return cast(HeadModel, target.self_draft(head))


class Neighbour:
    """Another reply that a thread generates with its own head until `stop` is called."""

    def __init__(self, target: LanguageModel, head: HeadModel) -> None:
        self._target, self._head, self._stopped = target, head, threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._running = self._pool.submit(self._generate)

    def _generate(self) -> int:
        """Return the number of rounds."""
        cache, tokens, rounds = HeadCache(self._head), list(range(20, 60)), 0
        while not (rounds and self._stopped.is_set()):
            rounds += 1
            self._target.prefill(tokens[self._target.length : -1])
            first_logits(self._head, cache, tokens, 2)
            self._target.verify(TokenTree.chain(tokens[-1], [30, 31, 32]))
            self._target.commit((1, 2))
            tokens += [30, 31, 40]
            if len(tokens) > 200:
                del tokens[50:]
                self._target.truncate(49)
        return rounds

    def stop(self) -> None:
        self._stopped.set()
        self._pool.shutdown()
        assert self._running.result() > 0
        self._head.close()
        self._target.close()


@pytest.mark.long
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_a_head_drafts_like_a_fresh_one_while_another_reply_is_generated(
    pair: Pair, rounds: list[Round], seed: int
) -> None:
    def load() -> LanguageModel:
        other, target = pair.load()
        neighbour, close = Neighbour(other, head_of(other, pair.head)), target.close

        def close_both() -> None:
            neighbour.stop()
            close()

        target.close = close_both  # type: ignore[method-assign]
        return target

    # Next to another reply, passes of an EAGLE-1 head round by up to 6e-3, in 209 runs of one history. A
    # different token in its context changes the logits by at least 0.38.
    tolerance = 1.5e-2 if pair.head.method == "eagle" else 4e-3
    check_history(load, lambda target: head_of(target, pair.head), rounds, seed, tolerance=tolerance)


def test_the_last_view_frees_the_head_and_a_new_one_loads_it_again(pair: Pair) -> None:
    models = pair.load(3)
    tokens = list(range(20, 50))
    for _ in range(2):
        heads = [head_of(model, pair.head) for model in models]
        rows = []
        for model, head in zip(models, heads, strict=True):
            model.prefill(tokens[:-1])
            rows.append(first_logits(head, HeadCache(head), tokens))
            head.close()
            with pytest.raises(ClosedError):
                head.verify(TokenTree.chain(20))
            model.truncate(0)
        for row in rows[1:]:
            np.testing.assert_allclose(row, rows[0], rtol=0, atol=1e-3)
    for model in models:
        model.close()


def test_a_head_is_not_loaded_during_a_reply_if_that_would_remove_its_tokens(tmp_path: Path) -> None:
    pair = KINDS["medusa"](tmp_path)
    model, other = pair.load()
    model.prefill([20, 21, 22])
    with raises(CapabilityError, "generated"):
        other.self_draft(pair.head)
    model.verify(TokenTree.chain(23))
    model.truncate(0)
    head_of(other, pair.head).close()
    model.close()
    other.close()


def _two_heads(folder: Path) -> tuple[Pair, Pair]:
    """Return a target with an EAGLE head, and the same target with a Medusa head, which uses a hook."""
    medusa = _residual(folder, Layout("medusa"))
    return Pair(medusa.target, Head("eagle", write_eagle(folder / "head.gguf", layers=(0, 1, 2)))), medusa


def test_a_head_follows_a_target_whose_context_another_head_replaces(tmp_path: Path) -> None:
    eagle, medusa = _two_heads(tmp_path)
    tokens = list(range(20, 50))
    rows = []
    for others in ((), (medusa,)):
        models: list[Any] = eagle.load()
        head: Any = head_of(models[0], eagle.head)
        before = models[0].context._generation
        beside = [head_of(models[1], other.head) for other in others]
        assert models[0].context._generation - before == len(others)
        models[0].prefill(tokens[:-1])
        rows.append(first_logits(head, HeadCache(head), tokens))
        assert not head._context.whole.is_stale
        for each in (*beside, head, *models):
            each.close()
    np.testing.assert_allclose(rows[0], rows[1], rtol=0, atol=1e-3)


def test_a_context_that_cannot_be_reallocated_for_a_head_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, medusa = _two_heads(tmp_path)
    models: list[Any] = medusa.load()

    def no_memory(self: LlamaContext, plan: ContextPlan) -> None:
        self.release()
        raise MemoryBudgetError("no memory", "use fewer")

    with monkeypatch.context() as patch:
        patch.setattr(LlamaContext, "allocate", no_memory)
        with pytest.raises(MemoryBudgetError):
            head_of(models[0], medusa.head)
    for model in models:
        assert model._context.is_lost
        with pytest.raises(ContextFullError):
            model.prefill([20, 21])
        model.close()


@pytest.mark.parametrize("slots", [1, 2])
def test_a_target_without_memory_for_a_head_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    _, medusa = _two_heads(tmp_path)
    models: list[Any] = medusa.load(slots) if slots > 1 else [load(str(medusa.target), "target", OPTIONS)]
    models[0].prefill([20, 21])
    logits = models[0].verify(TokenTree.chain(22)).rows[0].copy()
    models[0].truncate(0 if slots > 1 else 2)
    allocate = LlamaContext.allocate

    def no_memory_for_all_rows(self: LlamaContext, plan: ContextPlan) -> None:
        self.release()
        if self.needs_all_rows:
            raise MemoryBudgetError("no memory", "use fewer")
        allocate(self, plan)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaContext, "allocate", no_memory_for_all_rows)
        with pytest.raises(MemoryBudgetError):
            head_of(models[0], medusa.head)
    for model in models:
        assert model.length == 0
        model.prefill([20, 21])
        np.testing.assert_allclose(model.verify(TokenTree.chain(22)).rows[0], logits, rtol=0, atol=1e-3)
        model.close()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda folder: _dflash(folder, window=8), "sliding-window"),
        (
            lambda folder: Pair(write_mtp_model(folder / "target.gguf", "step35", mtp_layers=3), Head("mtp")),
            "target.gguf",
        ),
    ],
    ids=["window", "chained"],
)
def test_heads_that_replies_cannot_share(tmp_path: Path, made: Callable[[Path], Pair], reason: str) -> None:
    pair = made(tmp_path)
    models = pair.load()
    for _ in range(2):
        with raises(CapabilityError, reason, code="parallel_not_supported") as caught:
            models[1].self_draft(pair.head)
        assert "omit --parallel" in str(caught.value)
    for model in models:
        model.close()
