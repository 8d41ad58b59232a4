"""Train Medusa heads (arXiv 2401.10774) and Hydra heads (arXiv 2402.05109)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from numpy.typing import NDArray

from edgespec.backends.mlx.evaluation import evaluate
from edgespec.backends.mlx.gradient_descent import Arrays
from edgespec.backends.mlx.head_trainer import TrainableHead, least_squares
from edgespec.backends.mlx.teacher_model import TeacherModel
from edgespec.model.drafter_training import TrainingBatch
from edgespec.model.hidden_states import POST_NORM

__all__ = ["TrainableHydra", "TrainableMedusa"]

# Number of heads, and of residual blocks per head, as in most published heads. Each head predicts one token
# further ahead than the previous one.
_HEADS, _BLOCKS = 4, 1


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
    """The residual blocks of all heads. `blocks[i]` holds the blocks of head i."""

    def __init__(self, size: int, reads_tokens: bool) -> None:
        super().__init__()
        inputs = [size * (head + 2 if reads_tokens else 1) for head in range(_HEADS)]
        more = _BLOCKS - 1
        self.blocks = [[_Block(each, size), *(_Block(size, size) for _ in range(more))] for each in inputs]


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
                f"{cls.name}_num_layers": _BLOCKS,
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
        for blocks in self._heads.blocks[:steps]:
            if self.reads_tokens:
                embeddings = mx.concatenate([embeddings[:, 1:], mx.zeros_like(embeddings[:, :1])], axis=1)
                inputs = mx.concatenate([inputs, embeddings], axis=-1)
            state = inputs
            for block in blocks:
                state = block(state)
            yield state

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
