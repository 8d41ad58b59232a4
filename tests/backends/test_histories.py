"""After any sequence of accepted and rejected drafts, every backend's cache equals a fresh prefill."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.errors import ContextFullError
from edgespec.model.base import LanguageModel
from tests.backends.contract import TREES, cut, fresh, path_to, same, step, tokens_for, tokens_to, tree_of

rounds = st.lists(
    st.tuples(
        st.sampled_from(list(TREES.values())),
        st.integers(0, 11),
        st.integers(0, 10_000),
        st.sampled_from(
            ["commit", "commit", "commit", "give up", "truncate", "prefill", "snapshot", "restore"]
        ),
    ),
    min_size=1,
    max_size=10,
)


class TestHistories:
    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(rounds)
    def test_any_history(
        self, shared_model: LanguageModel, history: list[tuple[tuple[int, ...], int, int, str]]
    ) -> None:
        self.check(shared_model, history, start=20)

    @settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(rounds)
    def test_any_history_near_the_end_of_the_context(
        self, shared_model: LanguageModel, history: list[tuple[tuple[int, ...], int, int, str]]
    ) -> None:
        self.check(shared_model, history, start=shared_model.facts.context_tokens - 24)

    @pytest.mark.long
    @settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(rounds)
    def test_very_many_histories(
        self, shared_model: LanguageModel, history: list[tuple[tuple[int, ...], int, int, str]]
    ) -> None:
        self.check(shared_model, history, start=history[0][2] % 480)

    @staticmethod
    def check(model: LanguageModel, history: list[tuple[tuple[int, ...], int, int, str]], start: int) -> None:
        model.truncate(0)
        kept = tokens_for(model, start, 9)
        model.prefill(kept)
        saved = (model.snapshot(), list(kept))
        for shape, pick, seed, what in history:
            if not model.facts.capabilities.tree:
                shape = tuple(range(-1, len(shape) - 1))
            tree = tree_of(model, shape, seed)
            if what == "truncate":
                del kept[max(1, len(kept) - pick) :]
                cut(model, kept)
            elif what == "snapshot":
                saved = (model.snapshot(), list(kept))
            elif what == "restore":
                model.restore(saved[0])
                kept = list(saved[1])
            elif tree.width > model.free_tokens:
                with pytest.raises(ContextFullError):
                    model.verify(tree)
            elif what == "prefill":
                model.prefill(tree.tokens)
                kept += tree.tokens
            else:
                model.verify(tree)
                if what == "commit":
                    node = pick % tree.width
                    model.commit(path_to(tree, node))
                    kept += tokens_to(tree, node)
            assert model.length == len(kept)
        if not model.free_tokens:
            kept.pop()
            cut(model, kept)
        got = step(model, 4)
        same(model, got, fresh(model, [*kept, 4]))
