"""The EAGLE-3 trainer learns, and its unrolled drafts equal those of a drafting head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends.mlx.head_trainer import MlxHeadTrainer, least_squares
from edgespec.backends.mlx.teacher import MlxTeacher, load_teacher
from edgespec.backends.mlx.teacher_model import TargetStates, token_ranks
from edgespec.backends.mlx.trainable_heads import UnrolledEagle, choose_draft_tokens
from edgespec.errors import CancelledError, CapabilityError
from edgespec.model.drafter_training import DrafterTrainer, TrainingBatch
from tests.backends.mlx.tiny_checkpoints import ROWS, TOKENS, write_checkpoint
from tests.cases import first
from tests.raising import raises

QUANTISED = ("affine", 8, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teachers")


def teacher_of(folder: Path, kind: str = "llama", layers: int = 6, **settings: object) -> MlxTeacher:
    config = {"num_hidden_layers": layers, **settings}
    return load_teacher(str(write_checkpoint(folder, kind, config=config)), "tiny")


def batch_of(conversations: int = 4, length: int = 24) -> TrainingBatch:
    tokens = np.random.default_rng(0).integers(0, TOKENS, (conversations, length)).astype(np.int32)
    replied = np.zeros(tokens.shape, np.bool_)
    replied[:, 6:] = True
    return TrainingBatch(tokens, replied)


@pytest.mark.long
@pytest.mark.parametrize("kind", first(["llama", "gemma2", "qwen3"]))
def test_a_head_learns_its_batch(folder: Path, kind: str) -> None:
    teacher, batch = teacher_of(folder / kind, kind), batch_of(2)
    trainer = teacher.head("eagle3").trainer(batch, np.ones(ROWS, np.int64))
    before, _ = trainer.ranks(batch, 4)
    losses = [trainer.step(batch, 0.5) for _ in range(40)]
    after, owners = trainer.ranks(batch, 4)
    assert losses[-1] < 0.7 * losses[0]
    assert (after == 0).mean() > (before == 0).mean() + 0.2
    # Four drafted tokens fit into the reply, starting from the token before it.
    assert np.bincount(owners).tolist() == [24 - 6 - 3] * 2


def plain_norm(states: mx.array, weight: mx.array, eps: float) -> mx.array:
    return weight * states * mx.rsqrt((states * states).mean(axis=-1, keepdims=True) + eps)


def plain_rope(states: mx.array, dims: int, *, base: float, offset: int, **_settings: object) -> mx.array:
    angles = mx.arange(offset, offset + states.shape[-2]).astype(mx.float64)[:, None] * mx.exp(
        -mx.arange(dims // 2).astype(mx.float64) * (2 * math.log(base) / dims)
    )
    left, right = mx.split(states, 2, axis=-1)
    cos, sin = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


@pytest.mark.parametrize("kind", first(["eagle3", "hydra", "medusa"]))
def test_gradients_are_those_of_finite_differences(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight is moved a little in a random direction, in float64, and the loss is computed again."""
    teacher, batch = teacher_of(folder / f"gradients of {kind}"), batch_of(2, 14)
    trainer = teacher.head(kind).trainer(batch, np.ones(ROWS, np.int64))
    assert isinstance(trainer, MlxHeadTrainer)
    head, loss = trainer.head, trainer.loss(batch, 4)
    random = np.random.default_rng(5)

    def loss_of(weights: dict[str, mx.array]) -> mx.array:
        head.weights = weights
        return loss()

    # Many weights are zero before training, so that others would have no gradients.
    weights = {
        name: mx.array(np.array(array) + 0.05 * random.standard_normal(array.shape).astype(np.float32))
        for name, array in head.weights.items()
    }
    _, rounded = mx.value_and_grad(loss_of)(weights)
    # MLX's own norms and rotations compute in float32 at most.
    monkeypatch.setattr(mx.fast, "rms_norm", plain_norm)
    monkeypatch.setattr(mx.fast, "rope", plain_rope)
    exact = {name: array.astype(mx.float64) for name, array in weights.items()}
    _, found = mx.value_and_grad(loss_of)(exact)
    for name, array in exact.items():
        step = 1e-4 * mx.array(random.standard_normal(array.shape), mx.float64)
        change = loss_of({**exact, name: array + step}) - loss_of({**exact, name: array - step})
        assert found[name].dtype == change.dtype == mx.float64
        # MLX's exponential function in float64 is accurate to about six digits.
        assert 2 * (found[name] * step).sum().item() == pytest.approx(change.item(), rel=5e-3, abs=2e-8), name
        error = mx.linalg.norm(rounded[name].astype(mx.float64) - found[name]) / mx.linalg.norm(found[name])
        assert float(error) < 1e-3, name


def published_fc(trainer: DrafterTrainer, folder: Path) -> NDArray[np.float32]:
    folder.mkdir()
    trainer.publish(folder)
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    return np.array(arrays["fc.weight"].astype(mx.float32))


