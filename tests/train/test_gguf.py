"""A head that was trained with MLX drafts the same once it is converted to GGUF."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from edgespec.backends.base import Head, LoadOptions
from edgespec.backends.head_training import TrainingBatch
from edgespec.backends.llamacpp import load
from edgespec.backends.llamacpp.eagle import EagleHead
from edgespec.backends.mlx.head_trainer import MlxHeadTrainer
from edgespec.backends.mlx.teacher import load_teacher
from edgespec.catalog.catalogue import models_folder
from edgespec.engine.tree import TokenTree
from edgespec.prepare.head import prepare_head

TEXT = (
    "<|im_start|>user\nHow do I list files by size?<|im_end|>\n<|im_start|>assistant\n"
    "Use `ls` to list files by size:\n\n```sh\nls --sort size\n```<|im_end|>"
)


def test_a_converted_head_guesses_the_same_tokens(tmp_path: Path) -> None:
    demo = models_folder() / "demo-target-q8_0.gguf"
    teacher = load_teacher(str(models_folder() / "demo-mlx"), "demo-mlx")
    tokens = teacher.vocabulary.tokenize(TEXT, special=True, start=True)
    replied = np.zeros((1, len(tokens)), np.bool_)
    replied[0, 2:] = True
    batch = TrainingBatch(np.array([tokens], np.int32), replied)
    trainer = teacher.head_trainer("eagle3", batch, np.ones(teacher.vocabulary.size, np.int64))
    assert isinstance(trainer, MlxHeadTrainer)
    for _ in range(3):
        trainer.step(batch, 0.1)
    trainer.publish(tmp_path)
    prepare_head(tmp_path, demo, tmp_path / "head.gguf")

    states = teacher.states(batch.tokens, trainer.head.states)
    embeddings = teacher.embed(mx.array(batch.tokens))
    (drafted,) = trainer.head.unroll(embeddings, states.hidden, 1)
    expected = np.array(trainer.head.logits(drafted[0]).argmax(axis=-1))[:-1]
    target = load(str(demo), "demo", LoadOptions(context_tokens=256))
    try:
        head = target.self_draft(Head("eagle", tmp_path / "head.gguf"))
        assert isinstance(head, EagleHead)
        target.prefill(tokens)
        head.start_at(1)
        logits = head.verify(TokenTree.chain(tokens[1], tokens[2:]))
        own = [int(logits.at(row, np.arange(8192)).argmax()) for row in range(len(tokens) - 1)]
    finally:
        target.close()
    # The weights of the two targets are rounded differently.
    assert np.mean(expected == own) > 0.9
    # Agreement is no coincidence, because the guesses differ from each other.
    assert len(set(own)) > 5
