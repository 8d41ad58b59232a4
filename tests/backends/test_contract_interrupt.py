"""The contract of LanguageModel for interrupts and closed models, tested on every backend."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    CancelledError,
    ClosedError,
)
from edgespec.model.base import LanguageModel
from tests.backends.conftest import CONTEXT
from tests.backends.contract import (
    cut,
    fresh,
    same,
    step,
    tokens_for,
)
from tests.cases import first


class TestInterrupt:
    def test_no_pass_runs_until_the_interrupt_is_lifted(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 30)
        expected = fresh(model, [*tokens, 4])
        model.truncate(0)
        model.prefill(tokens)
        model.interrupt(True)
        for forbidden in (lambda: model.prefill([4, 5]), lambda: model.verify(TokenTree.chain(4, [5]))):
            with pytest.raises(CancelledError):
                forbidden()
            assert model.length == 30
        model.interrupt(False)
        same(model, step(model, 4), expected)

    def test_an_interrupt_ends_a_growing_round(self, model: LanguageModel) -> None:
        tokens = tokens_for(model, 30)
        model.prefill(tokens)
        model.verify(TokenTree.chain(4, [5]))
        model.interrupt(True)
        with pytest.raises(CancelledError):
            model.verify(TokenTree.chain(4, [5, 6]), 2)
        model.interrupt(False)
        assert model.length == 30
        same(model, step(model, 4), fresh(model, [*tokens, 4]))

    @pytest.mark.parametrize(
        "delay",
        first([0.002, 0.0, 0.0005, 0.005, 0.01, 0.02, 0.05]),
    )
    @pytest.mark.parametrize("work", ["prefill", "verify"])
    def test_from_another_thread_at_any_moment(self, model: LanguageModel, work: str, delay: float) -> None:
        tokens = tokens_for(model, 20)
        model.prefill(tokens)
        more = tokens_for(model, min(480, model.free_tokens), 3)
        wide = TokenTree.chain(more[0], more[1 : min(model.facts.capabilities.max_width, len(more))])
        timer = threading.Timer(delay, model.interrupt, [True])
        timer.start()
        try:
            run: Callable[[], object] = (
                (lambda: model.prefill(more)) if work == "prefill" else (lambda: model.verify(wide))
            )
            run()
        except CancelledError:
            pass
        finally:
            timer.join()
            model.interrupt(False)
        known = (tokens + more)[: min(model.length, CONTEXT - 1)] if work == "prefill" else tokens
        cut(model, known)
        same(model, step(model, 4), fresh(model, [*known, 4]))


class TestClosing:
    def test_closing_twice_does_nothing(self, own_model: LanguageModel) -> None:
        own_model.close()
        own_model.close()

    def test_every_call_after_close_raises(self, own_model: LanguageModel) -> None:
        own_model.prefill([3, 4])
        own_model.verify(TokenTree.chain(5, [6]))
        snapshot = own_model.snapshot()
        own_model.verify(TokenTree.chain(5, [6]))
        own_model.close()
        calls: list[Callable[[], object]] = [
            lambda: own_model.prefill([3]),
            lambda: own_model.prefill_prompt([3, 4]),
            lambda: own_model.verify(TokenTree.chain(3)),
            lambda: own_model.commit(()),
            lambda: own_model.truncate(0),
            own_model.snapshot,
            lambda: own_model.restore(snapshot),
        ]
        for call in calls:
            with pytest.raises(ClosedError):
                call()
        own_model.interrupt(True)
        own_model.interrupt(False)
