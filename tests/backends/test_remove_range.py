"""`remove_range` removes tokens from the middle of a cache, and moves later tokens down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import llamacpp
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.contract import fresh, step, tokens_for
from tests.backends.tiny_models import write_gemma2, write_llama
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
