"""Caches with a range removed from their middle, and long ones made of copies of a short one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.contract import fresh, step, tokens_for
from tests.backends.tiny_models import write_gemma2, write_llama, write_mamba
from tests.raising import raises
from tests.tables import table


def loaded(path: Path, **options: str) -> LanguageModel:
    return llamacpp.load(str(path), "tiny", LoadOptions(context_tokens=256, exact=False, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("in_a_round", [False, True])
def test_one_layer_equals_a_cache_without_the_range(tmp_path: Path, in_a_round: bool) -> None:
    """A single layer's keys and values depend only on their own token, so removal leaves no trace."""
    model = loaded(write_llama(tmp_path / "tiny.gguf"))
    tokens = tokens_for(model, 60)
    expected = fresh(model, [*tokens[:4], *tokens[30:]])
    model.truncate(0)
    model.prefill(tokens[:-1])
    if in_a_round:
        model.verify(TokenTree((5, 6, 7), (-1, 0, 0), (None,) * 3))
    model.remove_range(4, 30)
    assert (model.length, model.free_tokens) == (33, 223)
    got = step(model, tokens[-1])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-2)
    # The cache still works normally: branches, rollback and further removals.
    model.verify(TokenTree((5, 6, 7, 8), (-1, 0, 0, 2), (None,) * 4))
    model.commit((2, 3))
    model.remove_range(10, 20)
    model.truncate(20)
    kept = [*tokens[:4], *tokens[30:36], *tokens[46:56]]
    got = step(model, 9)
    np.testing.assert_allclose(got, fresh(model, [*kept, 9]), rtol=0, atol=1e-2)
    model.close()


def test_removing_the_end_equals_truncate(tmp_path: Path) -> None:
    model = loaded(write_gemma2(tmp_path / "tiny.gguf"))
    tokens = tokens_for(model, 40)
    expected = fresh(model, [*tokens[:20], 5])
    model.truncate(0)
    model.prefill(tokens)
    model.remove_range(20, 100)
    np.testing.assert_allclose(step(model, 5), expected, rtol=0, atol=2e-2)
    assert model.length == 21
    model.close()


@pytest.mark.parametrize("kv_type", ["q8_0", "bf16"])
def test_unsupported_key_types_raise(demo_draft: Path, kv_type: str) -> None:
    model = loaded(demo_draft, kv_type=kv_type)
    model.prefill(tokens_for(model, 50))
    with raises(CapabilityError, code="rollback_not_supported"):
        model.remove_range(4, 20)
    assert model.length == 50
    assert np.isfinite(step(model, 7)).all()
    model.close()


def test_tabular_model() -> None:
    model = table(1)
    model.prefill([0, 1, 2, 3, 4])
    model.remove_range(1, 4)
    assert model.length == 2
    np.testing.assert_array_equal(step(model, 2), fresh(model, [0, 4, 2]))


def test_unsupported_models_raise_and_change_nothing() -> None:
    model = table(1, rollback=False)
    model.prefill([0, 1, 2])
    with raises(CapabilityError, "removing"):
        model.remove_range(0, 1)
    assert model.length == 3


COUNT, END = 20, 150


@pytest.mark.parametrize("kv_type", ["auto", "f16"])
@pytest.mark.parametrize("write", [write_llama, partial(write_gemma2, window=32)])
def test_copies_hold_the_same_values_and_roll_back(
    tmp_path: Path, write: Callable[[Path], Path], kv_type: str
) -> None:
    """Gemma 2 has sliding-window layers. Their window can hold the short context, but not the long one."""
    model = llamacpp.load(
        str(write(tmp_path / "tiny.gguf")),
        "tiny",
        LoadOptions(context_tokens=256, exact=True, kv_type=kv_type),
    )
    assert isinstance(model, LlamaCppModel)
    tokens = tokens_for(model, COUNT)
    expected = fresh(model, [*tokens, 5])
    model.truncate(0)
    model.prefill(tokens)
    original = model.snapshot(0, COUNT).data
    assert model.repeat_cached(END)
    assert model.length == END
    # The tokens are equal at every position, so any copy can be compared, except for the positions stored in
    # it.
    copy = model.snapshot(COUNT, 2 * COUNT).data
    if model.context.window == 0:
        assert len(copy) == len(original)
        differing = np.frombuffer(copy, np.uint8) != np.frombuffer(original, np.uint8)
        assert 0 < differing.sum() <= COUNT
    else:
        assert model.context.window == 32
    # The long context works like any other, and the short one is still in the cache.
    assert np.isfinite(step(model, 7)).all()
    model.verify(TokenTree((5, 6, 7), (-1, 0, 0), (None,) * 3))
    model.truncate(COUNT)
    np.testing.assert_array_equal(step(model, 5), expected)
    model.close()


def test_unsupported_models_change_nothing(tmp_path: Path) -> None:
    recurrent = llamacpp.load(
        str(write_mamba(tmp_path / "tiny.gguf")), "tiny", LoadOptions(context_tokens=256)
    )
    # Two attention windows of tokens cannot be copied at once.
    windowed = llamacpp.load(
        str(write_gemma2(tmp_path / "gemma.gguf", window=2)), "tiny", LoadOptions(context_tokens=256)
    )
    for model in (recurrent, windowed, table(1)):
        model.prefill([0, 1, 2])
        assert not model.repeat_cached(10)
        assert model.length == 3
        model.close()
