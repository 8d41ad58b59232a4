"""Gemma 4 assistants draft from the target's KV cache, and change no reply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.mtp_files import check_assistant
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    CapabilityError,
    ContextFullError,
    MemoryBudgetError,
    ModelFileError,
)
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import Head, LanguageModel, LoadOptions
from edgespec.model.hidden_states import HeadModel
from edgespec.store.heads import head_options
from edgespec.store.reference import resolve
from tests.backends.gemma4_reference import GemmaReference
from tests.backends.head_histories import (
    BYTE_CHANGES,
    ROUNDS,
    Round,
    check_changed_bytes,
    check_history,
    check_same_replies,
    first_logits,
    overwritten,
)
from tests.backends.tiny_gemma4_models import WINDOW, Gemma4Shape, write_gemma4, write_gemma4_assistant
from tests.backends.tiny_models import WORDS, write_gemma3
from tests.cases import covering, first
from tests.raising import raises

CONTEXT = 512
# The metadata before the vocabulary, and the names and shapes of the tensors, lie within this many bytes.
_HEADER_BYTES = 12_000
# A text that is longer than the sliding window.
TEXT = list(range(10, 10 + 3 * WINDOW))
# Larger KV heads, whose values llama.cpp transforms before quantising them.
LARGE = Gemma4Shape(full=(1, 128), windowed=(1, 64))


class Case(NamedTuple):
    """The shape of a target and its head, and the options that both are loaded with."""

    shape: Gemma4Shape = Gemma4Shape()
    options: LoadOptions = LoadOptions(context_tokens=CONTEXT)


CASES = {
    "f16": Case(),
    "shared layers": Case(Gemma4Shape(shared_layers=2)),
    "no flash attention": Case(options=LoadOptions(context_tokens=CONTEXT, flash_attention="off")),
    "quantised": Case(LARGE, LoadOptions(context_tokens=CONTEXT, kv_type="q8_0")),
}


class Files:
    def __init__(self, folder: Path, case: Case = CASES["f16"]) -> None:
        self.target = write_gemma4(folder / "target.gguf", case.shape)
        # It would be found by itself if it lay beside the target.
        (folder / "heads").mkdir()
        self.head = write_gemma4_assistant(folder / "heads" / "mtp-target.gguf", case.shape)
        self.options = case.options

    def load(self) -> LanguageModel:
        return llamacpp.load(str(self.target), "target", self.options)

    def head_of(self, target: LanguageModel) -> HeadModel:
        return head_of(target, self.head)


def head_of(target: LanguageModel, path: Path) -> HeadModel:
    return cast(HeadModel, target.self_draft(Head("mtp", path)))


@pytest.fixture(scope="module", params=CASES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("gemma4"), CASES[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def target(plain: Files) -> Iterator[LanguageModel]:
    model = plain.load()
    yield model
    model.close()


@pytest.mark.long
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    files: Files, rounds: list[Round], seed: int
) -> None:
    check_history(files.load, files.head_of, rounds, seed, depth=3)


@pytest.mark.long
@pytest.mark.parametrize(("temperature", "branches"), covering((0.0, 0.8, 1.2), ((), (2, 2))))
def test_no_reply_changes(files: Files, branches: tuple[int, ...], temperature: float) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": temperature, "seed": 3}
    options: dict[str, Any] = {"methods": ["none", "mtp"], "draft_branches": branches, "context": CONTEXT}
    options |= {"head": files.head, "kv_type": files.options.kv_type}
    options |= {"flash_attention": files.options.flash_attention}
    with always_draft(), edgespec.load(str(files.target), "none", **options) as runtime:
        reply = runtime.generate("the file", method="mtp", **asked)
        assert reply.tokens == runtime.generate("the file", method="none", **asked).tokens
        assert 0 < reply.stats.accepted_tokens < reply.stats.drafted_tokens


def test_the_head_computes_what_a_reference_does(files: Files) -> None:
    """This includes trees, whose nodes all have the position of the last emitted token."""
    if files.options.kv_type == "q8_0":
        pytest.skip("quantised keys and values differ")
    target = files.load()
    head = files.head_of(target)
    target.prefill(TEXT)
    tree = TokenTree((70, 71, 72, 73, 74), (-1, 0, 0, 1, 2), (None,) * 5)
    reference = GemmaReference(files.target, files.head, TEXT)
    drafted = head.verify(tree)
    states = {-1: reference.state}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        logits, states[node] = reference.draft_step(token, states[parent])
        np.testing.assert_allclose(drafted.at(node, np.arange(len(logits))), logits, rtol=0, atol=0.1)
    head.close()
    target.close()


@pytest.mark.long
def test_loading_a_head_keeps_the_text_in_the_cache(files: Files) -> None:
    """llama.cpp clears the target's KV cells when it creates a context that reads them."""
    target = files.load()
    target.prefill(TEXT)
    drafts = []
    for _ in range(2):
        head = files.head_of(target)
        target.verify(TokenTree.chain(TEXT[-1] + 1))
        target.commit(())
        drafts.append(head.verify(TokenTree.chain(80)).at(0, np.arange(100)))
        head.close()
        assert target.length == len(TEXT) + 1
        target.truncate(len(TEXT))
    fresh = files.load()
    head = files.head_of(fresh)
    fresh.prefill([*TEXT, TEXT[-1] + 1])
    expected = head.verify(TokenTree.chain(80)).at(0, np.arange(100))
    np.testing.assert_allclose(drafts, [expected] * 2, rtol=0, atol=1e-3)
    head.close()
    fresh.close()
    target.close()


