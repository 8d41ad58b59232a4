"""Targets log the hidden states that heads read, and their logits stay bit-identical."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp import state_taps
from edgespec.backends.llamacpp.layerskip import hidden_states
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError
from edgespec.model.base import LoadOptions
from edgespec.model.hidden_states import POST_NORM, HiddenStateLog
from tests.backends.tiny_models import WORDS, write_gemma2, write_gemma3, write_llama, write_moe
from tests.raising import raises

VOCAB = 259 + len(WORDS)
SIZE = 32
# More tokens than the context can compute logits for in one pass.
PROMPT: list[int] = np.random.default_rng(0).integers(3, VOCAB, 300).tolist()
DRAFT = [5, 6, 7, 8]


def write_qwen2(path: Path) -> Path:
    return write_llama(path, architecture="qwen2", layers=3)


def write_deep_llama(path: Path) -> Path:
    return write_llama(path, layers=3)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "llama": write_deep_llama,
    "qwen2": write_qwen2,
    "moe": write_moe,
    "gemma2": write_gemma2,
    "gemma3": write_gemma3,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write(folder / f"{name}.gguf") for name, write in WRITERS.items()}


@pytest.fixture(params=["llama.cpp's own layer taps", "the hook"])
def taps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "the hook":
        monkeypatch.setattr(state_taps, "_layer_input_api", lambda: None)


def load(path: Path, **options: object) -> LlamaCppModel:
    model = llamacpp.load(str(path), path.stem, LoadOptions(context_tokens=512, **options))  # type: ignore[arg-type]
    assert isinstance(model, LlamaCppModel)
    return model


def logits(model: LlamaCppModel, tree: TokenTree) -> NDArray[np.float64]:
    rows = model.verify(tree)
    return np.array([rows.at(row, np.arange(VOCAB)) for row in range(tree.width)])


def reply(model: LlamaCppModel, *logs: HiddenStateLog) -> list[NDArray[np.float64]]:
    """Run a prompt, a chain of which two tokens are rejected, a tree, and a single token."""
    model.prefill(PROMPT)
    rows = [logits(model, TokenTree.chain(1, DRAFT))]
    model.commit((1, 2))
    tree = TokenTree((2, 5, 6, 7), (-1, 0, 0, 2), (None,) * 4)
    rows.append(logits(model, tree))
    model.commit((2, 3))
    rows.append(logits(model, TokenTree.chain(9)))
    model.commit(())
    assert all((log.start, log.end) == (0, model.length) for log in logs)
    return rows


COMMITTED = [*PROMPT, 1, *DRAFT[:2], 2, 6, 7, 9]


def expected_states(path: Path) -> dict[int, NDArray[np.float32]]:
    """Return all hidden states after the committed tokens, except the first layer's input."""
    layers = hidden_states(str(path), path.stem, COMMITTED, LoadOptions(context_tokens=512))
    last = layers[-1]
    normed = last / np.sqrt((last**2).mean(axis=-1, keepdims=True) + 1e-5)
    return {**{k + 1: rows for k, rows in enumerate(layers)}, POST_NORM: normed}


@pytest.mark.long
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.usefixtures("taps")
def test_a_log_holds_the_states_of_all_committed_tokens_and_logits_stay_the_same(
    paths: dict[str, Path], name: str
) -> None:
    plain = load(paths[name])
    expected_logits = reply(plain)
    plain.close()
    expected = expected_states(paths[name])
    model = load(paths[name])
    count = len(expected) - 1
    # The first log reads only layer inputs, and the second one also reads the last layer's output.
    early, late = model.log_hidden_states([1]), model.log_hidden_states([count, 1, POST_NORM])
    found_logits = reply(model, early, late)
    rows = late.rows(0, late.end).reshape(-1, 3, SIZE)
    scale = max(np.abs(each).max() for each in expected.values())
    for column, state in enumerate((count, 1, POST_NORM)):
        assert np.abs(rows[:, column] - expected[state]).max() < 1e-3 * scale
    assert np.array_equal(early.rows(0, early.end), rows[:, 1])
    for found, wanted in zip(found_logits, expected_logits, strict=True):
        assert np.array_equal(found, wanted)
    model.close()


