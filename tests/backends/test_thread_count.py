"""The number of threads adapts to the load from other programs, and does not change the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp import loading
from edgespec.backends.llamacpp.context import ThreadCount
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.engine.tree import TokenTree
from edgespec.model.base import LoadOptions


def counts(loads: list[float], most: int = 4, cores: int = 4) -> list[int]:
    load = iter(loads)
    threads = ThreadCount(most, cores, lambda: next(load))
    return [threads.update() for _ in loads]


def test_a_busy_core_is_given_up_and_taken_back() -> None:
    assert counts([0.0, 0.2, 0.9, 1.0, 0.1, 2.5, 9.0, 0.0]) == [4, 4, 3, 3, 4, 1, 1, 4]


def test_a_load_between_the_thresholds_changes_nothing() -> None:
    assert counts([0.35, 0.45, 0.35, 0.25, 0.35]) == [4, 3, 3, 4, 4]


def test_idle_logical_cores_are_given_up_first() -> None:
    assert counts([1.0, 4.0, 5.0], most=4, cores=8) == [4, 4, 3]


def test_a_single_thread_needs_no_measurement() -> None:
    def fail() -> float:
        raise AssertionError

    assert ThreadCount(1, 8, fail).update() == 1


@given(st.lists(st.floats(0.0, 64.0)), st.integers(1, 16), st.integers(1, 32))
def test_the_number_is_always_valid(loads: list[float], most: int, cores: int) -> None:
    assert all(1 <= count <= most for count in counts(loads, most, cores))


@pytest.fixture
def changing_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every model start with three threads, and run each pass with another number."""
    monkeypatch.setattr(loading, "default_threads", lambda *_: 3)
    return change_threads(monkeypatch)


def change_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run all further passes with a different number of threads, and return the numbers."""
    used: list[int] = []

    def update(threads: ThreadCount) -> int:
        threads.current = (1, 2, 1, 3)[len(used) % 4]
        used.append(threads.current)
        return threads.current

    monkeypatch.setattr(ThreadCount, "update", update)
    return used


def use_one_thread(threads: ThreadCount) -> int:
    threads.current = 1
    return 1


@pytest.mark.long
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
def test_replies_do_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.setattr(loading, "default_threads", lambda *_: 3)
    # Use one thread until the model is loaded, because three threads on fewer cores make its trial slow.
    monkeypatch.setattr(ThreadCount, "update", use_one_thread)
    asked: dict[str, Any] = {"max_tokens": 8, "seed": 3, "temperature": temperature}
    methods = ("none", "model", "suffix", "model+suffix", "auto")
    with always_draft(), edgespec.load("demo", "demo-draft", methods=methods, context=256) as runtime:
        expected = runtime.generate("Write a list", method="none", **asked)
        used = change_threads(monkeypatch)
        for method in methods:
            reply = runtime.generate("Write a list", method=method, **asked)
            assert reply.tokens == expected.tokens, method
    assert set(used) == {1, 2, 3}


@pytest.mark.long
def test_logits_have_the_same_bits_with_any_number(demo_target: Path, changing_threads: list[int]) -> None:
    tokens = [int(token) for token in np.random.default_rng(1).integers(100, 400, 320)]
    rows = {}
    for threads in (2, None):
        options = LoadOptions(context_tokens=512, exact=True, threads=threads)
        model = llamacpp.load(str(demo_target), "demo", options)
        assert isinstance(model, LlamaCppModel)
        model.prefill(tokens[:270])
        found = []
        for token in tokens[270:276]:
            found.append(np.array(model.verify(TokenTree.chain(token)).at(0, np.arange(256))))
            model.commit(())
        chain = model.verify(TokenTree.chain(tokens[276], tokens[277:281]))
        found += [np.array(chain.at(row, np.arange(256))) for row in range(5)]
        rows[threads] = np.array(found)
        assert (model.threads in (1, 2, 3)) if threads is None else (model.threads == 2)
        model.close()
    assert set(changing_threads) == {1, 2, 3}
    np.testing.assert_array_equal(rows[2], rows[None])


def test_the_user_can_fix_the_number(demo_target: Path, changing_threads: list[int]) -> None:
    model = llamacpp.load(str(demo_target), "demo", LoadOptions(threads=2))
    model.prefill([1, 2, 3])
    model.close()
    assert not changing_threads


def test_the_number_can_be_fixed_for_a_while() -> None:
    threads = ThreadCount(4, cores=4, busy_cores=lambda: 3.0)
    threads.is_fixed = True
    assert threads.update() == 4
    threads.is_fixed = False
    assert threads.update() < 4


def test_a_resize_keeps_the_number(demo_target: Path, changing_threads: list[int]) -> None:
    model = llamacpp.load(str(demo_target), "demo", LoadOptions(context_tokens=512))
    model.prefill([1, 2, 3])
    before = model.threads
    model.resize(768)
    assert model.threads == before
    model.close()
    assert len(changing_threads) > 0
