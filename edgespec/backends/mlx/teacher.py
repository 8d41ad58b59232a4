"""Load a target for training heads. It generates text, and provides hidden states and logits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions, Progress, Vocabulary
from edgespec.backends.drafter_training import Student
from edgespec.backends.hidden_state_log import POST_NORM
from edgespec.backends.mlx.batch_writing import write_texts
from edgespec.backends.mlx.draft_trainer import DraftStudent
from edgespec.backends.mlx.evaluation import evaluate, translate_errors
from edgespec.backends.mlx.float32_weights import convert_to_float32, faster_in_float32
from edgespec.backends.mlx.head_trainer import HeadStudent
from edgespec.backends.mlx.layers import Body, HiddenStateHooks
from edgespec.backends.mlx.loading import LoadedMlxModel, load_model
from edgespec.backends.mlx.model_skeleton import translate_load_errors
from edgespec.backends.mlx.target_ends import TargetLmHead
from edgespec.backends.mlx.trainable_eagle import TrainableEagle
from edgespec.backends.mlx.trainable_head import TrainableHead
from edgespec.backends.mlx.trainable_residual import TrainableHydra, TrainableMedusa
from edgespec.backends.mlx.vocabulary import MlxVocabulary
from edgespec.errors import CapabilityError

__all__ = ["MlxTeacher", "TargetStates", "load_teacher"]

_HEADS: dict[str, type[TrainableHead]] = {
    "eagle3": TrainableEagle,
    "medusa": TrainableMedusa,
    "hydra": TrainableHydra,
}


class TargetStates(NamedTuple):
    """A target's hidden states and logits for a batch of conversations.

    Attributes:
        hidden: The requested hidden states side by side, float32 [conversations, tokens, states x size].
        logits: float32 [conversations, tokens, vocabulary].
    """

    hidden: mx.array
    logits: mx.array


def load_teacher(path: str, name: str, progress: Progress | None = None) -> MlxTeacher:
    """Load an MLX or Hugging Face model for which heads will be trained.

    Args:
        path: Path of the model folder.
        name: Model name for error messages.
        progress: Called with a description and the completed fraction. Returning False cancels loading.

    Raises:
        ModelFileError: The folder does not contain a model, or the model is damaged or unsupported.
        MemoryBudgetError: The model does not fit in memory.
        CapabilityError: Heads cannot be trained for this model.
        CancelledError: `progress` returned False.
    """
    loaded = load_model(path, name, LoadOptions(), progress)
    with translate_load_errors(path):
        vocabulary = MlxVocabulary(loaded.tokenizer, loaded.skeleton.vocab_size)
        if faster_in_float32(loaded):
            convert_to_float32(loaded.skeleton.model)
    return MlxTeacher(loaded, name, vocabulary)


class MlxTeacher:
    """Implements `Teacher` for MLX models.

    Attributes:
        config: The model's `config.json`, or the part of it that describes its text layers.
        layers: Number of layers.
        size: Number of values in a hidden state.
        final_norm: Weights of the norm before the output matrix, float32 [size].
    """

    def __init__(self, loaded: LoadedMlxModel, name: str, vocabulary: MlxVocabulary) -> None:
        self.name = name
        self.vocabulary: Vocabulary = vocabulary
        self._net = loaded.skeleton.model
        config = loaded.skeleton.config
        self.config: dict[str, Any] = config.get("text_config") or config
        self.context_tokens = loaded.skeleton.sizes.trained_context_tokens
        self._hooks = HiddenStateHooks(self._net)
        self.layers = self._hooks.count
        self._find_matrices()

    def _find_matrices(self) -> None:
        """Find the embeddings, the final norm and the output matrix, which heads share with the target."""
        outside = [(key, one) for key, one in self._net.named_modules() if ".layers." not in f".{key}"]
        tables = [one for _, one in outside if isinstance(one, Embedding | QuantizedEmbedding)]
        heads = [one for key, one in outside if key.rpartition(".")[2] == "lm_head" and "weight" in one]
        norms = [one for _, one in outside if "weight" in one and one["weight"].ndim == 1]
        if len(tables) != 1 or len(norms) != 1:
            raise CapabilityError(
                f"a head for {self.name} cannot be trained: it has {len(tables)} embedding tables and"
                f" {len(norms)} final norms, instead of one each",
                "choose another model",
            )
        self._table, self._output = tables[0], heads[0] if heads else tables[0]
        # Apply the norm to ones instead of reading its weights, because some architectures add 1 to them.
        self.final_norm = norms[0](mx.ones(norms[0]["weight"].shape)).astype(mx.float32)
        self.size: int = self.final_norm.shape[0]
        evaluate(self.final_norm)

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of tokens, float32 [..., size]."""
        return self._table(tokens).astype(mx.float32)

    def output_rows(self, tokens: mx.array) -> mx.array:
        """Return the rows of the output matrix that give the logits of `tokens`, float32 [tokens, size]."""
        if "scales" not in self._output:
            return self._output["weight"][tokens].astype(mx.float32)
        packed = {
            key: self._output[key][tokens] for key in ("weight", "scales", "biases") if key in self._output
        }
        return mx.dequantize(
            packed["weight"],
            packed["scales"],
            packed.get("biases"),
            group_size=self._output.group_size,
            bits=self._output.bits,
            mode=self._output.mode,
        ).astype(mx.float32)

    def lm_head(self) -> TargetLmHead:
        """Return the LM head. Raises CapabilityError if it is not separate from the layers."""
        return TargetLmHead(self._net)

    def logits(self, tokens: NDArray[np.int32]) -> mx.array:
        """Return the logits for a batch of conversations, float32 [conversations, tokens, vocabulary]."""
        with translate_errors(f"{self.name} could not be run"):
            return self._net(mx.array(tokens)).astype(mx.float32)

    def states(self, tokens: NDArray[np.int32], states: Sequence[int]) -> TargetStates:
        """Run the target over a batch of conversations.

        Args:
            tokens: int32 [conversations, tokens].
            states: The hidden states to return, numbered as in `HiddenStateSource`.
        """
        hooks, body = self._hooks, Body(self._net) if POST_NORM in states else None
        with translate_errors(f"{self.name} could not be run"):
            # The index `self.layers` is the last layer's output, which is recorded together with that layer's
            # input.
            layers = {min(state, self.layers - 1) for state in states if state != POST_NORM}
            with hooks.on(layers), body.recorded() if body else nullcontext():
                logits = self._net(mx.array(tokens)).astype(mx.float32)
            known = dict(hooks.inputs)
            if self.layers in states:
                known[self.layers] = hooks.outputs[self.layers - 1]
            if body and body.output is not None:
                known[POST_NORM] = body.output
            hidden = mx.concatenate([known[state] for state in states], axis=-1)
            return TargetStates(hidden.astype(mx.float32), logits)

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_tokens: int,
        seed: int,
        progress: Progress,
    ) -> list[list[int]]:
        return write_texts(
            self._net,
            self.vocabulary,
            prompts,
            temperatures,
            [max_tokens] * len(prompts),
            seed,
            progress,
            failure=f"{self.name} could not write text",
        )

    def head(self, method: str) -> Student:
        return HeadStudent(self, _HEADS[method])

    def draft(self, path: Path, name: str, lora: bool) -> Student:
        return DraftStudent(self, path, name, lora)
