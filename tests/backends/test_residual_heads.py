"""Medusa and Hydra heads follow the target through any history, and no head changes a reply."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import edgespec
from edgespec.api.loading import always_draft
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError, EdgespecError, MemoryBudgetError, ModelFileError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import LanguageModel
from edgespec.model.formats.head_files import head_at
from edgespec.model.hidden_states import POST_NORM, HeadModel, HiddenStateSource
from edgespec.model.registry import format_at
from tests.backends.head_histories import ROUNDS, Round, check_history, first_logits
from tests.backends.residual_targets import CONTEXT, GgufTarget, MlxTarget, Target
from tests.cases import covering, first
from tests.model.heads.residual_files import (
    LAYOUTS,
    Attention,
    Layout,
    fitted_arrays,
    random_arrays,
    write_heads,
)
from tests.model.heads.torch_files import Call, Named, pickled, write_archive
from tests.raising import raises

MEDUSA, HYDRA = Layout("medusa"), Layout("hydra", ".pt", grounded=True)
PREFIX = Layout("hydra", grounded=True, prefix=True, dropouts=True)
# Nodes of equal depth, some with children, so that heads must give some nodes the same row and others
# different rows.
TREE = TokenTree((20, 5, 9, 14, 5, 30), (-1, 0, 0, 1, 2, 2), (None,) * 6)


@pytest.fixture(scope="module", params=[GgufTarget, MlxTarget], ids=["llama.cpp", "MLX"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    found: Target = request.param(tmp_path_factory.mktemp("residual"))
    return found


@pytest.fixture(scope="module")
def gguf_target(tmp_path_factory: pytest.TempPathFactory) -> GgufTarget:
    return GgufTarget(tmp_path_factory.mktemp("residual"))


@pytest.fixture
def model(target: Target) -> Iterator[LanguageModel]:
    model = target.load()
    yield model
    model.close()


def view_of(model: LanguageModel, path: Path) -> HeadModel:
    return cast(HeadModel, model.self_draft(head_at(path)))


def catch_up(view: HeadModel, tokens: list[int]) -> HeadCache:
    cache = HeadCache(view)
    cache.begin(tokens)
    cache.prefill()
    assert cache.can_draft(8)
    return cache


def rows_of(view: HeadModel, tree: TokenTree, first: int = 0) -> NDArray[np.float64]:
    logits = view.verify(tree, first)
    return np.array([logits.at(row, np.arange(view.facts.vocab_size)) for row in range(len(logits))])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_node_of_a_tree_gets_the_logits_of_its_head(
    target: Target, model: LanguageModel, layout: Layout
) -> None:
    tree = TREE.pruned(1 << 20, layout.count - 1)
    tolerance = target.tolerances.get(layout.dtype, 1e-3)
    source = cast(HiddenStateSource, model)
    log = source.log_hidden_states([POST_NORM])
    view = view_of(model, target.head(layout))
    tokens = [*range(40, 60), tree.tokens[0]]
    model.prefill(tokens[:-1])
    catch_up(view, tokens)
    rows = rows_of(view, tree)
    # No hidden state precedes the first token. The first one that a head reads is that of the first token.
    states = log.rows(0, len(tokens) - 1)
    for at in range(tree.width):
        node = at
        path = [tree.tokens[node]]
        while (node := tree.parents[node]) >= 0:
            path.insert(0, tree.tokens[node])
        expected = target.plain_logits(layout, states, path)
        np.testing.assert_allclose(rows[at], expected, rtol=0, atol=tolerance)
    # Grow the tree level by level, as drafters do, because kernels for other row counts can round
    # differently.
    sizes = [sum(depth <= limit for depth in tree.depths) for limit in range(max(tree.depths) + 1)]
    for begin, end in zip([0, *sizes], sizes, strict=False):
        part = tree.subtree(range(end))
        np.testing.assert_allclose(rows_of(view, part, begin), rows[begin:end], rtol=0, atol=tolerance / 10)
    view.close()


@pytest.mark.parametrize("offset", [1, 3])
def test_heads_can_read_the_hidden_state_before_the_last_layers(
    target: Target, model: LanguageModel, tmp_path: Path, offset: int
) -> None:
    if offset == 3:
        with raises(CapabilityError, code="head_mismatch"):
            view_of(model, write_heads(tmp_path, HYDRA, target.arrays(HYDRA), hidden_state_offset=3))
        return
    log = cast(HiddenStateSource, model).log_hidden_states([target.layers - offset])
    view = view_of(model, write_heads(tmp_path, HYDRA, target.arrays(HYDRA), hidden_state_offset=offset))
    model.prefill([*range(40, 60)])
    rows = rows_of(view, TokenTree.chain(7))
    expected = target.plain_logits(HYDRA, log.rows(0, 20), [7])
    np.testing.assert_allclose(rows[0], expected, rtol=0, atol=1e-3)
    view.close()


@pytest.mark.parametrize(("name", "layout"), covering(("target", "recurrent"), (HYDRA, PREFIX)), ids=str)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    target: Target, name: str, layout: Layout, rounds: list[Round], seed: int
) -> None:
    head = target.head(layout)
    check_history(lambda: target.load(name), lambda model: view_of(model, head), rounds, seed, depth=3)


@pytest.mark.long
@pytest.mark.parametrize("layout", [MEDUSA, HYDRA, PREFIX], ids=str)
def test_heads_wait_for_a_hidden_state_after_a_restored_prefix(
    target: Target, model: LanguageModel, layout: Layout
) -> None:
    tokens = list(range(10, 40))
    model.prefill(tokens)
    snapshot = model.snapshot()
    other = target.load()
    view = view_of(other, target.head(layout))
    cache = HeadCache(view)
    other.restore(snapshot)
    cache.begin([*tokens, 50])
    cache.prefill()
    assert not cache.can_draft(8)
    other.verify(TokenTree.chain(50, [51]))
    other.commit((1,))
    assert np.isfinite(first_logits(view, cache, [*tokens, 50, 51, 52])).all()
    view.close()
    other.close()


def test_a_draft_longer_than_the_number_of_heads_is_refused(target: Target, model: LanguageModel) -> None:
    view = view_of(model, target.head(MEDUSA))
    assert view.facts.capabilities.max_draft_length == 3
    model.prefill([1, 2, 3])
    view.verify(TokenTree.chain(4, [5, 6]))
    with raises(CapabilityError, "3 tokens", code="draft_too_wide"):
        view.verify(TokenTree.chain(4, [5, 6, 7]))
    view.close()


@pytest.mark.parametrize("layout", [MEDUSA, PREFIX], ids=str)
def test_heads_can_be_interrupted_and_closed(target: Target, model: LanguageModel, layout: Layout) -> None:
    view = view_of(model, target.head(layout))
    tokens = list(range(10, 40))
    model.prefill(tokens)
    view.interrupt(True)
    with pytest.raises(CancelledError):
        view.verify(TokenTree.chain(4))
    view.interrupt(False)
    catch_up(view, [*tokens, 4])
    assert rows_of(view, TokenTree.chain(4)).any()
    view.close()
    view.close()
    model.prefill([1, 2, 3])
    assert model.verify(TokenTree.chain(4)).at(0, np.arange(target.vocab)).any()


def test_several_heads_can_be_open_at_once(target: Target, model: LanguageModel) -> None:
    views = [view_of(model, target.head(layout)) for layout in (MEDUSA, HYDRA)]
    model.prefill([7, 8, 9])
    rows = [rows_of(view, TokenTree.chain(4)) for view in views]
    views[0].close()
    model.prefill([4])
    assert not np.allclose(rows[0], rows[1])
    assert rows_of(views[1], TokenTree.chain(5)).any()
    views[1].close()


@pytest.mark.parametrize(
    ("size", "vocab", "message"), [(16, 0, "hidden states of size 16"), (0, 1, "a vocabulary of size")]
)
def test_heads_for_another_target_are_refused(
    target: Target, model: LanguageModel, tmp_path: Path, size: int, vocab: int, message: str
) -> None:
    arrays = random_arrays(MEDUSA, size or target.size, target.vocab + vocab)
    with raises(CapabilityError, code="head_mismatch") as caught:
        view_of(model, write_heads(tmp_path, MEDUSA, arrays))
    assert message in caught.value.what
    # The model does not log hidden states for the rejected head.
    model.prefill([1, 2, 3])


def test_hydra_heads_with_other_attention_heads_are_refused(
    target: Target, model: LanguageModel, tmp_path: Path
) -> None:
    # The head's keys are smaller than those of a head made for the target.
    arrays = random_arrays(PREFIX, target.size, target.vocab, Attention(heads=8, kv_heads=1))
    with raises(CapabilityError, code="head_mismatch"):
        view_of(model, write_heads(tmp_path, PREFIX, arrays))


def test_damaged_heads_are_refused(target: Target, model: LanguageModel, tmp_path: Path) -> None:
    arrays = target.arrays(MEDUSA)
    arrays["1.1.weight"][7, 3] = np.nan
    with raises(ModelFileError, "infinite or NaN"):
        view_of(model, write_heads(tmp_path, MEDUSA, arrays))


@pytest.mark.parametrize("layout", first(LAYOUTS, 2), ids=str)
def test_the_plan_counts_what_heads_need(target: Target, model: LanguageModel, layout: Layout) -> None:
    head = head_at(target.head(layout))
    planned = format_at(target.path).estimate_head(head, target.path, CONTEXT)
    view = view_of(model, target.head(layout))
    assert planned.bytes_of("weights") == view.facts.weight_bytes
    assert planned.bytes_of("cache") == view.facts.kv_bytes
    model.resize(256)
    assert 2 * view.facts.kv_bytes == planned.bytes_of("cache")
    view.close()


def test_heads_that_do_not_fit_in_memory_are_refused(target: Target, model: LanguageModel) -> None:
    without = model.facts.weight_bytes + model.facts.max_kv_bytes
    limited = target.load(memory_bytes=without + 10_000)
    with raises(MemoryBudgetError, "of target"):
        view_of(limited, target.head(MEDUSA))
    limited.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "branches"), covering((PREFIX, HYDRA, MEDUSA), ((2, 2), (), "auto")), ids=str
)
def test_no_head_changes_a_reply(target: Target, layout: Layout, branches: Any) -> None:
    head = target.head(layout)
    methods = [layout.method, f"{layout.method}+suffix"]
    # The last reply may use only two tokens, so that random heads are sometimes right.
    asked: list[dict[str, Any]] = [
        {"max_tokens": 16, "temperature": 0.0},
        {"max_tokens": 16, "temperature": 0.8, "seed": 3},
        {"max_tokens": 16, "temperature": 0.8, "seed": 4, "logit_bias": {70: 60.0, 80: 60.0}},
    ]
    with edgespec.load(str(target.path), "none", method="none", context=256) as plain:
        expected = [plain.generate("the file", **ask).tokens for ask in asked]
    with (
        always_draft(),
        edgespec.load(
            str(target.path), "none", methods=methods, method=layout.method, head=str(head),
            draft_branches=branches, draft_length=8, context=256,
        ) as drafting,
    ):  # fmt: skip
        for method in methods:
            replies = [drafting.generate("the file", method=method, **ask) for ask in asked]
            assert [reply.tokens for reply in replies] == expected
            # Adaptive trees may draft nothing, because random heads are hardly ever right.
            if branches != "auto":
                assert all(reply.stats.drafted_tokens for reply in replies)
                assert replies[-1].stats.accepted_tokens


@pytest.mark.long
@pytest.mark.parametrize("layout", first([HYDRA, MEDUSA]), ids=str)
def test_heads_that_are_often_right_change_no_reply(target: Target, layout: Layout, tmp_path: Path) -> None:
    prompt = list(range(40, 60))
    # The replies use only a few different tokens, so that small heads can learn them.
    likely = dict.fromkeys((65, 70, 75, 80), 60.0)
    asked: list[dict[str, Any]] = [
        {"max_tokens": 32, "temperature": temperature, "seed": 3, "logit_bias": likely}
        for temperature in (0.0, 0.8, 1.2)
    ]

    def replies_of(runtime: edgespec.Runtime) -> list[edgespec.Reply]:
        replies = []
        for ask in asked:
            stream = runtime.stream_tokens(prompt, **ask)
            deque(stream, maxlen=0)
            replies.append(stream.reply)
        return replies

    with edgespec.load(str(target.path), "none", method="none", context=256) as plain:
        expected = [reply.tokens for reply in replies_of(plain)]
    texts = [[*prompt, *tokens] for tokens in expected]
    model, states = target.load(), []
    log = cast(HiddenStateSource, model).log_hidden_states([POST_NORM])
    for text in texts:
        model.truncate(0)
        model.prefill(text)
        states.append(np.array(log.rows(0, len(text))))
    model.close()
    head = write_heads(tmp_path, layout, fitted_arrays(layout, states, texts, len(prompt), target.table))
    for branches in ((), (2, 2)):
        with (
            always_draft(),
            edgespec.load(
                str(target.path), "none", method=layout.method, head=str(head), draft_branches=branches,
                context=256,
            ) as drafting,
        ):  # fmt: skip
            replies = replies_of(drafting)
        assert [reply.tokens for reply in replies] == expected
        for reply in replies:
            assert reply.stats.generated_tokens > 2 * reply.stats.target_passes
            # Whole drafts were accepted too.
            assert reply.stats.accepted_per_position[-1]


@pytest.mark.long
@pytest.mark.parametrize("value", first([3e38, -1e30]))
def test_heads_with_huge_weights_change_no_reply(target: Target, tmp_path: Path, value: float) -> None:
    arrays = {name: np.full_like(array, value) for name, array in target.arrays(HYDRA).items()}
    head = write_heads(tmp_path, HYDRA, arrays)
    with (
        always_draft(),
        edgespec.load(str(target.path), "none", method="none", context=256) as plain,
        edgespec.load(str(target.path), "none", method="hydra", head=str(head), context=256) as drafting,
    ):
        for temperature in (0.0, 0.8):
            asked: dict[str, Any] = {"max_tokens": 16, "temperature": temperature, "seed": 3}
            assert drafting.generate("the file", **asked).tokens == plain.generate("the file", **asked).tokens


@pytest.mark.long
def test_the_file_with_the_weights_can_be_named(target: Target) -> None:
    file = target.head(HYDRA) / "hydra_lm_head.pt"
    with edgespec.load(str(target.path), "none", method="hydra", head=str(file), context=256) as runtime:
        assert runtime.generate("the file", max_tokens=8).stats.drafted_tokens


def test_a_pickle_that_calls_functions_is_one_clear_error(target: Target, tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "head", HYDRA, target.arrays(HYDRA))
    touched = tmp_path / "touched"
    program = pickled({"hydra_mlp.0.0.linear.weight": Call(Named("os", "system"), f"touch {touched}")})
    write_archive(folder / "hydra_lm_head.pt", program)
    with raises(ModelFileError, code="model_file_not_supported"):
        edgespec.load(str(target.path), "none", method="hydra", head=str(folder), context=256)
    assert not touched.exists()


def test_heads_can_draft_in_another_thread(target: Target, model: LanguageModel) -> None:
    """`edgespec chat` loads models in one thread and generates replies in another."""
    view = view_of(model, target.head(PREFIX))
    tokens = list(range(10, 40))
    rows = []

    def draft() -> None:
        model.prefill(tokens[:-1])
        catch_up(view, tokens)
        rows.append(rows_of(view, TokenTree.chain(tokens[-1], [4, 5])))

    thread = threading.Thread(target=draft)
    thread.start()
    thread.join()
    assert np.isfinite(rows[0]).all()
    view.close()


@pytest.mark.long
def test_auto_drafts_with_the_head(target: Target) -> None:
    with (
        always_draft(),
        edgespec.load(str(target.path), head=str(target.head(MEDUSA)), context=256) as runtime,
    ):
        assert "medusa" in runtime.method.effective
        assert runtime.generate("the file", max_tokens=8).tokens


def test_a_head_for_another_method_is_refused(target: Target) -> None:
    with raises(EdgespecError, "method medusa", code="method_unavailable"):
        edgespec.load(str(target.path), "none", method="eagle", head=str(target.head(MEDUSA)), context=256)