def test_the_target_frees_its_cells_after_the_head(plain: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's context of the head has a pointer to them."""
    target = cast(LlamaCppModel, plain.load())
    head = plain.head_of(target)
    (reader,) = target.context.kv_readers
    freed: list[Any] = []
    free = reader._lib.llama_free

    def record(context: Any) -> None:
        freed.append(context)
        free(context)

    monkeypatch.setattr(reader._lib, "llama_free", record)
    for _ in range(2):
        contexts = [reader.handle, target.context.handle]
        target.resize(256 if target.facts.context_tokens == CONTEXT else CONTEXT)
        assert freed == contexts
        assert reader.tokens == target.context.tokens == head.facts.context_tokens
        freed.clear()
    contexts = [reader.handle, target.context.handle]
    target.close()
    assert freed == contexts
    head.close()


def test_a_head_without_memory_does_not_draft_until_the_next_resize(
    target: LanguageModel, plain: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = plain.head_of(target)
    cache = HeadCache(head)
    target.prefill(TEXT[:-1])
    expected = first_logits(head, cache, TEXT)
    (reader,) = cast(LlamaCppModel, target).context.kv_readers
    with monkeypatch.context() as patch:
        patch.setattr(reader, "allocate", no_memory)
        target.resize(256)
    assert target.length == len(TEXT) - 1
    assert head.free_tokens == 0
    assert not cache.can_draft(head.free_tokens)
    with pytest.raises(ContextFullError):
        head.verify(TokenTree.chain(1))
    target.resize(CONTEXT)
    assert np.array_equal(first_logits(head, cache, TEXT), expected)
    head.close()


def no_memory(_plan: ContextPlan) -> None:
    raise MemoryBudgetError("no memory", "use less")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Gemma4Shape(size=48), "hidden states of size 48, not 32"),
        (Gemma4Shape(words=WORDS[:-1]), "a vocabulary"),
        (Gemma4Shape(full=(2, 32)), "2 KV heads of size 32 for its layer 2, not 1 KV head of size 32"),
        (Gemma4Shape(windowed=(2, 32)), "2 KV heads of size 32 for its layer 0, not 2 KV heads of size 16"),
    ],
)
def test_a_head_for_another_target_is_one_clear_error(
    target: LanguageModel, tmp_path: Path, shape: Gemma4Shape, message: str
) -> None:
    """llama.cpp would end the process, or read other memory."""
    path = write_gemma4_assistant(tmp_path / "head.gguf", shape)
    with raises(CapabilityError, code="head_mismatch") as caught:
        head_of(target, path)
    assert message in caught.value.what


def test_the_targets_last_layers_must_be_of_both_kinds(plain: Files, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"attention.sliding_window_pattern": [False, True, False, True]}
    path = write_gemma4(tmp_path / "t.gguf", **changes)
    with raises(CapabilityError, "window in", code="head_mismatch"):
        check_assistant(plain.head, path, "target")


