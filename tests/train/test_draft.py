"""Training a draft model: it improves, and what is written, kept and rejected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

import edgespec
from edgespec.backends.mlx.draft_trainer import DraftTrainer
from edgespec.errors import CancelledError, ModelFileError, OptionError
from edgespec.model.drafter_training import Student, TrainingBatch
from edgespec.store.reference import resolve
from edgespec.system.files import file_state
from edgespec.train import (
    DraftToTrain,
    TrainingResult,
    TrainingSettings,
    TrainingTarget,
    find_draft,
    load_target,
    train_drafter,
)
from tests.backends.mlx.tiny_checkpoints import ROWS, TOKENS, write_checkpoint
from tests.backends.tiny_models import write_llama
from tests.cases import covering
from tests.raising import raises
from tests.train.conftest import PROMPTS, Stops, arrays_of, no_progress

QUANTISED = ("affine", 8, 32)
# A draft model quickly learns to predict a target with one layer.
CONFIG = {"num_hidden_layers": 1}


def write_draft(
    folder: Path,
    *,
    rows: int = ROWS,
    quantisation: tuple[str, int, int] | None = None,
) -> Path:
    """Write a copy of a target with a few changed matrices, so that it sometimes drafts wrong tokens."""
    config = {**CONFIG, "vocab_size": rows}
    write_checkpoint(folder, "llama", config=config, quantisation=quantisation)
    arrays, random = arrays_of(folder), np.random.default_rng(0)
    for name, array in arrays.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and array.dtype == mx.float32:
            outputs, inputs = array.shape
            change = random.standard_normal((outputs, 2)) @ random.standard_normal((2, inputs))
            arrays[name] = array + 0.03 * mx.array(change.astype(np.float32))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "tiny", "llama", config=CONFIG)


@pytest.fixture(scope="module")
def target(model: Path) -> Iterator[TrainingTarget]:
    with load_target(model, "tiny", None, no_progress) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft") / "small")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write little text, and learn much from it."""
    monkeypatch.setattr("edgespec.train.conversations._MAX_REPLY_TOKENS", 60)
    monkeypatch.setattr("edgespec.train.conversations._MIN_BATCH_TOKENS", 64)
    monkeypatch.setattr("edgespec.backends.mlx.draft_trainer._RATE_TIMES_SIZE", 0.05)
    monkeypatch.setattr("edgespec.backends.mlx.draft_trainer._LORA_RATE", 0.003)


def trained(
    target: TrainingTarget, draft: Path, folder: Path, progress: Any = no_progress, lora: bool = False
) -> TrainingResult:
    chosen = DraftToTrain(resolve(str(draft)), lora)
    settings = TrainingSettings("draft", target.identity, 500, "test", chosen.identity, lora)
    return train_drafter(
        target,
        chosen.student(target),
        settings,
        PROMPTS,
        folder,
        progress,
        lambda _estimate, _continued: None,
    )


def student_of(target: TrainingTarget, draft: Path, lora: bool = False) -> Student:
    return DraftToTrain(resolve(str(draft)), lora).student(target)


def trainer_of(target: TrainingTarget, draft: Path, lora: bool = False) -> DraftTrainer:
    trainer = student_of(target, draft, lora).trainer(texts_of(0, 2, 20), np.ones(ROWS, np.int64))
    assert isinstance(trainer, DraftTrainer)
    return trainer


def texts_of(seed: int, conversations: int, length: int) -> TrainingBatch:
    tokens = np.random.default_rng(seed).integers(0, TOKENS, (conversations, length)).astype(np.int32)
    replied = np.zeros(tokens.shape, np.bool_)
    replied[:, 6:] = True
    return TrainingBatch(tokens, replied)


