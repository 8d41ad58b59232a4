"""EAGLE-3 heads follow the target through any history, and no head changes a reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp import state_taps
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ModelFileError, ModelNotFoundError, OptionError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import Head, LanguageModel, LoadOptions
from edgespec.model.hidden_states import HiddenStateLog
from tests.backends.head_histories import (
    ROUNDS,
    Round,
    check_history,
    check_same_replies,
    first_logits,
    overwritten,
)
from tests.backends.published_heads import VOCAB, write_published
from tests.backends.tiny_heads import write_eagle
from tests.backends.tiny_models import write_gemma2, write_jamba, write_lfm2, write_llama, write_mamba
from tests.cases import first
from tests.raising import raises

CONTEXT = 512


class Files:
    """A target and its head."""

    def __init__(self, target: Path, layers: tuple[int, int, int]) -> None:
        self.target = target
        self.head = write_eagle(target.with_name(f"{target.stem}-head.gguf"), layers=layers)

    def load_any(self, context: int = CONTEXT) -> LanguageModel:
        return llamacpp.load(str(self.target), "target", LoadOptions(context_tokens=context))

    def load(self) -> LlamaCppModel:
        model = self.load_any()
        assert isinstance(model, LlamaCppModel)
        return model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(write_llama(tmp_path_factory.mktemp("eagle") / "target.gguf", layers=3), (0, 1, 2))


# Targets with layer taps, without them, with a sliding window, and with recurrent layers. For LFM2, llama.cpp
# can undo the most recent tokens.
KINDS: dict[str, tuple[Callable[[Path], Path], tuple[int, int, int]]] = {
    "llama": (partial(write_llama, layers=3), (0, 1, 2)),
    "qwen2": (partial(write_llama, architecture="qwen2", layers=3), (1, 1, 2)),
    "gemma2": (write_gemma2, (1, 1, 1)),
    "mamba": (partial(write_mamba, layers=3), (1, 1, 2)),
    "jamba": (write_jamba, (1, 1, 1)),
    "lfm2": (write_lfm2, (0, 1, 1)),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    folder = tmp_path_factory.mktemp("kinds")
    return {name: Files(write(folder / f"{name}.gguf"), layers) for name, (write, layers) in KINDS.items()}


@pytest.fixture
def target(files: Files) -> Iterator[LlamaCppModel]:
    model = files.load()
    yield model
    model.close()


def head_of(target: LanguageModel, path: Path) -> PairHead:
    head = target.self_draft(Head("eagle", path))
    assert isinstance(head, PairHead)
    return head


@pytest.mark.long
@pytest.mark.parametrize("kind", first(KINDS, 3))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    kinds: dict[str, Files], kind: str, rounds: list[Round], seed: int
) -> None:
    files = kinds[kind]
    check_history(files.load_any, lambda target: head_of(target, files.head), rounds, seed)


def test_a_restored_prefix_has_no_hidden_states_so_the_head_starts_after_it(
    files: Files, target: LlamaCppModel
) -> None:
    tokens = list(range(10, 40))
    target.prefill(tokens)
    snapshot = target.snapshot()
    other = files.load()
    head = head_of(other, files.head)
    cache = HeadCache(head)
    other.restore(snapshot)
    cache.begin([*tokens, 50])
    assert not cache.can_draft(8)
    cache.prefill()
    assert not cache.can_draft(8)
    other.verify(TokenTree.chain(50, [51]))
    other.commit((1,))
    assert np.isfinite(first_logits(head, cache, [*tokens, 50, 51, 52])).any()
    head.close()
    other.close()


def test_the_log_keeps_the_last_rows() -> None:
    log = HiddenStateLog(2, max_tokens=4)
    rows = np.arange(20, dtype=np.float32).reshape(10, 2)
    log.append(0, rows[:3])
    log.append(3, rows[3:9])
    assert (log.start, log.end) == (5, 9)
    assert np.array_equal(log.rows(5, 9), rows[5:9])
    assert not log.rows(4, 5).any()
    log.truncate(7)
    log.append(7, rows[9:])
    assert np.array_equal(log.rows(6, 8), rows[[6, 9]])
    log.append(20, rows[:1])
    assert (log.start, log.end) == (20, 21)


def test_a_head_can_be_closed_after_its_target(files: Files) -> None:
    target = files.load()
    head = head_of(target, files.head)
    target.close()
    head.close()


def test_closing_a_head_stops_reading_hidden_states(target: LlamaCppModel, files: Files) -> None:
    head_of(target, files.head).close()
    target.prefill([1, 2, 3])
    assert target.verify(TokenTree.chain(4)).at(0, np.arange(VOCAB)).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 16}, "hidden states of size 16"),
        ({"vocab": VOCAB + 1}, "a vocabulary of size"),
        ({"layers": (0, 1, 4)}, "reads the layers"),
    ],
)
def test_a_head_for_another_target_is_refused(
    target: LlamaCppModel, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    path = write_eagle(tmp_path / "head.gguf", **options)  # type: ignore[arg-type]
    with raises(CapabilityError, code="head_mismatch") as caught:
        target.self_draft(Head("eagle", path))
    assert message in caught.value.what


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 40])
def test_a_head_that_drafts_unknown_tokens_is_refused(
    target: LlamaCppModel, tmp_path: Path, token: int
) -> None:
    """They would make llama.cpp end the process."""
    path = overwritten(write_eagle(tmp_path / "head.gguf", layers=(0, 1, 2)), "d2t", np.int64(token))
    with raises(ModelFileError, "outside"):
        target.self_draft(Head("eagle", path))


@pytest.mark.parametrize("rotated", [0, 1, 18])
def test_a_head_with_impossible_rotations_is_refused(
    target: LlamaCppModel, tmp_path: Path, rotated: int
) -> None:
    path = write_eagle(tmp_path / "head.gguf", layers=(0, 1, 2), rotated=rotated)
    with raises(ModelFileError, "rope"):
        target.self_draft(Head("eagle", path))


def test_a_model_is_no_head(target: LlamaCppModel, files: Files) -> None:
    with raises(CapabilityError, "an EAGLE-3 head", code="wrong_file"):
        target.self_draft(Head("eagle", files.target))


def test_a_target_whose_hidden_states_cannot_be_read_takes_no_head(tmp_path: Path) -> None:
    path = write_gemma2(tmp_path / "gemma2.gguf")
    head = write_eagle(tmp_path / "head.gguf", layers=(0, 1, 1))
    with raises(CapabilityError, "input"):
        edgespec.load(str(path), "none", method="eagle", head=head, context=256)


def test_a_head_drafts_the_same_without_llama_cpps_layer_taps(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_eagle(tmp_path / "head.gguf", layers=(1, 1, 2))
    tokens = list(range(10, 40))
    found = []
    for _ in range(2):
        target = files.load()
        head = head_of(target, path)
        target.prefill(tokens[:-1])
        found.append(first_logits(head, HeadCache(head), tokens))
        head.close()
        target.close()
        monkeypatch.setattr(state_taps, "_layer_input_api", lambda: None)
    assert np.array_equal(found[0], found[1])


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_targets_without_layer_taps_reply_the_same_with_a_head(tmp_path: Path, temperature: float) -> None:
    target = write_llama(tmp_path / "target.gguf", architecture="qwen2", layers=3)
    head = write_eagle(tmp_path / "head.gguf", layers=(1, 1, 2))
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 3}
    with (
        always_draft(),
        edgespec.load(str(target), "none", method="none", context=256) as plain,
        edgespec.load(str(target), "none", method="eagle", head=head, context=256) as drafting,
    ):
        reply = drafting.generate("the file", **asked)
        assert reply.tokens == plain.generate("the file", **asked).tokens
        assert reply.stats.drafted_tokens


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_auto_with_a_head_and_a_draft_model_changes_no_reply(
    files: Files, tmp_path: Path, temperature: float
) -> None:
    draft = write_llama(tmp_path / "draft.gguf", seed=1)
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 3}
    with (
        edgespec.load(str(files.target), "none", method="none", context=256) as plain,
        edgespec.load(str(files.target), str(draft), head=files.head, context=256) as drafting,
    ):
        reply = drafting.generate("the file", **asked)
        assert reply.tokens == plain.generate("the file", **asked).tokens
        assert drafting.method_for("auto").effective == "eagle+model+suffix"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mamba", "lfm2", "gemma2"])
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_recurrent_and_windowed_targets_reply_the_same_with_a_head(
    kinds: dict[str, Files], kind: str, temperature: float
) -> None:
    files = kinds[kind]
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 3}
    with (
        always_draft(),
        edgespec.load(str(files.target), "none", method="none", context=256) as plain,
        edgespec.load(str(files.target), "none", method="eagle", head=files.head, context=256) as drafting,
    ):
        reply = drafting.generate("the file", **asked)
        assert reply.tokens == plain.generate("the file", **asked).tokens
        assert reply.stats.drafted_tokens


def test_a_truncated_head_is_refused(target: LlamaCppModel, files: Files, tmp_path: Path) -> None:
    path = tmp_path / "head.gguf"
    path.write_bytes(files.head.read_bytes()[:-100])
    with raises(ModelFileError, "incomplete"):
        target.self_draft(Head("eagle", path))


def test_a_missing_head_is_an_error() -> None:
    with raises(ModelNotFoundError, "missing.gguf"):
        edgespec.load("demo", "none", method="eagle", head="missing.gguf")
    with raises(OptionError, "for demo", code="method_unavailable", option="method"):
        edgespec.load("demo", "none", method="eagle")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_head_whose_logits_are_not_finite_is_refused(
    target: LlamaCppModel, tmp_path: Path, value: float
) -> None:
    head = overwritten(write_eagle(tmp_path / "head.gguf", layers=(0, 1, 2)), "blk.0.ffn_down.weight", value)
    with raises(ModelFileError, "not finite"):
        target.self_draft(Head("eagle", head))


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_a_head_with_huge_weights_changes_no_reply(files: Files, tmp_path: Path, temperature: float) -> None:
    head = overwritten(write_eagle(tmp_path / "head.gguf", layers=(0, 1, 2)), "blk.0.ffn_down.weight", 1e30)
    check_same_replies(files.target, "eagle", head, [temperature])


def test_errors_about_a_converted_head_name_its_folder(
    files: Files, target: LlamaCppModel, tmp_path: Path
) -> None:
    folder = write_published(tmp_path / "published")
    head = Head(
        "eagle",
        overwritten(write_eagle(tmp_path / "head.gguf", layers=(0, 1, 2)), "blk.0.ffn_down.weight", np.nan),
        folder,
    )
    with raises(ModelFileError, folder):
        target.self_draft(head)