def test_the_hook_reads_the_same_states_as_the_layer_taps(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tapped = load(paths["llama"])
    first = tapped.log_hidden_states([1, 2, 3])
    reply(tapped)
    with monkeypatch.context() as patch:
        patch.setattr(state_taps, "_layer_input_api", lambda: None)
        hooked = load(paths["llama"])
    second = hooked.log_hidden_states([1, 2, 3])
    reply(hooked)
    assert np.array_equal(first.rows(0, first.end), second.rows(0, second.end))
    tapped.close()
    hooked.close()


@pytest.mark.long
@pytest.mark.parametrize("state", [1, 3, POST_NORM])
@pytest.mark.usefixtures("taps")
def test_a_log_follows_truncation_and_resizing(paths: dict[str, Path], state: int) -> None:
    model = load(paths["llama"])
    log = model.log_hidden_states([state])
    reply(model)
    before = log.rows(0, 100)
    model.truncate(100)
    assert log.end == 100
    model.resize(1024)
    model.prefill(PROMPT[100:])
    assert (log.start, log.end) == (0, 300)
    assert np.array_equal(log.rows(0, 100), before)
    other = load(paths["llama"])
    fresh = other.log_hidden_states([state])
    other.prefill(PROMPT)
    assert np.abs(log.rows(0, 300) - fresh.rows(0, 300)).max() < 1e-4
    model.close()
    other.close()


def test_a_log_opened_later_starts_there_and_a_closed_one_no_longer_grows(paths: dict[str, Path]) -> None:
    model = load(paths["gemma2"])
    model.prefill(PROMPT[:20])
    first = model.log_hidden_states([1])
    assert model.length == 20
    model.prefill(PROMPT[20:30])
    second = model.log_hidden_states([POST_NORM])
    model.prefill(PROMPT[30:40])
    model.stop_logging(first)
    model.prefill(PROMPT[40:50])
    assert (first.start, first.end) == (20, 40)
    assert (second.start, second.end) == (30, 50)
    model.stop_logging(second)
    found = logits(model, TokenTree.chain(1))
    plain = load(paths["gemma2"])
    plain.prefill(PROMPT[:20])
    plain.prefill(PROMPT[20:50])
    assert np.abs(found - logits(plain, TokenTree.chain(1))).max() < 1e-3
    model.close()
    plain.close()


def test_all_rows_of_a_prompt_are_read_even_if_verify_passes_are_narrow(paths: dict[str, Path]) -> None:
    """With one CPU thread, llama.cpp uses another attention kernel for passes of 64 tokens or more."""
    plain, model = (load(paths["llama"], threads=1, kv_type="f16", max_logit_rows=32) for _ in range(2))
    assert model.facts.capabilities.max_width < 64
    log = model.log_hidden_states([POST_NORM])
    for each in (plain, model):
        each.prefill(PROMPT[:256])
    assert (log.start, log.end) == (0, 256)
    assert np.array_equal(logits(model, TokenTree.chain(1)), logits(plain, TokenTree.chain(1)))
    plain.close()
    model.close()


@pytest.mark.parametrize("state", [-2, 4])
def test_states_that_do_not_exist_are_refused(paths: dict[str, Path], state: int) -> None:
    model = load(paths["llama"])
    with raises(CapabilityError, state, code="head_mismatch"):
        model.log_hidden_states([1, state])
    model.prefill([1, 2, 3])
    model.close()


def test_the_first_layers_input_needs_layer_taps(paths: dict[str, Path]) -> None:
    model = load(paths["qwen2"])
    with raises(CapabilityError, "input"):
        model.log_hidden_states([0, 1])
    model.close()


def test_states_that_llama_cpp_does_not_compute_are_refused(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_taps, "layer_output", lambda layer: f"missing-{layer}")
    model = load(paths["qwen2"])
    plain = load(paths["qwen2"])
    with raises(CapabilityError, "hidden states", "qwen2"):
        model.log_hidden_states([1])
    for each in (model, plain):
        each.prefill(PROMPT)
    assert np.array_equal(logits(model, TokenTree.chain(1)), logits(plain, TokenTree.chain(1)))
    model.close()
    plain.close()
