"""Read the config.json of a head, and parse the settings that all kinds of heads share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.files import error_reason, read_regular_file

__all__ = ["LayerConfig", "parse_layer_config", "read_config"]

_MAX_CONFIG_BYTES = 2**24
# Objects in config.json that hold settings found at the top level in other layouts. They are used by
# speculators, NVIDIA and z-lab, in this order.
_NESTED = ("transformer_layer_config", "eagle_config", "dflash_config")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The configuration of the transformer layers in a head.

    Attributes:
        rope: Rotary embedding settings, in the format of Hugging Face's `rope_scaling`. None for the default.
        vocab_size: Target's vocabulary size.
        context_tokens: Context length that the head was trained for. 0 if unknown.
    """

    feed_forward_size: int
    heads: int
    kv_heads: int
    head_size: int
    norm_eps: float
    rope_theta: float
    rope: Mapping[str, Any] | None
    vocab_size: int
    context_tokens: int

    @property
    def rope_type(self) -> str:
        """Rotary embedding type, such as `llama3` or `yarn`."""
        rope = self.rope or {}
        return str(rope.get("rope_type") or rope.get("type") or "default")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings in a head's config.json, with nested objects merged into the top level.

    Raises:
        ModelFileError: `config.json` is missing or damaged.
    """
    path = folder / "config.json"
    try:
        config = json.loads(read_regular_file(path, _MAX_CONFIG_BYTES).decode("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it contains no JSON object")
        for name in _NESTED:
            nested = config.get(name)
            config |= nested if isinstance(nested, dict) else {}
        return config
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error_reason(error)}", "download it again") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is damaged: {error}", "download it again") from error


def parse_layer_config(config: Mapping[str, Any]) -> LayerConfig:
    """Return the layer configuration described by the settings from `read_config`.

    Raises:
        ValueError, KeyError, TypeError, ArithmeticError: A setting is missing or invalid.
    """
    size, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    result = LayerConfig(
        feed_forward_size=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or size // heads),
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope=rope or None,
        vocab_size=int(config["vocab_size"]),
        context_tokens=int(config.get("max_position_embeddings") or 0),
    )
    sizes = (size, result.feed_forward_size, heads, result.kv_heads, result.head_size, result.vocab_size)
    if min(sizes) <= 0 or result.head_size % 2 or heads % result.kv_heads:
        raise ValueError("its sizes are impossible")
    return result
