"""A block of consecutive layers that a worker runs. All other layers are on other machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from edgespec.backends.mlx.evaluation import evaluate, freed_buffers_bytes, translate_errors
from edgespec.backends.mlx.layer_caches import LayerCaches
from edgespec.backends.mlx.layer_messages import JSON_FILES
from edgespec.backends.mlx.layers import AbsentLayer, FirstLayer, LastLayer, LayerList, check_separable
from edgespec.backends.mlx.model_skeleton import ModelSkeleton, named_arrays, read_skeleton
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.cluster.layer_child import temporary_folder
from edgespec.errors import MemoryBudgetError, WorkerError
from edgespec.model.base import LoadOptions
from edgespec.system.files import error_reason, format_bytes, write_advice

__all__ = ["LayerBlock", "build_skeleton"]

_HALF_TYPES = (mx.float16, mx.bfloat16)


class LayerBlock:
    """A block of layers and its caches. Call `load` for each weight, then `finish`, then `run` for each pass.

    Args:
        model: The model, from `build_skeleton`.
        first: Index of the block's first layer.
        end: Index after the block's last layer.
        kv_bits: Bits per element in the KV cache, or None if it is not quantised.
        memory_bytes: Maximum size of the weights in bytes.

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
        own = [*layers.layers[first:end]]
        own[0] = self._first = FirstLayer(own[0])
        own[-1] = self._last = LastLayer(own[-1])
        before, after = layers.layers[:first], layers.layers[end:]
        layers.replace([*map(AbsentLayer, before), *own, *map(AbsentLayer, after)])

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
        from mlx.utils import tree_unflatten

        expected = self._waiting.pop(name, None)
        if expected is None or expected.shape != weight.shape:
            raise ValueError(f"the block has no weight {name} of shape {weight.shape}")
        if weight.dtype != expected.dtype and (
            weight.dtype != mx.float32 or expected.dtype not in _HALF_TYPES
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
        evaluate(self._last.output, *caches.arrays)
        return self._last.output


def build_skeleton(json_files: Mapping[str, str], headers: Sequence[tuple[bytes, int]]) -> ModelSkeleton:
    """Build a model from its JSON files and weight file headers, without the weight data.

    Args:
        json_files: The model's JSON files, by name.
        headers: The headers of the model's weight files, with the size of each file.

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
