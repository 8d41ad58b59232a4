"""Train an EAGLE-3 head (arXiv 2503.01840), and count the right guesses of trained heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from edgespec.backends.head_training import TrainingBatch
from edgespec.backends.mlx.eagle_net import EagleNet
from edgespec.backends.mlx.evaluation import evaluate, translate_errors
from edgespec.errors import BackendError, ModelFileError

if TYPE_CHECKING:
    from edgespec.backends.mlx.teacher import MlxTeacher

__all__ = ["EagleGuesser", "EagleTrainer", "load_published_head"]

# Largest draft vocabulary, as in most published heads. Larger output matrices make drafting slow.
_MAX_DRAFT_TOKENS = 32_768
# Only this many tokens take part in the softmax of a training step: those to which the target gives the
# highest total probability in the batch. The others barely change the loss, but would take most of the time.
_CANDIDATES = 2_048
# The head learns to guess one more token ahead from each of these fractions of the training on. Further
# guesses depend on the first, and cost as much time.
_UNROLL_FROM = (0.0, 0.1, 0.25, 0.45)
# Weight of each further guess in the loss, relative to the one before it.
_DECAY = 0.85
# Muon trains matrices, AdamW the vectors of norms. The rates are flat at first and then fall to zero.
_MATRIX_RATE, _VECTOR_RATE = 0.02, 0.003
_WARM_UP_STEPS, _FLAT_FRACTION = 20, 0.13
_MAX_GRADIENT_NORM = 5.0

_Weights: TypeAlias = dict[str, mx.array]


class _Goals(NamedTuple):
    """What the head shall guess in each step of a draft.

    Attributes:
        probs: The target's probabilities of the candidate tokens, float32 [tokens of replies, candidates].
        rows: For each step, the rows of the flattened batch from which a token of a reply is guessed.
        indices: For each step, the row of `probs` that belongs to each of `rows`.
    """

    probs: mx.array
    rows: list[NDArray[np.int64]]
    indices: list[mx.array]


class EagleGuesser:
    """`Guesser` for an EAGLE-3 head.

    Args:
        teacher: The target.
        net: The head.
        draft_tokens: The target's ids of the tokens that the head can guess.
        output: The head's output matrix, float32 [draft tokens, size].
    """

    def __init__(
        self, teacher: MlxTeacher, net: EagleNet, draft_tokens: NDArray[np.int64], output: mx.array
    ) -> None:
        self._teacher, self.net = teacher, net
        self._draft_tokens, self.output = mx.array(draft_tokens), output

    def guesses(self, batch: TrainingBatch, depth: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """See `Guesser`."""
        states = self._teacher.states(batch.tokens)
        best = states.logits.argmax(axis=-1).reshape(-1)
        evaluate(best, states.hidden)
        in_reply = [_shifted(batch.replied, 2 + step) for step in range(depth)]
        rows = np.flatnonzero(np.logical_and.reduce(in_reply))
        embeddings = self._teacher.embed(mx.array(batch.tokens))
        hits = []
        for step, state in enumerate(self.net.unroll(embeddings, states.hidden, depth)):
            drafted = state.reshape(-1, state.shape[-1])[mx.array(rows)] @ self.output.T
            hit = self._draft_tokens[drafted.argmax(axis=-1)] == best[mx.array(rows + 1 + step)]
            evaluate(hit)
            hits.append(np.array(hit))
        return np.stack(hits, axis=1), rows // batch.tokens.shape[1]


class EagleTrainer(EagleGuesser):
    """`HeadTrainer` for EAGLE-3 heads."""

    def __init__(self, teacher: MlxTeacher, examples: TrainingBatch, counts: NDArray[np.int64]) -> None:
        """Create a new head. See `Teacher.head_trainer`."""
        draft_tokens = np.sort(np.argsort(-counts, kind="stable")[:_MAX_DRAFT_TOKENS])
        self._ids = draft_tokens
        self.config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **teacher.head_layer,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "vocab_size": len(counts),
            "draft_vocab_size": len(draft_tokens),
            "eagle_aux_hidden_state_layer_ids": list(teacher.hidden_layers),
            "torch_dtype": "float16",
        }
        mx.random.seed(0)
        super().__init__(
            teacher, EagleNet(self.config), draft_tokens, teacher.output_rows(mx.array(draft_tokens))
        )
        self._choose_initial_weights(examples)
        self._steps = 0
        self._optimisers = (
            optimizers.Muon(0.0, weight_decay=0.0),
            optimizers.AdamW(0.0, betas=[0.9, 0.95], weight_decay=0.0),
        )
        for optimiser, weights in zip(self._optimisers, self._parts(self._weights()), strict=True):
            optimiser.init(weights)

    def _choose_initial_weights(self, examples: TrainingBatch) -> None:
        """Let `fc` give the target's next last state as well as a linear layer can.

        A least-squares fit to a few thousand tokens takes seconds and saves hundreds of training steps.
        """
        teacher, tokens = self._teacher, mx.array(examples.tokens)
        states = teacher.states(examples.tokens)
        size = self.config["hidden_size"]
        hidden = np.array(states.hidden[:, :-1]).reshape(-1, 3 * size)
        last = _unit_rows(np.array(states.last[:, 1:]).reshape(-1, size))
        next_tokens = _unit_rows(np.array(teacher.embed(tokens[:, 1:])).reshape(-1, size))
        layer_sizes = np.sqrt((hidden.reshape(-1, 3, size) ** 2).mean(axis=(0, 2)) + 1e-6)
        scales = np.repeat(layer_sizes, size)
        inputs = np.concatenate([hidden / scales, next_tokens], axis=1)
        gram = inputs.T @ inputs
        ridge = 0.01 * np.trace(gram) / len(gram) * np.eye(len(gram), dtype=np.float32)
        solution = np.linalg.solve(gram + ridge, inputs.T @ last)
        weights = self._weights()
        weights["fc.weight"] = mx.array((solution[: 3 * size].T / scales).astype(np.float32))
        weights["norm.weight"] = 0.7 * teacher.final_norm
        # The layer begins with a small effect, so that it does not drown the fit.
        weights["midlayer.mlp.down_proj.weight"] *= 0.2
        weights["midlayer.self_attn.o_proj.weight"] *= 0.5
        self._set_weights(weights)
        evaluate(*weights.values())

    def step(self, batch: TrainingBatch, done: float) -> float:
        """See `HeadTrainer`."""
        unroll = sum(done >= first for first in _UNROLL_FROM)
        with translate_errors(f"the head of {self._teacher.name} cannot be trained"):
            states = self._teacher.states(batch.tokens)
            candidates, goals = self._goals(batch, states.logits, unroll)
            output = self._teacher.output_rows(candidates)
            embeddings, hidden = self._teacher.embed(mx.array(batch.tokens)), states.hidden
            evaluate(output, goals.probs, embeddings, hidden)
            del states

            def loss(weights: _Weights) -> mx.array:
                """Return the cross-entropy with the target's probabilities, summed over the steps."""
                self._set_weights(weights)
                total = mx.array(0.0)
                for step, state in enumerate(self.net.unroll(embeddings, hidden, unroll)):
                    logits = state.reshape(-1, state.shape[-1])[mx.array(goals.rows[step])] @ output.T
                    probs = goals.probs[goals.indices[step]]
                    losses = mx.logsumexp(logits, axis=-1) - (probs * logits).sum(axis=-1)
                    total = total + _DECAY**step * losses.sum() / max(1, len(goals.rows[step]))
                return total

            weights = self._weights()
            value, gradients = mx.value_and_grad(loss)(weights)
            gradients, norm = optimizers.clip_grad_norm(gradients, _MAX_GRADIENT_NORM)
            evaluate(value, norm)
            if not mx.isfinite(value + norm).item():
                self._set_weights(weights)
                raise BackendError(f"the loss of the head of {self._teacher.name} is not finite")
            self._steps += 1
            self._apply(gradients, weights, done)
        return float(np.array(value))

    def _goals(self, batch: TrainingBatch, logits: mx.array, unroll: int) -> tuple[mx.array, _Goals]:
        """Return the candidate tokens of a step, and the target's probabilities of them."""
        source = np.flatnonzero(_shifted(batch.replied, 1))
        probs = mx.softmax(logits.reshape(-1, logits.shape[-1])[mx.array(source)], axis=-1)
        mass = probs.sum(axis=0)[self._draft_tokens]
        count = min(_CANDIDATES, len(self._ids))
        candidates = self._draft_tokens[mx.sort(mx.argpartition(-mass, count - 1)[:count])]
        probs = probs[:, candidates]
        rows = [_guessing_rows(batch.replied, step) for step in range(unroll)]
        indices = [mx.array(np.searchsorted(source, each + 1 + step)) for step, each in enumerate(rows)]
        return candidates, _Goals(probs / probs.sum(axis=-1, keepdims=True), rows, indices)

    def _apply(self, gradients: _Weights, weights: _Weights, done: float) -> None:
        falling = min(1.0, (1.0 - done) / (1.0 - _FLAT_FRACTION)) * min(1.0, self._steps / _WARM_UP_STEPS)
        updated: _Weights = {}
        rates = (_MATRIX_RATE * falling, _VECTOR_RATE * falling)
        parts = zip(self._optimisers, rates, self._parts(gradients), self._parts(weights), strict=True)
        for optimiser, rate, gradient, weight in parts:
            optimiser.learning_rate = rate
            updated.update(optimiser.apply_gradients(gradient, weight))
        self._set_weights(updated)
        evaluate(*updated.values(), *self._optimiser_arrays().values())

    @staticmethod
    def _parts(weights: _Weights) -> tuple[_Weights, _Weights]:
        """Return the matrices and the vectors."""
        matrices = {name: array for name, array in weights.items() if array.ndim == 2}
        return matrices, {name: array for name, array in weights.items() if array.ndim == 1}

    def _weights(self) -> _Weights:
        return _leaves(self.net)

    def _set_weights(self, weights: _Weights) -> None:
        self.net.update(tree_unflatten(list(weights.items())))

    def _optimiser_arrays(self) -> _Weights:
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
        arrays = {**self._weights(), **self._optimiser_arrays()}
        mx.save_safetensors(str(path), arrays, {"steps": str(self._steps)})

    def load_state(self, path: Path) -> None:
        """See `HeadTrainer`."""
        expected = {**self._weights(), **self._optimiser_arrays()}
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
        self._set_weights({name: array for name, array in saved.items() if ":" not in name})
        for optimiser in self._optimisers:
            for name, moments in optimiser.state.items():
                if isinstance(moments, dict):
                    moments.update({moment: saved[f"{name}:{moment}"] for moment in moments})

    def publish(self, folder: Path) -> None:
        """See `HeadTrainer`."""
        arrays = {name: array.astype(mx.float16) for name, array in self._weights().items()}
        arrays["lm_head.weight"] = self.output.astype(mx.float16)
        # `d2t` holds the difference between the ids of a token in the two vocabularies.
        arrays["d2t"] = mx.array(self._ids - np.arange(len(self._ids)), mx.int64)
        arrays["t2d"] = mx.array(np.isin(np.arange(self.config["vocab_size"]), self._ids))
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")