def test_a_target_of_another_architecture_is_refused(plain: Files, tmp_path: Path) -> None:
    path = write_gemma3(tmp_path / "gemma3.gguf")
    with raises(CapabilityError, "'gemma4'", code="head_mismatch"):
        check_assistant(plain.head, path, "target")
    with raises(CapabilityError, code="head_mismatch"):
        edgespec.load(str(path), "none", head=plain.head, context=256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nextn_predict_layers": 0}, "layers must all be MTP layers"),
        ({"nextn_predict_layers": 2}, "layers must all be MTP layers"),
        ({"attention.sliding_window_pattern": [True] * 3}, "layers must all be MTP layers"),
        ({"attention.sliding_window_pattern": [True, False]}, "layers must all be MTP layers"),
        ({"attention.sliding_window": 0}, "does not state the size of its sliding window"),
        ({"attention.head_count": 3}, "has 3 heads, but 2 KV heads"),
        ({"attention.head_count_kv": [2, 2, 0]}, "has 2 heads, but 0 KV heads"),
        ({"attention.value_length": 16}, "has keys of size 32 but values of size 16"),
        ({"rope.dimension_count": 34}, "applies RoPE to 34 of 32 dimensions"),
        ({"rope.dimension_count": 0}, "applies RoPE to 0 of 32 dimensions"),
        ({"rope.dimension_count_swa": 7}, "applies RoPE to 7 of 16 dimensions"),
    ],
)
def test_metadata_that_would_end_the_process_is_refused(
    plain: Files, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_gemma4_assistant(tmp_path / "head.gguf", **changes)
    with raises(ModelFileError, "damaged") as caught:
        check_assistant(path, plain.target, "target")
    assert message in caught.value.what


@pytest.mark.parametrize(
    "tensor", ["nextn.pre_projection.weight", "nextn.post_projection.weight", "rope_freqs.weight"]
)
def test_an_incomplete_head_is_refused(target: LanguageModel, tmp_path: Path, tensor: str) -> None:
    with pytest.raises(ModelFileError):
        head_of(target, write_gemma4_assistant(tmp_path / "head.gguf", without=tensor))


@pytest.mark.long
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("text", [[], TEXT])
def test_a_head_whose_logits_are_not_finite_is_refused(
    target: LanguageModel, plain: Files, tmp_path: Path, value: float, text: list[int]
) -> None:
    target.prefill(text)
    with raises(ModelFileError, "not finite"):
        head_of(target, overwritten(write_gemma4_assistant(tmp_path / "head.gguf"), "attn_output", value))
    assert target.length == len(text)
    plain.head_of(target).close()


@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_a_useless_head_changes_no_reply(plain: Files, tmp_path: Path, temperature: float) -> None:
    check_same_replies(
        plain.target,
        "mtp",
        overwritten(write_gemma4_assistant(tmp_path / "head.gguf"), "attn_output", 1e30),
        [temperature],
    )


@settings(max_examples=4, deadline=None)
@given(BYTE_CHANGES)
def test_random_bytes_in_a_file_give_an_error_or_the_same_reply(
    plain: Files, changes: list[tuple[int, int]]
) -> None:
    check_changed_bytes(plain.target, "mtp", plain.head, changes, _HEADER_BYTES)


def test_the_plan_counts_the_head(plain: Files) -> None:
    def planned(method: str, **options: Any) -> dict[str, int]:
        plan = edgespec.plan(str(plain.target), "none", method=method, context=256, **options).plan
        return {item.name: item.bytes for item in plan.items}

    without, planned_bytes = planned("none"), planned("mtp", head=plain.head)
    assert planned_bytes["target weights"] == without["target weights"]
    assert planned_bytes["head weights"] == plain.head.stat().st_size
    # The head has no KV cache.
    head_items = {name for name in planned_bytes if name.startswith("head ") and planned_bytes[name]}
    assert head_items == {"head weights", "head compute buffers", "head logits"}


def test_a_sidecar_is_found_by_itself(tmp_path: Path) -> None:
    target = write_gemma4(tmp_path / "target.gguf")
    head = write_gemma4_assistant(tmp_path / "mtp-target.gguf")
    write_gemma4_assistant(tmp_path / "mtp-other.gguf", Gemma4Shape(size=48))
    resolved = resolve(str(target))
    (option,) = head_options(resolved)
    assert (option.kind, option.head, option.is_usable) == ("MTP", Head("mtp", head), True)
    with always_draft(), edgespec.load(str(target), "none", method="mtp", context=256) as runtime:
        assert [each.path for each in runtime.heads] == [str(head)]
        assert runtime.generate("the file", max_tokens=20, temperature=0.0).stats.drafted_tokens


def test_several_replies_at_once_cannot_use_the_head(plain: Files) -> None:
    with raises(CapabilityError, code="parallel_not_supported"):
        edgespec.load(str(plain.target), "none", head=plain.head, parallel=2, context=256)
