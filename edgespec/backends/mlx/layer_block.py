"""Split a model's layers across machines, and run a block of them on a worker.

Every machine builds the whole model and replaces the layers that it does not hold with stand-ins, so that
mlx-lm's own code computes the masks and positions on every machine.

To load and run a block, the target sends these messages to the worker, in this order:

1. The model's JSON files and the headers of its weight files. The worker builds the same model, and reports
   whether it has a weight cache. If every layer is split across the workers, they form a ring, and each
   worker also reports the address where it will listen for its predecessor.
2. In a ring, the addresses of all workers. The worker answers once it has joined the ring.
3. A message for each weight in the block. If the worker has a cache, the target sends the digest of a large
   weight first, and the worker reports whether it has that weight. It also confirms each weight that it
   stores.
4. A message without an array. The worker answers once it is ready.
5. The block's input for each pass, with the number of cached tokens before it. The worker first drops all
   cached tokens after that number, so a rollback needs no message of its own. It answers with the block's
   output. In a ring, all workers compute the same output, so only the first one sends it.

If a worker cannot handle a message, it answers with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from edgespec.backends.mlx.attention_cache import AttentionCache, PassLayout
from edgespec.backends.mlx.evaluation import evaluate, freed_buffers_bytes, translate_errors
from edgespec.backends.mlx.layer_caches import LayerCaches
from edgespec.backends.mlx.layers import LayerList, LayerProxy, WatchedLayer
from edgespec.backends.mlx.model_skeleton import ModelSkeleton, named_arrays, read_skeleton
from edgespec.cluster.layer_child import temporary_folder
from edgespec.errors import CapabilityError, MemoryBudgetError, WorkerError
from edgespec.model.base import LoadOptions
from edgespec.system.files import error_reason, format_bytes, write_advice

__all__ = [
    "HALF_TYPES",
    "JSON_FILES",
    "MAX_FILES_BYTES",
    "MAX_STATES_BYTES",
    "PROTOCOL",
    "AbsentLayer",
    "LastAbsentLayer",
    "LayerBlock",
    "RunBlock",
    "build_skeleton",
    "check_separable",
]

# Version of the protocol. Increase it whenever the messages change.
PROTOCOL = 2
# The JSON files from which mlx-lm builds a model.
JSON_FILES = ("config.json", "hf_quant_config.json")
# Maximum size in bytes of a message with files, and of a message with hidden states. The headers of a model
# with many experts take several MB. Hidden states for 512 tokens take 32 MiB at 16384 float32 values each.
MAX_FILES_BYTES, MAX_STATES_BYTES = 1 << 27, 1 << 28
# Data types of weights that can be widened to float32.
HALF_TYPES = (mx.float16, mx.bfloat16)
# Runs a block of layers on another machine. Takes the hidden states [1, tokens, ...], the number of cached
# tokens and `PassLayout.round_start`, and returns the block's output.
RunBlock = Callable[[mx.array, int, int], mx.array]

_TRACED_TOKENS = 3


class AbsentLayer(LayerProxy):
    """Replacement for a layer on another machine. Returns its input, and advances the layer's cache."""

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        _cache_among(args, kwargs).skip(states.shape[1])
        return states


class LastAbsentLayer(LayerProxy):
    """Replacement for the last layer of a block on another machine. Runs the block there."""

    def __init__(self, layer: Any, run_block: RunBlock) -> None:
        super().__init__(layer)
        self._run_block = run_block

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        cache = _cache_among(args, kwargs)
        offset, layout = cache.offset, cache.layout
        if layout.offsets is not None:
            raise CapabilityError(
                "a model on workers cannot verify drafts with branches", code="workers_not_supported"
            )
        cache.skip(states.shape[1])
        return self._run_block(states, offset, layout.round_start)


def _cache_among(args: Iterable[Any], kwargs: dict[str, Any]) -> AttentionCache:
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, AttentionCache))


class _FirstLayer(LayerProxy):
    """The first layer of a block. Its input is replaced by `states` from another machine."""

    states: mx.array

    def __call__(self, _states: mx.array, *args: Any, **kwargs: Any) -> Any:
        return self._layer(self.states, *args, **kwargs)