def logits_of(folder: Path) -> Any:
    net, _ = load_model(folder)
    return net(mx.arange(0, ROWS, 5)[None])


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.long)])
def test_training_raises_the_acceptance_on_other_text(
    target: TrainingTarget, draft: Path, tmp_path: Path, lora: bool
) -> None:
    student = student_of(target, draft, lora)
    trainer, held_out = student.trainer(texts_of(0, 1, 9), np.ones(ROWS, np.int64)), texts_of(1, 8, 30)
    before, _ = trainer.ranks(held_out, 4)
    for step in range(40):
        trainer.step(texts_of(2 + step, 8, 40), 0.1)
    after, owners = trainer.ranks(held_out, 4)
    assert (after == 0).mean() > (before == 0).mean() + 0.03
    # Four drafted tokens fit into the reply, starting from the token before it.
    assert np.bincount(owners).tolist() == [30 - 6 - 3] * 8
    (tmp_path / "new").mkdir()
    trainer.publish(tmp_path / "new")
    published = student.published(tmp_path / "new")
    assert published is not None
    assert np.mean((published.ranks(held_out, 4)[0] == 0) == (after == 0)) > 0.99


def test_an_interrupted_training_gives_the_same_draft_model(
    target: TrainingTarget, draft: Path, tmp_path: Path
) -> None:
    whole = trained(target, draft, tmp_path / "whole")
    assert whole.kept
    assert whole.earlier is not None
    assert whole.figures.tokens_per_pass > whole.earlier.tokens_per_pass + 0.1
    for after in (0, 3):
        with raises(CancelledError, "continue"):
            trained(target, draft, tmp_path / "parts", Stops(after))
        assert list((tmp_path / "parts" / "training").glob("state-*.safetensors"))
    with raises(OptionError, "--lora", code="output_exists"):
        trained(target, draft, tmp_path / "parts", lora=True)
    parts = trained(target, draft, tmp_path / "parts")
    assert (parts.curve, parts.figures, parts.earlier) == (whole.curve, whole.figures, whole.earlier)
    expected, found = arrays_of(tmp_path / "whole"), arrays_of(tmp_path / "parts")
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(array, expected[name]) for name, array in found.items())
    assert not (tmp_path / "parts" / "training").exists()


@pytest.mark.long
def test_a_draft_model_that_does_not_improve_is_not_kept(
    target: TrainingTarget, model: Path, draft: Path, tmp_path: Path
) -> None:
    perfect = trained(target, model, tmp_path / "new")
    assert perfect.earlier is not None
    assert (perfect.kept, perfect.earlier.tokens_per_pass) == (False, 5.0)
    assert not (tmp_path / "new").exists()

    trained(target, draft, tmp_path / "again")
    before = file_state(tmp_path / "again" / "model.safetensors")
    again = trained(target, draft, tmp_path / "again")
    assert not again.kept
    assert again.earlier == again.figures
    assert file_state(tmp_path / "again" / "model.safetensors") == before


@pytest.mark.parametrize("lora", [False, True])
def test_the_published_model_has_the_form_of_the_original(
    target: TrainingTarget, tmp_path: Path, lora: bool
) -> None:
    draft = write_draft(tmp_path / "draft", quantisation=QUANTISED)
    trainer, folder = trainer_of(target, draft, lora), tmp_path / "new"
    folder.mkdir()
    trainer.publish(folder)
    # Nothing has been trained yet, but the weights are quantised again, which rounds them.
    before = logits_of(draft)
    untrained = logits_of(folder)
    assert mx.abs(untrained - before).mean() < 0.1 * mx.abs(before).mean()
    for _ in range(10):
        trainer.step(texts_of(0, 4, 24), 0.1)
    trainer.publish(folder)
    original, new = arrays_of(draft), arrays_of(folder)
    assert {name: (array.shape, array.dtype) for name, array in new.items()} == {
        name: (array.shape, array.dtype) for name, array in original.items()
    }
    assert not mx.array_equal(logits_of(folder), untrained)
    assert {file.name for file in folder.iterdir()} == {file.name for file in draft.iterdir()} - {
        "model.safetensors.index.json"
    }


