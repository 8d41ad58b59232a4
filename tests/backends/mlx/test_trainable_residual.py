"""Medusa and Hydra heads learn during training, and draft the same after they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

import edgespec
from edgespec.backends import mlx
from edgespec.backends.mlx.head_trainer import MlxHeadTrainer
from edgespec.backends.mlx.teacher import MlxTeacher, load_teacher
from edgespec.engine.tree import TokenTree
from edgespec.errors import ModelFileError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import LoadOptions
from edgespec.model.formats.head_files import head_at
from edgespec.model.heads.residual_layout import read_residual_heads
from edgespec.model.hidden_states import HeadModel
from tests.backends.mlx.test_eagle_trainer import batch_of
from tests.backends.mlx.tiny_checkpoints import ROWS, write_checkpoint
from tests.cases import covering, first, needs_methods
from tests.model.heads.residual_files import RESIDUAL_METHODS
from tests.raising import raises


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, which are too few for an EAGLE-3 head."""
    return write_checkpoint(
        tmp_path_factory.mktemp("target") / "tiny", "llama", config={"num_hidden_layers": 3}
    )


@pytest.fixture(scope="module")
def teacher(model: Path) -> MlxTeacher:
    return load_teacher(str(model), "some/tiny")


def trainer_of(teacher: MlxTeacher, method: str) -> MlxHeadTrainer:
    # Use examples that are not in the batch, which the initial weights fit perfectly.
    trainer = teacher.head(method).trainer(batch_of(3, 30), np.ones(ROWS, np.int64))
    assert isinstance(trainer, MlxHeadTrainer)
    return trainer


def published(trainer: MlxHeadTrainer, folder: Path) -> Path:
    folder.mkdir()
    trainer.publish(folder)
    return folder


@pytest.mark.parametrize("method", first(RESIDUAL_METHODS))
def test_heads_learn_their_batch(teacher: MlxTeacher, method: str, tmp_path: Path) -> None:
    trainer, batch = trainer_of(teacher, method), batch_of(2)
    before, _ = trainer.ranks(batch, 4)
    losses = [trainer.step(batch, 0.5) for _ in range(80)]
    after, _ = trainer.ranks(batch, 4)
    assert losses[-1] < 0.9 * losses[0]
    assert (after == 0).mean() > (before == 0).mean() + 0.1
    again = teacher.head(method).published(published(trainer, tmp_path / "head"))
    assert again is not None
    assert np.mean((again.ranks(batch, 4)[0] == 0) == (after == 0)) > 0.95


@needs_methods("medusa")
def test_new_medusa_heads_are_the_lm_head(teacher: MlxTeacher) -> None:
    head, batch = trainer_of(teacher, "medusa").head, batch_of()
    states = teacher.states(batch.tokens, head.states)
    embeddings = teacher.embed(mx.array(batch.tokens))
    for drafted in head.unroll(embeddings, states.hidden, 4):
        logits = head.logits(drafted.reshape(-1, teacher.size))
        assert mx.allclose(logits, states.logits.reshape(logits.shape), atol=1e-4)


@pytest.mark.parametrize("method", RESIDUAL_METHODS)
def test_published_heads_draft_what_the_trainer_computes(
    teacher: MlxTeacher, model: Path, method: str, tmp_path: Path
) -> None:
    trainer, batch = trainer_of(teacher, method), batch_of(1)
    for _ in range(5):
        trainer.step(batch, 0.1)
    folder = published(trainer, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert (config[f"{method}_num_heads"], config["base_model_name_or_path"]) == (4, "tiny")
    assert len(read_residual_heads(folder).heads) == 4
    tokens = batch.tokens[0].tolist()
    states = teacher.states(batch.tokens, trainer.head.states).hidden
    unrolled = trainer.head.unroll(teacher.embed(mx.array(batch.tokens)), states, 4)
    row = len(tokens) - 6
    expected = np.array(trainer.head.logits(mx.stack([state[0, row] for state in unrolled])))
    target = mlx.load(str(model), "tiny", LoadOptions(context_tokens=256))
    try:
        view = target.self_draft(head_at(folder))
        target.prefill(tokens[: row + 1])
        cache = HeadCache(cast(HeadModel, view))
        cache.begin(tokens[: row + 1])
        cache.prefill()
        drafted = view.verify(TokenTree.chain(tokens[row + 1], tokens[row + 2 : row + 5]))
        own = np.array([drafted.at(depth, np.arange(ROWS)) for depth in range(4)])
    finally:
        target.close()
    # The published weights have 16 bits.
    assert np.allclose(own, expected, atol=0.02 * np.abs(expected).max())
    assert np.abs(expected - expected[0]).max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize(("method", "temperature"), covering(RESIDUAL_METHODS, [0.8, 0.0]))
def test_replies_are_those_of_plain_decoding(
    teacher: MlxTeacher, model: Path, tmp_path: Path, method: str, temperature: float
) -> None:
    trainer = trainer_of(teacher, method)
    for _ in range(10):
        trainer.step(batch_of(), 0.1)
    folder = published(trainer, tmp_path / "head")
    with (
        edgespec.load(str(model), "none", method="none", context=256) as plain,
        edgespec.load(str(model), "none", method=method, head=str(folder), context=256) as drafting,
    ):
        asked: dict[str, Any] = {"max_tokens": 16, "temperature": temperature, "seed": 3}
        reply = drafting.generate("list the files", **asked)
        assert reply.tokens == plain.generate("list the files", **asked).tokens
        assert reply.stats.drafted_tokens


@needs_methods("medusa", "hydra")
def test_other_heads_are_not_overwritten(teacher: MlxTeacher, tmp_path: Path) -> None:
    assert teacher.head("medusa").published(tmp_path) is None
    folder = published(trainer_of(teacher, "hydra"), tmp_path / "head")
    with raises(ModelFileError, "Medusa heads", "some/tiny", code="output_exists"):
        teacher.head("medusa").published(folder)
    arrays = mx.load(str(folder / "hydra_lm_head.safetensors"))
    assert isinstance(arrays, dict)
    arrays["hydra_lm_head.2.weight"] *= 2
    mx.save_safetensors(str(folder / "hydra_lm_head.safetensors"), arrays)
    with raises(ModelFileError, "matrices", code="output_exists"):
        teacher.head("hydra").published(folder)
