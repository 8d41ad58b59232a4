"""A head trained with MLX drafts the same for the GGUF version of its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.llamacpp import load
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.mlx.head_trainer import MlxHeadTrainer
from edgespec.backends.mlx.teacher import MlxTeacher, load_teacher
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, EdgespecError, OptionError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import Head, LoadOptions
from edgespec.model.drafter_training import TrainingBatch
from edgespec.model.formats.head_files import head_at
from edgespec.model.hidden_states import HeadModel
from edgespec.store.catalogue import models_folder
from edgespec.store.heads import needs_conversion, prepare_head
from edgespec.system.files import file_state
from edgespec.train import TrainingSettings, TrainingTarget, load_target, train_drafter
from edgespec.train.timing import TrainingCosts
from tests.backends.tiny_models import write_llama
from tests.cases import needs_methods
from tests.raising import raises
from tests.train.conftest import LAYERS, PROMPTS, Stops, Train, no_progress

TEXT = (
    "<|im_start|>user\nHow do I list files by size?<|im_end|>\n<|im_start|>assistant\n"
    "Use `ls` to list files by size:\n\n```sh\nls --sort size\n```<|im_end|>"
)


DEMO = models_folder() / "demo-target-q8_0.gguf"


def publish_head(
    method: str, steps: int, first: int, folder: Path
) -> tuple[MlxTeacher, MlxHeadTrainer, TrainingBatch]:
    """Train a head on `TEXT`, whose reply begins with the token `first`, and publish it."""
    teacher = load_teacher(str(models_folder() / "demo-mlx"), "demo-mlx")
    tokens = np.array([teacher.vocabulary.tokenize(TEXT, special=True, start=True)], np.int32)
    batch = TrainingBatch(tokens, np.arange(tokens.size)[None] >= first)
    trainer = teacher.head(method).trainer(batch, np.ones(teacher.vocabulary.size, np.int64))
    assert isinstance(trainer, MlxHeadTrainer)
    for _ in range(steps):
        trainer.step(batch, 0.1)
    trainer.publish(folder)
    return teacher, trainer, batch


def test_a_converted_head_guesses_the_same_tokens(tmp_path: Path) -> None:
    teacher, trainer, batch = publish_head("eagle3", 1, 2, tmp_path)
    tokens = batch.tokens[0].tolist()
    prepare_head(tmp_path, DEMO, tmp_path / "head.gguf")

    states = teacher.states(batch.tokens, trainer.head.states)
    embeddings = teacher.embed(mx.array(batch.tokens))
    (drafted,) = trainer.head.unroll(embeddings, states.hidden, 1)
    expected = np.array(trainer.head.logits(drafted[0]).argmax(axis=-1))[:-1]
    target = load(str(DEMO), "demo", LoadOptions(context_tokens=256))
    try:
        head = target.self_draft(Head("eagle", tmp_path / "head.gguf"))
        assert isinstance(head, PairHead)
        target.prefill(tokens)
        head.start_at(1)
        logits = head.verify(TokenTree.chain(tokens[1], tokens[2:]))
        own = [int(logits.at(row, np.arange(8192)).argmax()) for row in range(len(tokens) - 1)]
    finally:
        target.close()
    # The weights of the two targets are rounded differently.
    assert np.mean(expected == own) > 0.9
    # The agreement is no coincidence, because the drafts differ from each other.
    assert len(set(own)) > 5


def test_a_gguf_target_writes_its_own_text_and_continues_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.train.conversations.BATCH_CONVERSATIONS", 6)
    monkeypatch.setattr("edgespec.train.conversations._MAX_REPLY_TOKENS", 12)
    # Measuring the costs takes longer than writing the text.
    costs = TrainingCosts(1.0, 1.0, 1.0, 1.0, 1.0, 1, 1)
    monkeypatch.setattr("edgespec.train.run.measure_costs", lambda *_: costs)

    def run(folder: Path, progress: Callable[[str, float], bool]) -> None:
        student = target.teacher.head("medusa")
        train_drafter(target, student, settings, PROMPTS, folder, progress, lambda _estimate, _text: None)

    def written(folder: Path, progress: Callable[[str, float], bool]) -> list[list[int]]:
        """Train until `progress` cancels it, and return the tokens of the finished batches."""
        with pytest.raises(CancelledError):
            run(folder, progress)
        files = sorted((folder / "training").glob("conversations-*.npz"))
        return [np.load(file)["tokens"].tolist() for file in files]

    with load_target(DEMO, "demo", models_folder() / "demo-mlx", no_progress) as target:
        monkeypatch.setattr(type(target.teacher), "write", None)
        settings = TrainingSettings("medusa", target.identity, 250, "test", writer=target.writer_identity)
        whole = written(tmp_path / "whole", Stops(0))
        parts = tmp_path / "parts"
        first = parts / "training" / "conversations-000000.npz"
        # Stop while the second batch is written.
        stopped = written(parts, lambda text, _: not (first.exists() and text.startswith("writing")))
        assert stopped == whole[:1]
        assert len(whole) == 2
        assert written(parts, Stops(0)) == whole
        # The rest of the training needs no more text.
        monkeypatch.setattr(TrainingTarget, "open_writer", None)
        assert written(parts, Stops(0)) == whole
        settings = replace(settings, writer="other file")
        with raises(OptionError, "GGUF file", code="output_exists"):
            run(parts, Stops())


@pytest.mark.long
def test_a_training_stopped_before_its_conversion_converts_the_head(train: Train, tmp_path: Path) -> None:
    gguf, folder = write_llama(tmp_path / "model.gguf", layers=LAYERS), tmp_path / "head"
    with raises(CancelledError, "same command"):
        train(folder, Stops(0, "converting"), gguf=gguf)
    weights = file_state(folder / "model.safetensors")
    converted = folder / "head.gguf"
    # A folder with the file's name makes the conversion fail.
    converted.mkdir()
    with raises(EdgespecError, "could not be converted", code="file_not_written"):
        train(folder, gguf=gguf)
    converted.rmdir()
    again, announced = Stops(), list[str]()
    result = train(folder, again, gguf=gguf, announced=announced)
    assert again.seen == ["converting the draft head to GGUF"]
    assert announced == ["the training is finished; only its result remains to be saved"]
    assert file_state(folder / "model.safetensors") == weights
    assert result.gguf == converted
    assert head_at(converted).method == "eagle"
    assert not (folder / "training").exists()


# The initial weights of Hydra heads already differ from head to head.
@pytest.mark.parametrize(
    ("method", "steps"),
    [
        pytest.param("medusa", 3, marks=[needs_methods("medusa"), pytest.mark.long]),
        pytest.param("hydra", 0, marks=needs_methods("hydra")),
    ],
)
def test_heads_without_a_cache_are_used_unchanged(tmp_path: Path, method: str, steps: int) -> None:
    teacher, trainer, batch = publish_head(method, steps, 0, tmp_path)
    tokens = batch.tokens[0].tolist()
    assert not needs_conversion(tmp_path, DEMO)
    states = teacher.states(batch.tokens, trainer.head.states).hidden
    row = len(tokens) - 6
    unrolled = trainer.head.unroll(teacher.embed(mx.array(batch.tokens)), states, 4)
    expected = np.array(trainer.head.logits(mx.stack([state[0, row] for state in unrolled])))
    target = load(str(DEMO), "demo", LoadOptions(context_tokens=256))
    try:
        head = target.self_draft(head_at(tmp_path))
        target.prefill(tokens[: row + 1])
        cache = HeadCache(cast(HeadModel, head))
        cache.begin(tokens[: row + 1])
        cache.prefill()
        logits = head.verify(TokenTree.chain(tokens[row + 1], tokens[row + 2 : row + 5]))
        own = np.array([logits.at(depth, np.arange(expected.shape[1])) for depth in range(4)])
    finally:
        target.close()
    # The weights of the two targets are rounded differently.
    agreement = np.corrcoef(own, expected)[:4, 4:]
    assert agreement.diagonal().min() > 0.99
