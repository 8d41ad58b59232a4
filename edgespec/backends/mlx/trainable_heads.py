"""Train EAGLE-3 (arXiv 2503.01840), Medusa (arXiv 2401.10774) and Hydra heads (arXiv 2402.05109)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from numpy.typing import NDArray

from edgespec.backends.mlx.eagle import EagleLayer
from edgespec.backends.mlx.evaluation import evaluate
from edgespec.backends.mlx.gradient_descent import Arrays
from edgespec.backends.mlx.head_trainer import TrainableHead, least_squares
from edgespec.backends.mlx.teacher_model import TeacherModel
from edgespec.errors import CapabilityError
from edgespec.model.drafter_training import TrainingBatch
from edgespec.model.heads.eagle_files import parse_config
from edgespec.model.hidden_states import POST_NORM

__all__ = ["TrainableEagle", "TrainableHydra", "TrainableMedusa", "UnrolledEagle", "choose_draft_tokens"]

# Minimum number of layers in the target. EAGLE-3 heads read the inputs of layer 2, the middle layer and the
# third layer from the end.
_MIN_LAYERS = 6
# Keys of the target's `config.json` that determine the sizes of the head's layer.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads")
# The draft vocabulary consists of the most frequent tokens that make up this share of the training replies.
# A draft ends at a token outside the vocabulary, but a larger output matrix makes every drafted token slower.
# The share was chosen rather than measured.
_COVERAGE = 0.99
# Minimum and maximum size of the draft vocabulary. A short training run sees too few tokens to justify a
# smaller vocabulary, and most published heads have 32,000 tokens.
_MIN_DRAFT_TOKENS, _MAX_DRAFT_TOKENS = 8_192, 32_768
# The vocabulary size is a multiple of this, because matrix products are fast for such sizes.
_TOKENS_STEP = 256
# Smallest scale of a channel of the hidden states, relative to the median of all channels. The value was
# chosen rather than measured.
_MIN_CHANNEL = 0.3
# The head drafts one more token per training step after each of these fractions of the training. Each
# additional token takes as much time as the first, and is useful only once the earlier tokens are accurate.
_UNROLL_FROM = (0.0, 0.1, 0.25, 0.45)

# Number of Medusa or Hydra heads, as in most published heads. Each head predicts one token further ahead than
# the previous one.
_HEADS = 4


class UnrolledEagle(Module):
    """A transformer layer that reads the target's token embeddings and hidden states.

    The output matrix is not part of the network, because heads use a copy of the target's. The modules are
    named as in the heads published by SafeAILab and SpecForge, except for `scaled_fc`. It reads hidden states
    whose channels are scaled to about the same size, and the published `fc` reads the states themselves.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        settings = parse_config(config, 3)
        size = settings.hidden_size
        self.scaled_fc = Linear(3 * size, size, bias=False)
        self.midlayer = EagleLayer(settings)
        self.norm = RMSNorm(size, settings.norm_eps)

    def unroll(self, embeddings: mx.array, hidden: mx.array, steps: int) -> Iterator[mx.array]:
        """Draft several tokens ahead from every token at once, as in training-time test (section 3.2).

        In the first step, row t reads the target's hidden state at token t and the embedding of token t + 1,
        and attends to all rows up to its own. In each later step, it reads its own output from the previous
        step and the embedding of the next token, and also attends to its own rows from earlier steps, just as
        in drafting. See `TrainableHead.unroll`. The hidden states have been scaled.
        """
        attention = _UnrolledAttention(hidden.shape[1])
        state = self.scaled_fc(hidden)
        for _ in range(steps):
            embeddings = mx.concatenate([embeddings[:, 1:], mx.zeros_like(embeddings[:, :1])], axis=1)
            state = self.midlayer(state, embeddings, attention)
            yield self.norm(state)


class _UnrolledAttention:
    """Attention in which row t of each step attends to rows 0 to t of step 0 and to row t of later steps."""

    def __init__(self, length: int) -> None:
        rows = mx.arange(length)
        self._mask = mx.where(rows[None] <= rows[:, None], 0.0, -mx.inf)
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    @property
    def offset(self) -> int:
        """Number of earlier steps. Row t of step j belongs to the token at position t + j."""
        return len(self._keys)

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        shared = queries.shape[1] // keys.shape[1]
        queries = queries * scale
        self._keys.append(mx.repeat(keys, shared, axis=1))
        self._values.append(mx.repeat(values, shared, axis=1))
        length = queries.shape[2]
        own = [(queries * key).sum(axis=-1, keepdims=True) for key in self._keys[1:]]
        scores = mx.concatenate([queries @ self._keys[0].swapaxes(-1, -2) + self._mask, *own], axis=-1)
        weights = mx.softmax(scores, axis=-1)
        output = weights[..., :length] @ self._values[0]
        for step, value in enumerate(self._values[1:]):
            output = output + weights[..., length + step : length + step + 1] * value
        return output