def load_published_head(teacher: MlxTeacher, folder: Path) -> EagleGuesser:
    """Load a head in the layout of SafeAILab and SpecForge. See `Teacher.published_head`."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        arrays: Any = mx.load(str(folder / "model.safetensors"))
        output = arrays.pop("lm_head.weight").astype(mx.float32)
        offsets = np.array(arrays.pop("d2t"), np.int64)
        arrays.pop("t2d", None)
        net = EagleNet(config)
        net.load_weights([(name, array.astype(mx.float32)) for name, array in arrays.items()])
        size = teacher.head_layer["hidden_size"]
        if config["hidden_size"] != size or config["vocab_size"] != teacher.vocabulary.size:
            raise ValueError("it was made for another target")
        evaluate(output, *_leaves(net).values())
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{folder} contains no EAGLE-3 head for {teacher.name} that could be compared: {error}",
            "choose another folder for the new head",
        ) from error
    return EagleGuesser(teacher, net, offsets + np.arange(len(offsets)), output)


def _leaves(net: EagleNet) -> _Weights:
    leaves: Any = tree_flatten(net.parameters())
    return dict(leaves)


def _shifted(replied: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    """Return whether the token `count` tokens later belongs to a reply."""
    later = np.zeros_like(replied)
    later[:, : max(0, replied.shape[1] - count)] = replied[:, count:]
    return later


def _guessing_rows(replied: NDArray[np.bool_], step: int) -> NDArray[np.int64]:
    """Return the rows of the flattened batch from which step `step` of a draft guesses a reply's token."""
    return np.flatnonzero(_shifted(replied, 2 + step))


def _unit_rows(states: NDArray[np.float32]) -> NDArray[np.float32]:
    rows: NDArray[np.float32] = states / np.sqrt((states**2).mean(axis=-1, keepdims=True) + 1e-6)
    return rows