class LayerBlock:
    """The layers [first, end) of a model from `build_skeleton`, and their caches.

    Call `load` for each weight, then `finish`, then `run` for each pass. The weights take up at most
    `memory_bytes`.

    Raises:
        CapabilityError: The layers cannot be split across machines.
        ValueError: An argument is invalid.
    """

    def __init__(self, model: Any, first: int, end: int, kv_bits: int | None, memory_bytes: int) -> None:
        mx.set_cache_limit(freed_buffers_bytes())
        self._model = model
        check_separable(self._model, "the model")
        self._layout = PassLayout()
        self._caches = LayerCaches(self._model, self._layout, kv_bits)
        layers = LayerList(self._model)
        if not 0 <= first < end <= len(layers.layers):
            raise ValueError(f"the model has no layers {first} to {end}")
        self._layers = {str(index): layers.layers[index] for index in range(first, end)}
        # Weights that have not been loaded yet, keyed by name.
        self._waiting = dict(named_arrays({name: layer.parameters() for name, layer in self._layers.items()}))
        self._left_bytes = memory_bytes
        self._output = mx.zeros(0)
        own = [*layers.layers[first:end]]
        own[0] = self._first = _FirstLayer(own[0])
        own[-1] = WatchedLayer(own[-1], self._keep_output)
        before, after = layers.layers[:first], layers.layers[end:]
        layers.replace([*map(AbsentLayer, before), *own, *map(AbsentLayer, after)])

    def _keep_output(self, output: mx.array, *_args: Any, **_kwargs: Any) -> None:
        self._output = output

    def load(self, name: str, weight: mx.array) -> None:
        """Set one of the block's weights.

        Args:
            name: The layer's index and the weight's path within the layer, such as
                `3.self_attn.q_proj.weight`.
            weight: The weight. 16-bit weights can be widened to float32.

        Raises:
            ValueError: The block has no such weight.
            MemoryBudgetError: The weights exceed `memory_bytes`.
        """
        expected = self._waiting.pop(name, None)
        if expected is None or expected.shape != weight.shape:
            raise ValueError(f"the block has no weight {name} of shape {weight.shape}")
        if weight.dtype != expected.dtype and (
            weight.dtype != mx.float32 or expected.dtype not in HALF_TYPES
        ):
            raise ValueError(f"the weight {name} has type {weight.dtype} instead of {expected.dtype}")
        self._left_bytes -= weight.nbytes
        if self._left_bytes < 0:
            raise MemoryBudgetError(
                f"the weights exceed the worker's memory by {format_bytes(-self._left_bytes)}",
                "start the worker with a larger --memory",
            )
        evaluate(weight)
        index, _, path = name.partition(".")
        self._layers[index].update(tree_unflatten([(path, weight)]))

    def finish(self) -> None:
        """Finish loading, so that the block can run. Raises ValueError if weights are missing."""
        if self._waiting:
            raise ValueError(f"the weight {next(iter(self._waiting))} is missing")
        # Also evaluate arrays that are not parameters, such as rotary embedding frequencies.
        evaluate(*(array for _, array in named_arrays(self._layers)))

    def run(self, states: mx.array, offset: int, round_start: int) -> mx.array:
        """Run the block on the next tokens, and return its evaluated output.

        Args:
            states: The hidden states [1, tokens, ...].
            offset: Number of cached tokens to keep before `states`. Any others are dropped.
            round_start: Number of cached tokens before the draft. See `PassLayout`.

        Raises:
            ValueError: The caches hold too few tokens, or cannot drop the excess tokens.
            BackendError: MLX failed. The caches stay valid.
        """
        caches = self._caches
        if not 0 <= round_start <= offset <= caches.length or states.ndim < 3 or states.shape[0] != 1:
            raise ValueError(f"the caches have fewer than {offset:,} tokens")
        if offset == 0:
            caches.clear()
        elif not caches.can_rewind(offset):
            raise ValueError(f"the caches cannot drop the tokens after {offset:,}")
        else:
            caches.set_offset(offset)
        self._layout.set_chain(round_start)
        self._first.states = states
        count = states.shape[1]
        with translate_errors("the layers could not be run"):
            # Only the block's output is evaluated, so the tokens, the embedding and the LM head do not
            # matter.
            self._model(mx.zeros((1, count), mx.int32), cache=caches.layers)
        caches.length += count
        evaluate(self._output, *caches.arrays)
        return self._output


def build_skeleton(json_files: Mapping[str, str], headers: Sequence[tuple[bytes, int]]) -> ModelSkeleton:
    """Build a model from its JSON files by name, and the headers and sizes of its weight files.

    Raises:
        ModelFileError: The model cannot be built.
        WorkerError: The model's files cannot be written.
    """
    with temporary_folder() as name:
        folder = Path(name)
        try:
            for file in JSON_FILES:
                if file in json_files:
                    (folder / file).write_text(json_files[file])
            for index, (header, size) in enumerate(headers):
                with (folder / f"model{index}.safetensors").open("wb") as stream:
                    stream.write(header)
                    # Extend the file to its full size. The file is sparse, so the hole takes up no disk
                    # space.
                    stream.truncate(size)
        except OSError as error:
            raise WorkerError(
                f"the worker cannot write to {folder}: {error_reason(error)}",
                write_advice(error, folder),
                code="file_not_written",
            ) from error
        return read_skeleton(name, "the model", LoadOptions())


def check_separable(model: Any, name: str) -> None:
    """Check that a model's layers can be split across machines.

    Each layer may read only the previous layer's output, its own KV cache and the attention mask. The check
    builds the graph of a pass without evaluating it.

    Raises:
        CapabilityError: The layers exchange other data, or have other kinds of caches.
    """
    layers, caches = LayerList(model), LayerCaches(model, PassLayout())
    calls: list[tuple[Any, Any, list[Any]]] = []

    def trace(result: Any, states: Any, *args: Any, **kwargs: Any) -> None:
        calls.append((states, result, [*args, *kwargs.values()]))

    with layers.replaced([WatchedLayer(layer, trace) for layer in layers.layers]):
        model(mx.zeros((1, _TRACED_TOKENS), mx.int32), cache=caches.layers)
    problem = ""
    if not all(isinstance(cache, AttentionCache) for cache in caches.layers):
        problem = "some of its layers have no KV cache, or an unsupported kind of cache"
    elif len(calls) != len(layers.layers) or len(caches.layers) != len(layers.layers):
        problem = "it does not run each of its layers exactly once"
    else:
        before = calls[0][0]
        for (states, result, others), cache in zip(calls, caches.layers, strict=True):
            is_chained = isinstance(result, mx.array) and states is before and result.shape == states.shape
            if not is_chained or not all(each is cache or _is_mask(each) for each in others):
                problem = "its layers pass more than their outputs to each other"
            before = result
    if problem:
        raise CapabilityError(
            f"{name} cannot run on workers with MLX, because {problem}",
            "use a GGUF version of the model, or omit --workers",
            code="workers_not_supported",
        )


def _is_mask(value: Any) -> bool:
    """Return whether a layer's argument is a mask or a constant, rather than another layer's data."""
    if isinstance(value, mx.array):
        return bool(value.dtype == mx.bool_)
    return value is None or isinstance(value, bool | int | float | str)