def change_states(teacher: MlxTeacher, change: Callable[[mx.array], mx.array]) -> None:
    """Change the hidden states that heads read, but not the teacher's logits."""
    states = teacher.states

    def changed(tokens: NDArray[np.int32], layers: Sequence[int]) -> TargetStates:
        found = states(tokens, layers)
        return TargetStates(change(found.hidden), found.logits)

    teacher.states = changed  # type: ignore[assignment, method-assign]


def test_large_hidden_states_are_learnt_from_as_well(folder: Path) -> None:
    losses = []
    for factor in (1.0, 50.0):
        teacher, batch = teacher_of(folder / f"{factor} times"), batch_of(2)
        change_states(teacher, lambda hidden, factor=factor: hidden * factor)  # type: ignore[misc]
        trainer = teacher.head("eagle3").trainer(batch, np.ones(ROWS, np.int64))
        losses.append([trainer.step(batch, 0.5) for _ in range(6)])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_only_states_of_the_reply_determine_the_initial_weights(folder: Path) -> None:
    """The states of the first token are far larger than all others in most models."""
    teacher, batch = teacher_of(folder / "first"), batch_of(2)
    batch.replied[:, -4:] = False
    first = published_fc(teacher.head("eagle3").trainer(batch, np.ones(ROWS, np.int64)), folder / "a")

    def change(hidden: mx.array) -> mx.array:
        hidden[:, 0] *= 1e3
        hidden[:, -3:] += 7.0
        return hidden

    change_states(teacher, change)
    second = published_fc(teacher.head("eagle3").trainer(batch, np.ones(ROWS, np.int64)), folder / "b")
    assert np.array_equal(first, second)


def test_the_loss_does_not_depend_on_the_number_of_drafted_tokens(folder: Path) -> None:
    """Without its final norm, the head predicts all tokens with the same probability in each step."""
    teacher, batch = teacher_of(folder / "comparable"), batch_of(2)
    trainer = teacher.head("eagle3").trainer(batch, np.ones(ROWS, np.int64))
    assert isinstance(trainer, MlxHeadTrainer)
    trainer.head.weights = {**trainer.head.weights, "norm.weight": mx.zeros(64)}
    for steps in (1, 4):
        assert trainer.loss(batch, steps)().item() == pytest.approx(math.log(ROWS), rel=1e-4)


@pytest.mark.parametrize("rows", [150, 300])
def test_initial_weights_do_not_fit_noise(rows: int) -> None:
    """There are about as many inputs as rows, as in real models, and most of the goals is noise."""
    random = np.random.default_rng(2)
    inputs = random.standard_normal((rows + 1000, 200), np.float32)
    signal = inputs @ random.standard_normal((200, 3), np.float32) / np.float32(14.0)
    goals = signal + 2 * random.standard_normal(signal.shape, np.float32)
    predicted = inputs[rows:] @ least_squares(inputs[:rows], goals[:rows])
    assert ((predicted - signal[rows:]) ** 2).mean() < (signal[rows:] ** 2).mean()


def test_initial_weights_are_exact_without_noise() -> None:
    random = np.random.default_rng(2)
    inputs, matrix = (
        random.standard_normal((400, 20), np.float32),
        random.standard_normal((20, 3), np.float32),
    )
    assert least_squares(inputs, inputs @ matrix) == pytest.approx(matrix, rel=0.05, abs=0.05)


