"""`repeat_cached`: a long context made of copies of a short one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.engine.tree import TokenTree
from edgespec.model.base import LoadOptions
from tests.backends.contract import fresh, step, tokens_for
from tests.backends.tiny_models import write_gemma2, write_llama, write_mamba
from tests.tables import table

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
