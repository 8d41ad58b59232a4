"""MLX targets log the hidden states between layers for heads to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends import mlx
from edgespec.backends.mlx.heads import target_lm_head
from edgespec.backends.mlx.model import MlxModel
from edgespec.engine.tree import TokenTree
from edgespec.model.base import EarlyExit, LoadOptions
from edgespec.model.hidden_states import POST_NORM
from tests.backends.mlx.tiny_checkpoints import ROWS, write_checkpoint

SIZE = 64


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], MlxModel]:
    folder = tmp_path_factory.mktemp("states")
    paths = {kind: write_checkpoint(folder / kind, kind) for kind in ("llama", "gemma3")}

    def load(kind: str) -> MlxModel:
        model = mlx.load(str(paths[kind]), kind, LoadOptions(context_tokens=512))
        assert isinstance(model, MlxModel)
        return model

    return load


@pytest.fixture
def target(load: Callable[[str], MlxModel]) -> Iterator[MlxModel]:
    model = load("llama")
    yield model
    model.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_hidden_states_are_those_between_the_layers(load: Callable[[str], MlxModel], kind: str) -> None:
    """The last state, given to the LM head, gives the logits."""
    model = load(kind)
    count = model.layer_count
    log = model.log_hidden_states([0, count, POST_NORM])
    assert log.row_size == 3 * SIZE
    model.prefill([5, 6, 7])
    logits = model.verify(TokenTree((8, 9, 10, 11), (-1, 0, 0, 2), (None,) * 4))
    expected = np.stack([logits.at(row, np.arange(ROWS)) for row in range(4)])
    model.commit((2, 3))
    assert (log.start, log.end) == (0, 6)
    final = log.rows(3, 6)[:, 2 * SIZE :]
    again = np.array(target_lm_head(model._net)(mx.array(final)))
    np.testing.assert_allclose(again, expected[[0, 2, 3]], atol=1e-4)
    model.stop_logging(log)
    model.truncate(0)
    model.prefill([5, 6])
    assert log.end == 6
    model.close()


def test_several_logs_are_kept_at_once(target: MlxModel) -> None:
    first = target.log_hidden_states([1])
    target.prefill([5, 6])
    second = target.log_hidden_states([2, 1])
    target.prefill([7])
    assert (first.end, second.start, second.end) == (3, 2, 3)
    np.testing.assert_array_equal(second.rows(2, 3)[:, SIZE:], first.rows(2, 3))
    target.stop_logging(first)
    target.prefill([8])
    assert (first.end, second.end) == (3, 4)


def test_passes_that_were_launched_early_keep_their_hidden_states(target: MlxModel) -> None:
    def states(run_ahead: bool) -> tuple[list[int], np.ndarray[Any, Any]]:
        target.truncate(0)
        target.run_ahead(run_ahead)
        log = target.log_hidden_states([1, POST_NORM])
        target.prefill([5, 6, 7])
        tokens = [8]
        for _ in range(6):
            logits = target.verify(TokenTree.chain(tokens[-1]))
            tokens.append(logits.best(0, 1)[0][0])
            target.commit(())
        target.run_ahead(False)
        target.stop_logging(log)
        return tokens, log.rows(0, 9)

    tokens, rows = states(False)
    early_tokens, early_rows = states(True)
    assert tokens == early_tokens
    np.testing.assert_allclose(early_rows, rows, atol=1e-5)


def test_a_draft_with_fewer_layers_leaves_all_hidden_states_to_the_target(target: MlxModel) -> None:
    draft = target.self_draft(EarlyExit(1))
    log = target.log_hidden_states([0, 1, 2])
    target.prefill([5, 6, 7])
    draft.verify(TokenTree.chain(8, [9]))
    target.verify(TokenTree.chain(8, [9]))
    target.commit((1,))
    rows = log.rows(0, 5)
    target.truncate(0)
    target.prefill([5, 6, 7, 8, 9])
    np.testing.assert_allclose(log.rows(0, 5), rows, atol=1e-4)