@pytest.mark.long
def test_quantised_weights_give_the_same_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the weights stay quantised."""
    checkpoint = write_checkpoint(
        folder / "quantised", "llama", quantisation=QUANTISED, config={"num_hidden_layers": 6}
    )
    dense = load_teacher(str(checkpoint), "tiny")
    monkeypatch.setattr("edgespec.backends.mlx.weight_loading.runs_on_cpu", lambda: False)
    quantised = load_teacher(str(checkpoint), "tiny")
    rows = mx.array([3, 1, 200])
    assert mx.allclose(dense.output_rows(rows), quantised.output_rows(rows), atol=1e-6)
    batch, counts = batch_of(), np.ones(ROWS, np.int64)
    losses = [each.head("eagle3").trainer(batch, counts).step(batch, 0.9) for each in (dense, quantised)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_only_the_most_frequent_tokens_are_drafted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.backends.mlx.trainable_heads._MAX_DRAFT_TOKENS", 50)
    monkeypatch.setattr("edgespec.backends.mlx.head_trainer._CANDIDATES", 20)
    teacher, batch = teacher_of(folder / "rare"), batch_of()
    counts = np.zeros(ROWS, np.int64)
    counts[100:150] = 1
    trainer = teacher.head("eagle3").trainer(batch, counts)
    assert np.isfinite(trainer.step(batch, 0.5))
    (folder / "rare head").mkdir()
    trainer.publish(folder / "rare head")
    arrays = mx.load(str(folder / "rare head" / "model.safetensors"))
    assert isinstance(arrays, dict)
    assert arrays["d2t"].tolist() == [100] * 50
    assert np.flatnonzero(np.array(arrays["t2d"])).tolist() == list(range(100, 150))
    published = teacher.head("eagle3").published(folder / "rare head")
    assert published is not None
    ranks, _ = published.ranks(batch, 2)
    assert np.mean((ranks == 0) == (trainer.ranks(batch, 2)[0] == 0)) > 0.95


def test_the_draft_vocabulary_covers_a_share_of_the_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_COVERAGE", 0.9), ("_TOKENS_STEP", 2), ("_MIN_DRAFT_TOKENS", 1)):
        monkeypatch.setattr(f"edgespec.backends.mlx.trainable_heads.{name}", value)
    counts = np.array([0, 1, 50, 0, 30, 9, 10, 0], np.int64)
    # The counts 50, 30 and 10 out of 100 reach the required share, and the size is rounded up to an even
    # number.
    assert choose_draft_tokens(counts).tolist() == [2, 4, 5, 6]
    monkeypatch.setattr("edgespec.backends.mlx.trainable_heads._MAX_DRAFT_TOKENS", 2)
    assert choose_draft_tokens(counts).tolist() == [2, 4]
    monkeypatch.setattr("edgespec.backends.mlx.trainable_heads._MAX_DRAFT_TOKENS", 100)
    monkeypatch.setattr("edgespec.backends.mlx.trainable_heads._MIN_DRAFT_TOKENS", 6)
    # Among the tokens that never occur, the one with the lowest ID is added.
    assert choose_draft_tokens(counts).tolist() == [0, 1, 2, 4, 5, 6]


def test_the_ranks_of_tokens() -> None:
    logits = mx.array([[0.1, 0.9, 0.5], [2.0, 2.0, 2.0], [3.0, 1.0, 2.0]])
    assert token_ranks(logits, np.array([0, 1, -1])).tolist() == [2, 1, 3]


def test_unrolled_steps_are_those_of_a_drafting_head() -> None:
    """Draft three tokens one row at a time, with a list of all previous rows."""
    config = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 100,
    }  # fmt: skip
    mx.random.seed(3)
    net, length, start = UnrolledEagle(config), 9, 4
    embeddings, hidden = mx.random.normal((1, length, 32)), mx.random.normal((1, length, 96))
    unrolled = [state[0, start] for state in net.unroll(embeddings, hidden, 3)]
    # The rows up to `start` read the target's hidden states, and the later ones the row before.
    states = net.scaled_fc(hidden)[0, : start + 1]
    for depth in range(3):
        rows = start + 1 + depth
        outputs = _one_pass(net, embeddings[0, 1 : rows + 1], states)
        assert mx.allclose(net.norm(outputs[-1]), unrolled[depth], atol=1e-4)
        states = mx.concatenate([states, outputs[-1:]])


def _one_pass(net: UnrolledEagle, embeddings: mx.array, states: mx.array) -> mx.array:
    """Return the head's outputs before its norm, for a sequence of rows with causal attention."""
    outputs: list[mx.array] = []

    def keep(normed: mx.array) -> mx.array:
        outputs.append(normed)
        return normed

    norm, net.norm = net.norm, keep  # type: ignore[assignment]
    fc, net.scaled_fc = net.scaled_fc, lambda given: given  # type: ignore[assignment]
    shifted = mx.concatenate([mx.zeros((1, embeddings.shape[-1])), embeddings])[None]
    padded = mx.concatenate([states, mx.zeros((1, states.shape[-1]))])[None]
    list(net.unroll(shifted, padded, 1))
    net.norm, net.scaled_fc = norm, fc
    return outputs[0][0, : len(embeddings)]


@pytest.mark.long
def test_the_same_seed_writes_the_same_text(folder: Path) -> None:
    teacher = teacher_of(folder / "writer")
    prompts, temperatures = [[1, 2, 3], [4], [5, 6]], [0.0, 1.0, 1.0]

    def write(seed: int) -> list[list[int]]:
        return teacher.write(prompts, temperatures, 8, seed, lambda _text, _fraction: True)

    assert write(1) == write(1)
    assert write(1)[0] == write(2)[0]
    assert write(1)[1:] != write(2)[1:]
    assert [len(text) for text in write(1)] == [8, 8, 8]


def test_writing_can_be_cancelled(folder: Path) -> None:
    teacher = teacher_of(folder / "cancelled")
    with pytest.raises(CancelledError):
        teacher.write([[1]], [0.0], 8, 0, lambda _text, fraction: fraction < 0.5)


def test_a_model_with_few_layers_is_refused(folder: Path) -> None:
    with raises(CapabilityError, "tiny", "5 layers", code="model_not_trainable"):
        teacher_of(folder / "flat", layers=5).head("eagle3").trainer(batch_of(), np.ones(ROWS, np.int64))
