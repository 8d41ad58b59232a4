"""A draft model in training: all of its weights are trained, or low-rank changes of them (LoRA)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from edgespec.backends.base import LoadOptions
from edgespec.backends.mlx.float32_weights import convert_to_float32, faster_in_float32
from edgespec.backends.mlx.gradient_descent import Arrays
from edgespec.backends.mlx.loading import load_model
from edgespec.backends.mlx.lora_trainer import adapted_layers
from edgespec.backends.mlx.model_skeleton import named_arrays, read_skeleton, translate_load_errors
from edgespec.errors import CapabilityError

__all__ = ["TrainableDraft"]


class _Quantisation(NamedTuple):
    group_size: int
    bits: int
    mode: str


class TrainableDraft:
    """A draft model with weights to train, which is published with the quantisation that it was loaded with.

    Args:
        path: Folder of the draft model.
        name: Name of the draft model, for messages.
        lora: Train LoRA weights instead of the model's own weights.

    Attributes:
        net: The mlx `nn.Module`.
        vocab_size: Number of logits per token.
        size: Number of values in a hidden state.

    Raises:
        ModelFileError: The model is damaged or not supported.
        MemoryBudgetError: The model does not fit in memory.
        CapabilityError: The model has no layers to which low-rank changes can be added.
    """

    def __init__(self, path: Path, name: str, lora: bool) -> None:
        # The data types in the files. Loading may convert the weights to other types.
        stored = read_skeleton(str(path), name, LoadOptions()).model.parameters()
        self._dtypes = {key: array.dtype for key, array in named_arrays(stored)}
        loaded = load_model(str(path), name, LoadOptions(), None)
        self.net: Any = loaded.skeleton.model
        self.vocab_size = loaded.skeleton.vocab_size
        config = loaded.skeleton.config
        self.size = int((config.get("text_config") or config)["hidden_size"])
        self._quantised = {
            key: _Quantisation(module.group_size, module.bits, module.mode)
            for key, module in self.net.named_modules()
            if "scales" in module
        }
        self._adapted = []
        with translate_load_errors(str(path)):
            if not lora or faster_in_float32(loaded):
                convert_to_float32(self.net)
        if lora:
            self._adapted = list(adapted_layers(self.net))
            if not self._adapted:
                raise CapabilityError(
                    f"{name} has no linear layers to which LoRA layers can be added", "omit --lora"
                )
            self.net.freeze()
            for layer in self._adapted:
                layer.parent[layer.attribute] = layer.adapted
                layer.adapted.unfreeze(recurse=False)

    @property
    def weights(self) -> Arrays:
        """The trained weights by name."""
        leaves: Any = tree_flatten(self.net.trainable_parameters())
        return dict(leaves)

    @weights.setter
    def weights(self, weights: Arrays) -> None:
        self.net.update(tree_unflatten(list(weights.items())))

    def published(self) -> Arrays:
        """Return the tensors of the published model, in the data types of the original model."""
        arrays: Arrays = {}
        for key, array in self._merged().items():
            module, _, leaf = key.rpartition(".")
            if leaf == "weight" and module in self._quantised and mx.issubdtype(array.dtype, mx.floating):
                scales_dtype = self._dtypes[f"{module}.scales"]
                # Keep the type of the weights if the scales are 8-bit integers, as in some quantisations.
                weight = array.astype(scales_dtype) if mx.issubdtype(scales_dtype, mx.floating) else array
                packed = mx.quantize(weight, **self._quantised[module]._asdict())
                parts = zip(("weight", "scales", "biases"), packed, strict=False)
                arrays.update({f"{module}.{part}": values for part, values in parts})
            else:
                arrays[key] = array.astype(self._dtypes[key])
        return arrays

    def _merged(self) -> Arrays:
        """Return the model's parameters after adding the low-rank changes."""
        try:
            for layer in self._adapted:
                layer.parent[layer.attribute] = layer.adapted.fuse()
            return dict(named_arrays(self.net.parameters()))
        finally:
            for layer in self._adapted:
                layer.parent[layer.attribute] = layer.adapted
