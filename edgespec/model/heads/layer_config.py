"""Read and check what the files of all kinds of heads with transformer layers have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from edgespec.errors import ModelFileError, shorten
from edgespec.model.formats.mlx_files import read_json_object
from edgespec.model.heads.numpy_layers import RopeSettings, parse_rope, positive
from edgespec.model.heads.tensor_files import StoredTensor

Shapes: TypeAlias = dict[str, tuple[int, ...]]

# Nested objects in config.json for settings that other layouts keep at the top level. They are used by
# speculators, NVIDIA and z-lab, respectively.
_NESTED = ("transformer_layer_config", "eagle_config", "dflash_config")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The configuration of the transformer layers in a head.

    Attributes:
        vocab_size: The target's vocabulary size.
        context_tokens: Context length that the head was trained for. 0 if unknown.
    """

    feed_forward_size: int
    heads: int
    kv_heads: int
    head_size: int
    norm_eps: float
    rope: RopeSettings
    vocab_size: int
    context_tokens: int


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings in a head's config.json, with nested objects merged into the top level.

    Raises:
        ModelFileError: `config.json` is missing or damaged.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ModelFileError(
            f"{folder} does not contain a draft head, because it has no config.json",
            "pass a folder that contains a draft head's config.json and its weights, such as"
            " model.safetensors or pytorch_model.bin",
            code="model_file_incomplete",
        )
    config = read_json_object(path)
    for name in _NESTED:
        nested = config.get(name)
        config |= nested if isinstance(nested, dict) else {}
    return config


def layer_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for `LayerConfig`, given the settings from `read_config`.

    Raises:
        ValueError, KeyError, TypeError, ArithmeticError: A setting is missing or invalid.
    """
    size, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or size // heads)
    feed_forward_size, vocab_size = int(config["intermediate_size"]), int(config["vocab_size"])
    sizes = (size, feed_forward_size, heads, kv_heads, head_size, vocab_size)
    if min(sizes) <= 0 or head_size % 2 or heads % kv_heads:
        raise ValueError(
            f"the layer sizes are invalid: hidden_size is {size}, with {heads} attention heads, {kv_heads}"
            " key-value"
            f" heads and a head size of {head_size}"
        )
    return {
        "feed_forward_size": feed_forward_size,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "norm_eps": positive("rms_norm_eps", config["rms_norm_eps"]),
        "rope": parse_rope(config),
        "vocab_size": vocab_size,
        "context_tokens": int(config.get("max_position_embeddings") or 0),
    }


@contextmanager
def invalid_settings(folder: Path) -> Iterator[None]:
    """Convert exceptions raised while building a head's network to ModelFileErrors about its config.json."""
    try:
        yield
    except (ValueError, KeyError, TypeError, ArithmeticError, AssertionError) as error:
        raise ModelFileError(
            f"the config.json of the draft head {folder} has invalid settings: {shorten(error)}",
            "download it again",
        ) from error


def check_tensors(tensors: Mapping[str, StoredTensor], needed: Shapes, optional: Shapes) -> None:
    """Raise ValueError if a tensor is missing or unknown, or if its shape contradicts the configuration.

    Args:
        tensors: The head's tensors, keyed by name.
        needed: Shapes of the tensors that the head must have.
        optional: Shapes of the tensors that it may have.
    """
    if missing := needed.keys() - tensors.keys():
        raise ValueError(f"the tensor {min(missing)} is missing")
    shapes = optional | needed
    for name, tensor in tensors.items():
        if name not in shapes:
            raise ValueError(f"the tensor {name} does not belong in this type of head")
        if tensor.shape != shapes[name]:
            raise ValueError(f"the tensor {name} has shape {tensor.shape} instead of {shapes[name]}")
        if not tensor.is_floating:
            raise ValueError(f"the tensor {name} has type {tensor.dtype}, which is not a floating-point type")


@contextmanager
def unsupported_head(folder: Path, kind: str) -> Iterator[None]:
    """Convert exceptions raised while parsing a head to a ModelFileError. `kind` has an article."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        what = f"the setting {error} is missing" if isinstance(error, KeyError) else shorten(error)
        raise ModelFileError(
            f"{folder} is not {kind} that edgespec supports: {what}",
            f"choose a folder with the config.json and weights of {kind}",
            code="model_file_not_supported",
        ) from error