@pytest.mark.long
@pytest.mark.parametrize(("settings", "temperature"), covering([{}, {"draft_branches": 3}], [0.0, 0.8]))
def test_replies_are_those_of_plain_decoding(
    target: TrainingTarget,
    model: Path,
    draft: Path,
    tmp_path: Path,
    temperature: float,
    settings: dict[str, Any],
) -> None:
    trainer = trainer_of(target, draft)
    for _ in range(10):
        trainer.step(texts_of(0, 4, 24), 0.1)
    trainer.publish(tmp_path)
    with edgespec.load(str(model), str(tmp_path), method="model", context=256, **settings) as drafting:
        asked: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3}
        reply = drafting.generate("list the files", **asked)
        assert reply.tokens == drafting.generate("list the files", method="none", **asked).tokens
        assert reply.stats.drafted_tokens


def test_the_draft_model_continues_the_replies(target: TrainingTarget, draft: Path) -> None:
    trainer, batch = trainer_of(target, draft), texts_of(0, 6, 60)
    continued = trainer.continued(batch)
    shared = [
        int((new == old).cumprod().sum()) for new, old in zip(continued.tokens, batch.tokens, strict=True)
    ]
    ends = [int(np.flatnonzero(row)[-1]) + 1 for row in continued.replied]
    assert len(set(shared)) > 3
    assert all(6 <= start < end <= min(60, start + 33) for start, end in zip(shared, ends, strict=True))
    assert not continued.replied[:, :6].any()
    # The draft model's text is sampled with a seed for each step, which makes it repeatable.
    assert np.array_equal(trainer.continued(batch).tokens, continued.tokens)
    trainer.step(batch, 0.0)
    assert not np.array_equal(trainer.continued(batch).tokens, continued.tokens)


def test_the_loss_is_the_share_of_rejected_tokens(target: TrainingTarget, draft: Path) -> None:
    trainer, batch = trainer_of(target, draft), texts_of(0, 2, 12)
    # In the second step, the draft model generates no text of its own.
    trainer.step(batch, 1.0)
    replied = np.s_[:, 5:-1]
    mine = np.array(mx.softmax(load_model(draft)[0](mx.array(batch.tokens)), axis=-1), np.float64)[replied]
    other = np.array(mx.softmax(load_model(target.path)[0](mx.array(batch.tokens)), axis=-1), np.float64)[
        replied
    ]
    expected = np.abs(mine - other).sum(axis=-1).mean() / 2
    assert trainer.step(batch, 1.0) == pytest.approx(expected, rel=1e-4)


def test_padding_tokens_of_one_model_only(target: TrainingTarget, tmp_path: Path) -> None:
    for rows in (TOKENS, ROWS + 16):
        draft = write_draft(tmp_path / str(rows), rows=rows)
        trainer, batch = trainer_of(target, draft), texts_of(0, 4, 24)
        batch.tokens[0, 3] = ROWS - 1
        losses = [trainer.step(batch, 0.1) for _ in range(12)]
        assert losses[-1] < losses[1]
        assert trainer.ranks(batch, 4)[0].shape == (4 * 15, 4)


def test_other_draft_models_are_refused(target: TrainingTarget, model: Path, tmp_path: Path) -> None:
    found, to = resolve(str(model)), tmp_path / "new"
    gguf = write_llama(tmp_path / "model.gguf", layers=2)
    with raises(OptionError, "Face models", code="model_not_trainable"):
        find_draft(found, str(gguf), to, no_progress)
    with raises(OptionError, code="output_exists"):
        find_draft(found, str(model), model, no_progress)
    with raises(OptionError, "tiny", code="draft_missing"):
        find_draft(found, "auto", to, no_progress)
    demo = find_draft(resolve("demo-mlx"), "auto", to, no_progress)
    assert demo.path.name == "demo-mlx-draft"
    with raises(OptionError, "tiny", code="vocabulary_mismatch"):
        DraftToTrain(demo, lora=False).student(target)


def test_another_model_is_not_overwritten(target: TrainingTarget, draft: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    before = file_state(tmp_path / "model.safetensors")
    with raises(ModelFileError, code="output_exists"):
        trained(target, draft, tmp_path)
    assert file_state(tmp_path / "model.safetensors") == before
