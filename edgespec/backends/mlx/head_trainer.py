"""Train heads of any kind, and evaluate trained heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import optimizers
from numpy.typing import NDArray

from edgespec.backends.head_training import TrainingBatch
from edgespec.backends.mlx.evaluation import evaluate, translate_errors
from edgespec.backends.mlx.trainable_head import Arrays, TrainableHead
from edgespec.errors import BackendError, ModelFileError

if TYPE_CHECKING:
    from edgespec.backends.mlx.teacher import MlxTeacher

__all__ = ["HeadGuesser", "MlxHeadTrainer", "load_published_head"]

_CONFIG = "config.json"
# Number of tokens in the softmax of a training step: those with the highest total probability in the batch,
# according to the target. Further tokens barely change the loss, but would take most of the time.
_CANDIDATES = 2_048
# Weight of each draft step in the loss, relative to the step before it.
_DECAY = 0.85
# Learning rates of Muon, which trains matrices, and of AdamW, which trains norms and biases. After a warm-up,
# they stay constant for `_FLAT_FRACTION` of the training, and then fall to zero.
_MATRIX_RATE, _VECTOR_RATE = 0.02, 0.003
_WARM_UP_STEPS, _FLAT_FRACTION = 20, 0.13
_MAX_GRADIENT_NORM = 5.0


class _Goals(NamedTuple):
    """The distributions that the head learns in each step of a draft.

    Attributes:
        probs: The target's probabilities of the candidate tokens, float32 [reply tokens, candidates].
        rows: For each step, the rows of the flattened batch from which the head predicts a reply token.
        indices: For each step, the row of `probs` with the target's distribution for each of `rows`.
    """

    probs: mx.array
    rows: list[NDArray[np.int64]]
    indices: list[mx.array]


class HeadGuesser:
    """`Guesser` for a head.

    Args:
        teacher: The target.
        head: The head.

    Attributes:
        head: The head.
    """

    def __init__(self, teacher: MlxTeacher, head: TrainableHead) -> None:
        self._teacher, self.head = teacher, head
        self._draft_tokens = mx.array(head.draft_tokens)

    def guesses(self, batch: TrainingBatch, depth: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """See `Guesser`."""
        states = self._teacher.states(batch.tokens, self.head.states)
        best = states.logits.argmax(axis=-1).reshape(-1)
        evaluate(best, states.hidden)
        in_reply = [_shifted(batch.replied, 2 + step) for step in range(depth)]
        rows = np.flatnonzero(np.logical_and.reduce(in_reply))
        embeddings = self._teacher.embed(mx.array(batch.tokens))
        hits = []
        for step, state in enumerate(self.head.unroll(embeddings, states.hidden, depth)):
            drafted = self.head.logits(state.reshape(-1, state.shape[-1])[mx.array(rows)])
            hit = self._draft_tokens[drafted.argmax(axis=-1)] == best[mx.array(rows + 1 + step)]
            evaluate(hit)
            hits.append(np.array(hit))
        return np.stack(hits, axis=1), rows // batch.tokens.shape[1]


class MlxHeadTrainer(HeadGuesser):
    """`HeadTrainer` for a head of any kind."""

    def __init__(self, teacher: MlxTeacher, head: TrainableHead) -> None:
        super().__init__(teacher, head)
        self._steps = 0
        self._optimisers = (
            optimizers.Muon(0.0, weight_decay=0.0),
            optimizers.AdamW(0.0, betas=[0.9, 0.95], weight_decay=0.0),
        )
        for optimiser, weights in zip(self._optimisers, self._parts(head.weights), strict=True):
            optimiser.init(weights)

    def step(self, batch: TrainingBatch, done: float) -> float:
        """See `HeadTrainer`."""
        unroll = self.head.steps(done)
        with translate_errors(f"the head of {self._teacher.name} cannot be trained"):
            states = self._teacher.states(batch.tokens, self.head.states)
            candidates, goals = self._goals(batch, states.logits, unroll)
            output = self._teacher.output_rows(candidates)
            embeddings, hidden = self._teacher.embed(mx.array(batch.tokens)), states.hidden
            evaluate(output, goals.probs, embeddings, hidden)
            del states

            def loss(weights: Arrays) -> mx.array:
                """Return the head's cross-entropy with respect to the target, summed over the draft steps."""
                self.head.weights = weights
                total = mx.array(0.0)
                for step, state in enumerate(self.head.unroll(embeddings, hidden, unroll)):
                    logits = state.reshape(-1, state.shape[-1])[mx.array(goals.rows[step])] @ output.T
                    probs = goals.probs[goals.indices[step]]
                    losses = mx.logsumexp(logits, axis=-1) - (probs * logits).sum(axis=-1)
                    total = total + _DECAY**step * losses.sum() / max(1, len(goals.rows[step]))
                return total

            weights = self.head.weights
            value, gradients = mx.value_and_grad(loss)(weights)
            gradients, norm = optimizers.clip_grad_norm(gradients, _MAX_GRADIENT_NORM)
            evaluate(value, norm)
            if not mx.isfinite(value + norm).item():
                self.head.weights = weights
                raise BackendError(f"the loss of the head of {self._teacher.name} is not finite")
            self._steps += 1
            self._apply(gradients, weights, done)
        return float(np.array(value))

    def _goals(self, batch: TrainingBatch, logits: mx.array, unroll: int) -> tuple[mx.array, _Goals]:
        """Return the candidate tokens of a training step, and the target's probabilities for them."""
        source = np.flatnonzero(_shifted(batch.replied, 1))
        probs = mx.softmax(logits.reshape(-1, logits.shape[-1])[mx.array(source)], axis=-1)
        mass = probs.sum(axis=0)[self._draft_tokens]
        count = min(_CANDIDATES, len(self.head.draft_tokens))
        candidates = self._draft_tokens[mx.sort(mx.argpartition(-mass, count - 1)[:count])]
        probs = probs[:, candidates]
        rows = [_guessing_rows(batch.replied, step) for step in range(unroll)]
        indices = [mx.array(np.searchsorted(source, each + 1 + step)) for step, each in enumerate(rows)]
        return candidates, _Goals(probs / probs.sum(axis=-1, keepdims=True), rows, indices)

    def _apply(self, gradients: Arrays, weights: Arrays, done: float) -> None:
        falling = min(1.0, (1.0 - done) / (1.0 - _FLAT_FRACTION)) * min(1.0, self._steps / _WARM_UP_STEPS)
        updated: Arrays = {}
        rates = (_MATRIX_RATE * falling, _VECTOR_RATE * falling)
        parts = zip(self._optimisers, rates, self._parts(gradients), self._parts(weights), strict=True)
        for optimiser, rate, gradient, weight in parts:
            optimiser.learning_rate = rate
            updated.update(optimiser.apply_gradients(gradient, weight))
        self.head.weights = updated
        evaluate(*updated.values(), *self._optimiser_arrays().values())

    @staticmethod
    def _parts(weights: Arrays) -> tuple[Arrays, Arrays]:
        """Return the matrices and the vectors."""
        matrices = {name: array for name, array in weights.items() if array.ndim == 2}
        return matrices, {name: array for name, array in weights.items() if array.ndim == 1}

    def _optimiser_arrays(self) -> Arrays:
        """Return the optimisers' moments, keyed by weight and moment."""
        return {
            f"{name}:{moment}": array
            for optimiser in self._optimisers
            for name, moments in optimiser.state.items()
            if isinstance(moments, dict)
            for moment, array in moments.items()
        }

    def save_state(self, path: Path) -> None:
        """See `HeadTrainer`."""
        arrays = {**self.head.weights, **self._optimiser_arrays()}
        mx.save_safetensors(str(path), arrays, {"steps": str(self._steps)})

    def load_state(self, path: Path) -> None:
        """See `HeadTrainer`."""
        expected = {**self.head.weights, **self._optimiser_arrays()}
        try:
            loaded: Any = mx.load(str(path), return_metadata=True)
            saved, metadata = loaded
            if {name: array.shape for name, array in saved.items()} != {
                name: array.shape for name, array in expected.items()
            }:
                raise ValueError("its arrays have other shapes")
            self._steps = int(metadata["steps"])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ModelFileError(
                f"{path}, which holds the state of an interrupted training, is damaged: {error}",
                f"delete the folder {path.parent} and train again",
            ) from error
        evaluate(*saved.values())
        self.head.weights = {name: array for name, array in saved.items() if ":" not in name}
        for optimiser in self._optimisers:
            for name, moments in optimiser.state.items():
                if isinstance(moments, dict):
                    moments.update({moment: saved[f"{name}:{moment}"] for moment in moments})

    def publish(self, folder: Path) -> None:
        """See `HeadTrainer`."""
        file, config = folder / self.head.weights_file, json.dumps(self.head.config, indent=2)
        mx.save_safetensors(str(file), self.head.published(), {"format": "pt"})
        (folder / _CONFIG).write_text(f"{config}\n", encoding="utf-8")


def load_published_head(teacher: MlxTeacher, kind: type[TrainableHead], folder: Path) -> HeadGuesser | None:
    """Load a published head of this kind. See `Teacher.published_head`."""
    if not any((folder / name).exists() for name in (_CONFIG, kind.weights_file)):
        return None
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        arrays: Any = mx.load(str(folder / kind.weights_file))
        head = kind.read(teacher, config, arrays)
        evaluate(*head.weights.values())
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{folder} contains no {kind.title} for {teacher.name} that can be evaluated: {error}",
            "choose another folder for the new head",
        ) from error
    return HeadGuesser(teacher, head)


def _shifted(replied: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    """Return whether the token `count` tokens later belongs to a reply."""
    later = np.zeros_like(replied)
    later[:, : max(0, replied.shape[1] - count)] = replied[:, count:]
    return later


def _guessing_rows(replied: NDArray[np.bool_], step: int) -> NDArray[np.int64]:
    """Return the rows of the flattened batch from which draft step `step` predicts a reply token."""
    return np.flatnonzero(_shifted(replied, 2 + step))
