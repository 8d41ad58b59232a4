"""Parse the configuration of an EAGLE head, whose settings differ between publishers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.heads.layer_config import LayerConfig, layer_settings

__all__ = ["EagleConfig", "parse_config"]


@dataclass(frozen=True, slots=True)
class EagleConfig(LayerConfig):
    """The configuration of an EAGLE head.

    `LayerConfig` describes the other attributes.

    Attributes:
        version: 1 for EAGLE-1 and EAGLE-2, which have the same architecture. 3 for EAGLE-3.
        hidden_size: Size of the head's hidden states and token embeddings.
        target_size: Size of the target's hidden states.
        layers: Indices of the target layers whose hidden states the head reads, in the publisher's numbering.
            None if the configuration does not list any.
        norm_before_residual: Whether the residual connection adds the normalised hidden state (EAGLE-3).
        norm_before_fc: Whether the concatenated hidden states are normalised before `fc` (EAGLE-3).
        norm_output: Whether the head's output is normalised before the next step reads it (EAGLE-3).
    """

    version: Literal[1, 3]
    hidden_size: int
    target_size: int
    layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    norm_output: bool

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token in the KV cache, in float32."""
        return 2 * self.kv_heads * self.head_size * 4

    def layer_choices(self, target_layers: int) -> list[tuple[int, ...]]:
        """Return the combinations of hidden states that an EAGLE-3 head may read, most likely first.

        Args:
            target_layers: Number of layers in the target.

        Returns:
            Tuples of layer indices. Index k means the input of layer k, and `target_layers` the output of the
            last layer. Empty if the target has too few layers.
        """
        choices: list[tuple[int, ...]] = [(2, target_layers // 2, target_layers - 3)]
        if self.layers is not None:
            # Publishers number a hidden state either by the layer that reads it or by the layer that writes
            # it. The lowest one is usually the input of layer 2, so a list that starts with 1 uses the second
            # numbering.
            inputs, outputs = self.layers, tuple(layer + 1 for layer in self.layers)
            choices = [outputs, inputs] if self.layers[:1] == (1,) else [inputs, outputs]
        return [choice for choice in choices if all(0 <= layer <= target_layers for layer in choice)]


def parse_config(config: Mapping[str, Any], version: Literal[1, 3]) -> EagleConfig:
    """Return the configuration described by the settings from `read_config`.

    Raises:
        ValueError, KeyError, TypeError, ArithmeticError: A setting is missing or invalid.
    """
    size = int(config["hidden_size"])
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        raise ValueError(f"hidden_act is {activation!r}, but edgespec supports only 'silu'")
    if int(config.get("num_hidden_layers") or 1) != 1:
        raise ValueError(f"the head has {config['num_hidden_layers']} layers, but edgespec supports only one")
    result = EagleConfig(
        version=version,
        hidden_size=size,
        target_size=int(config.get("target_hidden_size") or size),
        **layer_settings(config),
        layers=tuple(int(layer) for layer in layers) if layers else None,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_before_fc=bool(config.get("norm_before_fc")),
        norm_output=bool(config.get("norm_output")),
    )
    if result.target_size <= 0:
        raise ValueError(f"target_hidden_size is {result.target_size}, but must be positive")
    return result
