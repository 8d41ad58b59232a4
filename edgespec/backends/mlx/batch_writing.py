"""Continue several texts in one batch, to generate text to train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from edgespec.backends.base import Progress, Vocabulary
from edgespec.backends.mlx.evaluation import translate_errors
from edgespec.errors import CancelledError

__all__ = ["write_texts"]


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
    """Continue each prompt up to an end token or its maximum length. See `Teacher.write`.

    Args:
        net: The mlx `nn.Module` of the model.
        vocabulary: The model's vocabulary, for its end tokens.
        prompts: The tokens of each prompt.
        temperatures: The temperature for each prompt.
        max_tokens: Maximum number of new tokens for each prompt, at least 1.
        seed: Seed of the random draws.
        progress: Called with the completed fraction. Returning False cancels the call.
        failure: Start of the message if a BackendError is raised.
    """
    mx.random.seed(seed)
    # mlx-lm samples in one batch for all prompts that share a sampler.
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
                    raise CancelledError("writing text was cancelled")
                for response in generator.next_generated():
                    texts[response.uid].append(response.token)
                    finished += response.finish_reason is not None
        finally:
            generator.close()
    return [texts[number] for number in numbers]


def _sampler(temperature: float) -> Callable[[mx.array], mx.array]:
    """Return a function that draws tokens at a temperature, given their log probabilities."""
    if not temperature:
        return lambda logprobs: mx.argmax(logprobs, axis=-1)
    return lambda logprobs: mx.random.categorical(logprobs / temperature)