class TrainableEagle(TrainableHead):
    """Implements `TrainableHead` for EAGLE-3 heads, in the layout of SafeAILab and SpecForge.

    Attributes:
        output: The output matrix, float32 [draft tokens, size].
    """

    name, title = "eagle3", "EAGLE-3 head"
    weights_file = "model.safetensors"
    # After 42 steps with 2,641 tokens for SmolLM2, the held-out loss was 6.94 with 0.2, and 7.11 with 1.
    rate_scale = 0.2

    def __init__(
        self,
        teacher: TeacherModel,
        config: Mapping[str, Any],
        draft_tokens: NDArray[np.int64],
        output: mx.array,
    ) -> None:
        self._layer = UnrolledEagle(config)
        super().__init__(self._layer, config)
        # The hidden states are divided by these before `scaled_fc`.
        self._scales = mx.ones(3 * teacher.size)
        self.states = _hidden_layers(teacher)
        self.draft_tokens, self.output = draft_tokens, output

    @classmethod
    def create(cls, teacher: TeacherModel, examples: TrainingBatch, counts: NDArray[np.int64]) -> Self:
        draft_tokens = choose_draft_tokens(counts)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **_layer_config(teacher),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "vocab_size": len(counts),
            "draft_vocab_size": len(draft_tokens),
            "eagle_aux_hidden_state_layer_ids": list(_hidden_layers(teacher)),
            "torch_dtype": "float16",
        }
        head = cls(teacher, config, draft_tokens, teacher.output_rows(mx.array(draft_tokens)))
        head._choose_initial_weights(teacher, examples)
        return head

    def _choose_initial_weights(self, teacher: TeacherModel, examples: TrainingBatch) -> None:
        """Choose the scales of the hidden states, and initialise `scaled_fc` with a linear map.

        Of all linear maps, it best predicts the target's final hidden state at the next token.
        """
        size, sources = teacher.size, [*self.states, teacher.layers]
        states = np.array(teacher.states(examples.tokens, sources).hidden).reshape(-1, 4 * size)
        embeddings = np.array(teacher.embed(mx.array(examples.tokens))).reshape(-1, size)
        # Use only the rows that the head learns to draft from. The hidden states of the first token are
        # hundreds of times as large as those of others, and those of the padding are not text.
        rows = np.flatnonzero(examples.replied_after(2))
        hidden, next_tokens = states[rows, : 3 * size], _unit_rows(embeddings[rows + 1])
        last = _unit_rows(states[rows + 1, 3 * size :])
        scales = _channel_sizes(hidden)
        solution = least_squares(np.concatenate([hidden / scales, next_tokens], axis=1), last)
        self._scales = mx.array(scales)
        weights = self.weights
        weights["scaled_fc.weight"] = mx.array(solution[: 3 * size].T.astype(np.float32))
        weights["norm.weight"] = 0.7 * teacher.final_norm
        # Shrink the other initial weights, so that the fitted prediction dominates.
        weights["midlayer.mlp.down_proj.weight"] *= 0.2
        weights["midlayer.self_attn.o_proj.weight"] *= 0.5
        self.weights = weights
        evaluate(self._scales, *weights.values())

    @classmethod
    def read(cls, teacher: TeacherModel, config: Mapping[str, Any], arrays: Arrays) -> Self:
        # A head with the target's whole vocabulary may lack `d2t`. A head without an output matrix uses the
        # target's.
        offsets = np.array(arrays.pop("d2t", mx.zeros(config["vocab_size"])), np.int64)
        draft_tokens = offsets + np.arange(len(offsets))
        stored = arrays.pop("lm_head.weight", None)
        output = teacher.output_rows(mx.array(draft_tokens)) if stored is None else stored.astype(mx.float32)
        arrays.pop("t2d", None)
        arrays["scaled_fc.weight"] = arrays.pop("fc.weight")
        head = cls(teacher, config, draft_tokens, output)
        head.net.load_weights([(name, array.astype(mx.float32)) for name, array in arrays.items()])
        if config["hidden_size"] != teacher.size or config["vocab_size"] != teacher.vocabulary.size:
            raise ValueError("the draft head was made for another model")
        evaluate(output)
        return head

    def steps(self, done: float) -> int:
        return sum(done >= first for first in _UNROLL_FROM)

    def unroll(self, embeddings: mx.array, hidden: mx.array, steps: int) -> Iterator[mx.array]:
        return self._layer.unroll(embeddings, hidden / self._scales, steps)

    def logits(self, states: mx.array) -> mx.array:
        return states @ self.output.T

    def published(self) -> Arrays:
        ids = self.draft_tokens
        weights = self.weights
        weights["fc.weight"] = weights.pop("scaled_fc.weight") / self._scales
        arrays = {name: array.astype(mx.float16) for name, array in weights.items()}
        arrays["lm_head.weight"] = self.output.astype(mx.float16)
        # `d2t` holds each token's id in the target's vocabulary minus its id in the draft vocabulary.
        arrays["d2t"] = mx.array(ids - np.arange(len(ids)), mx.int64)
        arrays["t2d"] = mx.array(np.isin(np.arange(self.config["vocab_size"]), ids))
        return arrays


