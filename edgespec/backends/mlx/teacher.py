"""Load a target for training heads. It generates text, and provides hidden states and logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import psutil
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import dequantize_model
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions, Progress, Vocabulary
from edgespec.backends.head_training import Guesser, HeadTrainer, TrainingBatch
from edgespec.backends.hidden_state_log import POST_NORM
from edgespec.backends.mlx.build_info import runs_on_cpu
from edgespec.backends.mlx.evaluation import evaluate, translate_errors
from edgespec.backends.mlx.head_trainer import MlxHeadTrainer, load_published_head
from edgespec.backends.mlx.layers import Body, HiddenStateHooks
from edgespec.backends.mlx.loading import LoadedModel, load_model
from edgespec.backends.mlx.model_skeleton import named_arrays, translate_load_errors
from edgespec.backends.mlx.target_ends import TargetLmHead
from edgespec.backends.mlx.trainable_eagle import TrainableEagle
from edgespec.backends.mlx.trainable_head import TrainableHead
from edgespec.backends.mlx.trainable_residual import TrainableHydra, TrainableMedusa
from edgespec.backends.mlx.vocabulary import MlxVocabulary
from edgespec.errors import CancelledError, CapabilityError

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
    net = loaded.skeleton.model
    with translate_load_errors(path):
        vocabulary = MlxVocabulary(loaded.tokenizer, loaded.skeleton.vocab_size)
        if runs_on_cpu() and 4 * loaded.skeleton.parameters < psutil.virtual_memory().available // 2:
            # On a CPU, MLX multiplies batches with quantised weights more slowly than with float32.
            dequantize_model(net)
            net.set_dtype(mx.float32)
            evaluate(*(array for _, array in named_arrays(net.parameters())))
    return MlxTeacher(loaded, name, vocabulary)


class MlxTeacher:
    """`Teacher` for MLX models.

    Attributes:
        config: The model's `config.json`, or the part of it that describes its text layers.
        layers: Number of layers.
        size: Number of values in a hidden state.
        final_norm: Weights of the norm before the output matrix, float32 [size].
    """

    def __init__(self, loaded: LoadedModel, name: str, vocabulary: MlxVocabulary) -> None:
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

    def states(self, tokens: NDArray[np.int32], states: Sequence[int]) -> TargetStates:
        """Run the target over a batch of conversations.

        Args:
            tokens: int32 [conversations, tokens].
            states: The hidden states to return, numbered as in `HiddenStateSource`.
        """
        hooks, body = self._hooks, Body(self._net) if POST_NORM in states else None
        with translate_errors(f"{self.name} could not be run"):
            # The output of the last layer is recorded together with its input.
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
        """See `Teacher`."""
        mx.random.seed(seed)
        # Share one sampler between prompts with the same temperature, because mlx-lm then samples their
        # tokens together.
        samplers = {each: _sampler(each) for each in set(temperatures)}
        ends = [[token] for token in range(self.vocabulary.size) if self.vocabulary.is_end(token)]
        texts: dict[int, list[int]] = {}
        with translate_errors(f"{self.name} could not generate text"):
            # Use this thread's stream, because this thread evaluates the arrays.
            generator = BatchGenerator(
                self._net,
                max_tokens=max_tokens,
                stop_tokens=ends,
                completion_batch_size=len(prompts),
                prefill_batch_size=len(prompts),
                stream=mx.default_stream(mx.default_device()),
            )
            try:
                chosen = [samplers[each] for each in temperatures]
                numbers = generator.insert([list(each) for each in prompts], samplers=chosen)
                texts = {number: [] for number in numbers}
                finished = 0
                while finished < len(prompts):
                    longest = max(map(len, texts.values()))
                    if not progress("writing", max(finished / len(prompts), longest / max_tokens)):
                        raise CancelledError("writing was cancelled")
                    for response in generator.next_generated():
                        texts[response.uid].append(response.token)
                        finished += response.finish_reason is not None
            finally:
                generator.close()
        return [texts[number] for number in numbers]

    def head_trainer(self, method: str, examples: TrainingBatch, counts: NDArray[np.int64]) -> HeadTrainer:
        """See `Teacher`."""
        mx.random.seed(0)
        return MlxHeadTrainer(self, _HEADS[method].create(self, examples, counts))

    def published_head(self, method: str, folder: Path) -> Guesser | None:
        """See `Teacher`."""
        return load_published_head(self, _HEADS[method], folder)


def _sampler(temperature: float) -> Callable[[mx.array], mx.array]:
    """Return a function that draws tokens at a temperature, given their log probabilities."""
    if not temperature:
        return lambda logprobs: mx.argmax(logprobs, axis=-1)
    return lambda logprobs: mx.random.categorical(logprobs / temperature)
