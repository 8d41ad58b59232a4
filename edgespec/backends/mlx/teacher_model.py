"""The teacher in distillation: a target that generates text and provides hidden states and logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import psutil
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import dequantize_model
from numpy.typing import NDArray

from edgespec.backends.mlx.build_info import runs_on_cpu
from edgespec.backends.mlx.evaluation import evaluate, translate_errors
from edgespec.backends.mlx.heads import target_lm_head
from edgespec.backends.mlx.layers import HiddenStateHooks
from edgespec.backends.mlx.model_skeleton import named_arrays
from edgespec.backends.mlx.vocabulary import MlxVocabulary
from edgespec.backends.mlx.weight_loading import LoadedMlxModel
from edgespec.errors import CancelledError, CapabilityError
from edgespec.model.base import Progress, Vocabulary
from edgespec.system.openblas import why_slow

__all__ = ["TeacherModel", "convert_to_float32", "faster_in_float32", "token_ranks", "write_texts"]


class TargetStates(NamedTuple):
    """A target's hidden states and logits for a batch of conversations.

    Attributes:
        hidden: The requested hidden states, concatenated, float32 [conversations, tokens, states * size].
        logits: float32 [conversations, tokens, vocabulary].
    """

    hidden: mx.array
    logits: mx.array


class TeacherModel:
    """A target whose text, hidden states and logits are used to train heads and draft models.

    Attributes:
        config: The model's `config.json`, or its text section for multimodal models.
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
        self.memory_bytes = sum(array.nbytes for _, array in named_arrays(self._net.parameters()))
        self.why_slow = why_slow() if runs_on_cpu() else ""
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
                f"cannot train a draft head for {self.name}: it has {len(tables)} embedding tables and"
                f" {len(norms)} final norms, instead of one each",
                "choose another model",
                code="model_not_trainable",
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
        """Return the output matrix rows that produce the logits of `tokens`, float32 [tokens, size]."""
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

    def lm_head(self) -> Callable[[mx.array], mx.array]:
        """See `target_lm_head`."""
        return target_lm_head(self._net)

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
        with translate_errors(f"{self.name} could not be run"):
            with self._hooks.on(states):
                logits = self._net(mx.array(tokens)).astype(mx.float32)
            hidden = mx.concatenate([self._hooks.states[state] for state in states], axis=-1)
            return TargetStates(hidden.astype(mx.float32), logits)

    def peak_bytes(self) -> int:
        peak = int(mx.get_peak_memory())
        mx.reset_peak_memory()
        return peak

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
            failure=f"{self.name} could not generate text",
        )


def write_texts(
    net: Any,
    vocabulary: Vocabulary,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_tokens: Sequence[int],
    seed: int,
    progress: Progress,
    *,
    failure: str,
) -> list[list[int]]:
    """Continue each prompt until an end token or its maximum length (at least 1). See `Teacher.write`.

    The message of any BackendError starts with `failure`.
    """
    mx.random.seed(seed)
    # Use one sampler per temperature, because mlx-lm samples all prompts with the same sampler in one batch.
    samplers = {each: _sampler(each) for each in set(temperatures)}
    ends = [[token] for token in range(vocabulary.size) if vocabulary.is_end(token)]
    texts: dict[int, list[int]] = {}
    with translate_errors(failure):
        # Use the current thread's stream, because this thread evaluates the arrays.
        generator = BatchGenerator(
            net,
            stop_tokens=ends,
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
            stream=mx.default_stream(mx.default_device()),
        )
        try:
            chosen = [samplers[each] for each in temperatures]
            numbers = generator.insert([list(each) for each in prompts], list(max_tokens), samplers=chosen)
            texts = {number: [] for number in numbers}
            finished = 0
            while finished < len(prompts):
                longest = max(map(len, texts.values()))
                if not progress("writing", max(finished / len(prompts), longest / max(max_tokens))):
                    raise CancelledError("generating text was cancelled")
                for response in generator.next_generated():
                    texts[response.uid].append(response.token)
                    finished += response.finish_reason is not None
        finally:
            generator.close()
    return [texts[number] for number in numbers]


def _sampler(temperature: float) -> Callable[[mx.array], mx.array]:
    """Return a function that samples tokens from their log-probabilities at a given temperature."""
    if not temperature:
        return lambda logprobs: mx.argmax(logprobs, axis=-1)
    return lambda logprobs: mx.random.categorical(logprobs / temperature)


def token_ranks(logits: mx.array, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of one token per row, int64 [rows]. Rank 0 has the highest logit.

    Args:
        logits: float32 [rows, tokens].
        tokens: The column of the token to rank in each row, or -1 for a token without a column, which ranks
            after all others.
    """
    count = logits.shape[-1]
    known = mx.array(np.maximum(tokens, 0))[:, None]
    own = mx.take_along_axis(logits, known, axis=-1)
    # Like argmax, prefer the first of several tokens with the same logit.
    earlier = (logits == own) & (mx.arange(count)[None] < known)
    ranks = ((logits > own) | earlier).sum(axis=-1)
    evaluate(ranks)
    return np.where(tokens < 0, count, np.array(ranks)).astype(np.int64)


def faster_in_float32(loaded: LoadedMlxModel) -> bool:
    """Return whether float32 weights fit in memory and make batches run faster.

    On CPUs, MLX multiplies batches faster by float32 weights than by quantised ones.
    """
    return runs_on_cpu() and 4 * loaded.skeleton.parameters < psutil.virtual_memory().available // 2


def convert_to_float32(net: Any) -> None:
    """Dequantise all weights of an mlx `nn.Module`, and convert them to float32."""
    dequantize_model(net)
    net.set_dtype(mx.float32)
    evaluate(*(array for _, array in named_arrays(net.parameters())))