def choose_draft_tokens(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ids of the most frequent tokens that make up `_COVERAGE` of `counts`, in ascending order.

    Of equally frequent tokens, those with the lowest ids are chosen, because most tokenizers number frequent
    tokens first.
    """
    frequent = np.argsort(-counts, kind="stable")
    covered = np.cumsum(counts[frequent])
    needed = int(np.searchsorted(covered, _COVERAGE * covered[-1])) + 1
    rounded = -(-needed // _TOKENS_STEP) * _TOKENS_STEP
    return np.sort(frequent[: min(max(rounded, _MIN_DRAFT_TOKENS), _MAX_DRAFT_TOKENS)])


def _hidden_layers(teacher: TeacherModel) -> tuple[int, ...]:
    """Return the indices of the target layers whose inputs the head reads."""
    layers = teacher.layers
    if layers < _MIN_LAYERS:
        raise CapabilityError(
            f"{teacher.name} has {layers} layers, but EAGLE-3 heads read hidden states of at least"
            f" {_MIN_LAYERS}",
            "choose a larger model, or train Medusa heads",
            code="model_not_trainable",
        )
    return (2, layers // 2, layers - 3)


def _layer_config(teacher: TeacherModel) -> dict[str, Any]:
    """Return the configuration of the head's layer, with the same sizes as the target's layers."""
    config = teacher.config
    missing = [key for key in _SIZES if not isinstance(config.get(key), int)]
    if missing:
        raise CapabilityError(
            f"cannot train an EAGLE-3 head for {teacher.name}, because its config.json lacks {missing[0]}",
            "choose another model",
            code="model_not_trainable",
        )
    heads = config["num_attention_heads"]
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": float(config.get("rope_theta") or 10_000.0),
        "max_position_embeddings": teacher.context_tokens,
    }


def _channel_sizes(hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the root mean square of each channel of the hidden states, for dividing them by it.

    Channels that are almost always zero get a larger value, so that their noise is not amplified.
    """
    sizes = np.sqrt((hidden**2).mean(axis=0))
    return np.maximum(sizes, _MIN_CHANNEL * np.median(sizes) + 1e-6).astype(np.float32)


def _unit_rows(states: NDArray[np.float32]) -> NDArray[np.float32]:
    rows: NDArray[np.float32] = states / np.sqrt((states**2).mean(axis=-1, keepdims=True) + 1e-6)
    return rows


class _Block(Module):
    """A residual block. Before training, it returns its input unchanged, or a linear map of its input."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.linear = Linear(inputs, size)
        self.linear.update({name: mx.zeros_like(array) for name, array in self.linear.parameters().items()})
        if inputs > size:
            self.res_connection = Linear(inputs, size)

    def __call__(self, x: mx.array) -> mx.array:
        shortcut = self.res_connection(x) if "res_connection" in self else x
        return shortcut + silu(self.linear(x))


class _Heads(Module):
    """The residual blocks of all heads. `blocks[i]` holds the only block of head i."""

    def __init__(self, size: int, reads_tokens: bool) -> None:
        super().__init__()
        inputs = [size * (head + 2 if reads_tokens else 1) for head in range(_HEADS)]
        self.blocks = [[_Block(each, size)] for each in inputs]


class _TrainableHeads(TrainableHead):
    """Heads that read the target's final hidden state and use the target's LM head."""

    reads_tokens: ClassVar[bool]
    # Prefix of the residual blocks' names in the published layout.
    prefix: ClassVar[str]

    def __init__(self, teacher: TeacherModel, config: Mapping[str, Any]) -> None:
        self._heads = _Heads(teacher.size, self.reads_tokens)
        super().__init__(self._heads, config)
        self.states = (POST_NORM,)
        self.draft_tokens = np.arange(teacher.vocabulary.size)
        self._teacher, self._lm_head = teacher, teacher.lm_head()

    @classmethod
    def create(cls, teacher: TeacherModel, examples: TrainingBatch, counts: NDArray[np.int64]) -> Self:  # noqa: ARG003
        return cls(
            teacher,
            {
                f"{cls.name}_num_heads": _HEADS,
                f"{cls.name}_num_layers": 1,
                "base_model_name_or_path": Path(teacher.name).name,
            },
        )

    @classmethod
    def read(cls, teacher: TeacherModel, config: Mapping[str, Any], arrays: Arrays) -> Self:
        head = cls(teacher, config)
        blocks = {
            f"blocks.{name.removeprefix(cls.prefix)}": array.astype(mx.float32)
            for name, array in arrays.items()
        }
        head.net.load_weights(list(blocks.items()))
        return head

    def steps(self, done: float) -> int:  # noqa: ARG002 - all heads are trained from the beginning
        return _HEADS

    def unroll(self, embeddings: mx.array, hidden: mx.array, steps: int) -> Iterator[mx.array]:
        inputs = hidden
        for (block,) in self._heads.blocks[:steps]:
            if self.reads_tokens:
                embeddings = mx.concatenate([embeddings[:, 1:], mx.zeros_like(embeddings[:, :1])], axis=1)
                inputs = mx.concatenate([inputs, embeddings], axis=-1)
            yield block(inputs)

    def logits(self, states: mx.array) -> mx.array:
        return self._lm_head(states)

    def published(self) -> Arrays:
        return {
            self.prefix + name.removeprefix("blocks."): array.astype(mx.float16)
            for name, array in self.weights.items()
        }


class TrainableMedusa(_TrainableHeads):
    """Medusa heads without output matrices, as written by Medusa's current training script."""

    name, title = "medusa", "Medusa heads"
    weights_file = "medusa_lm_head.safetensors"
    reads_tokens, prefix = False, ""


class TrainableHydra(_TrainableHeads):
    """Hydra heads. Their published layout contains a copy of the target's output matrix for each head."""

    name, title = "hydra", "Hydra heads"
    weights_file = "hydra_lm_head.safetensors"
    reads_tokens, prefix = True, "hydra_mlp."

    @classmethod
    def create(cls, teacher: TeacherModel, examples: TrainingBatch, counts: NDArray[np.int64]) -> Self:
        head = super().create(teacher, examples, counts)
        head.config = {
            **head.config, "hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0,
        }  # fmt: skip
        head._choose_initial_weights(examples)
        return head

    def _choose_initial_weights(self, examples: TrainingBatch) -> None:
        """Initialise each head with the linear map that best predicts the target's later hidden state.

        Medusa heads cannot be initialised this way, because the shortcut in their residual blocks is the
        identity.
        """
        teacher, tokens = self._teacher, examples.tokens
        embeddings = np.array(teacher.embed(mx.array(tokens)))
        states = np.array(teacher.states(tokens, self.states).hidden)
        # Scale both inputs to a root mean square of about one, because ridge regression would suppress small
        # inputs.
        state_scale, token_scale = (1.0 / np.sqrt((each**2).mean() + 1e-6) for each in (states, embeddings))
        weights = self.weights
        for head in range(_HEADS):
            count = max(0, tokens.shape[1] - 1 - head)
            following = [embeddings[:, n : n + count] * token_scale for n in range(1, head + 2)]
            inputs = np.concatenate([states[:, :count] * state_scale, *following], axis=-1)
            goals = states[:, 1 + head : 1 + head + count]
            solution = least_squares(inputs.reshape(-1, inputs.shape[-1]), goals.reshape(-1, teacher.size))
            scales = np.repeat([state_scale, *[token_scale] * (head + 1)], teacher.size)
            shortcut = f"blocks.{head}.0.res_connection"
            weights[f"{shortcut}.weight"] = mx.array((solution.T * scales).astype(np.float32))
            weights[f"{shortcut}.bias"] = mx.zeros_like(weights[f"{shortcut}.bias"])
        self.weights = weights
        evaluate(*weights.values())

    @classmethod
    def read(cls, teacher: TeacherModel, config: Mapping[str, Any], arrays: Arrays) -> Self:
        outputs = [arrays.pop(f"hydra_lm_head.{head}.weight") for head in range(_HEADS)]
        own = cls._output(teacher)
        if not all(mx.array_equal(output, own).item() for output in outputs):
            raise ValueError("the output matrices of the heads differ from the model's")
        return super().read(teacher, config, arrays)

    def published(self) -> Arrays:
        output = self._output(self._teacher)
        return {**super().published(), **{f"hydra_lm_head.{head}.weight": output for head in range(_HEADS)}}

    @staticmethod
    def _output(teacher: TeacherModel) -> mx.array:
        return teacher.output_rows(mx.arange(teacher.vocabulary.size)).astype(mx.float16)
