"""Find multi-token prediction (MTP) layers in GGUF files, and check that llama.cpp can run them.

A Gemma 4 assistant is an MTP head in a separate file. It has no KV cache and reads the target's instead. If
its shapes do not match the target's, llama.cpp aborts the process instead of returning an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.errors import CapabilityError, ModelFileError, shorten
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import GgufHeader, read_header
from edgespec.model.formats.gguf_metadata import tensor_bytes
from edgespec.model.hidden_states import POST_NORM, stream_states
from edgespec.system.files import file_state

__all__ = [
    "ASSISTANT",
    "ASSISTANT_TARGET",
    "MTP_GRAPHS",
    "MtpLayers",
    "check_assistant",
    "check_same_model",
    "is_assistant",
    "read_mtp_layers",
    "unloaded_bytes",
]

# Architecture names of the assistants and of their targets.
ASSISTANT, ASSISTANT_TARGET = "gemma4-assistant", "gemma4"
# The ggml type F32.
_F32 = 0


class MtpGraph(NamedTuple):
    """The requirements of llama.cpp's computation graph for an architecture's MTP layers.

    Attributes:
        reads_normed: Whether the layers read the target's final hidden states after the final norm instead of
            before it. The same applies to their own hidden states, which they read for draft tokens.
        has_experts: Whether the feed-forward block of each layer is a mixture of experts. None if both
            experts and dense blocks are allowed.
        max_layers: Maximum number of MTP layers.
        is_latent: Whether the layers must use multi-head latent attention (MLA) with compressed queries.
        is_fused: Whether one fused matrix must compute queries, keys and values.
        streams: Number of residual streams that the layers read in place of a single hidden state.
    """

    reads_normed: bool = True
    has_experts: bool | None = True
    max_layers: int = 1
    is_latent: bool = False
    is_fused: bool = False
    streams: int = 1

    def states_read(self, layer_count: int) -> tuple[int, ...]:
        """Return the indices of the target's hidden states that the layers read. See `HiddenStateSource`."""
        if self.streams > 1:
            return stream_states(self.streams)
        return (POST_NORM,) if self.reads_normed else (layer_count,)


# Architectures whose MTP layers llama.cpp can run. With any other architecture, it aborts.
MTP_GRAPHS = {
    "bailingmoe3": MtpGraph(),
    "cohere2moe": MtpGraph(),
    "deepseek2": MtpGraph(is_latent=True),
    "deepseek32": MtpGraph(is_latent=True),
    "deepseek4": MtpGraph(reads_normed=False, streams=4),
    "glm-dsa": MtpGraph(is_latent=True),
    "glm4moe": MtpGraph(),
    "hy_v3": MtpGraph(has_experts=None, max_layers=8),
    "mimo2": MtpGraph(reads_normed=False, has_experts=False, max_layers=8, is_fused=True),
    "nemotron_h_moe": MtpGraph(),
    "qwen3next": MtpGraph(),
    "qwen35": MtpGraph(has_experts=False),
    "qwen35moe": MtpGraph(),
    "step35": MtpGraph(reads_normed=False, has_experts=None, max_layers=8),
}
_PROJECTION = "nextn.eh_proj.weight"
_REQUIRED = (_PROJECTION, "nextn.enorm.weight", "nextn.hnorm.weight", "attn_norm.weight")
# Tensor names of feed-forward blocks. A block must contain all tensors of at least one tuple.
_DENSE = (("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),)
_EXPERTS = (
    ("ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"),
    ("ffn_gate_inp.weight", "ffn_gate_up_exps.weight", "ffn_down_exps.weight"),
    ("ffn_gate_inp.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"),
)
# Metadata keys that may differ between the target and a file that contains only MTP layers. Older files lack
# `embedding_length_out`, which `_check_streams` checks.
_INDEPENDENT_KEYS = frozenset(
    {"block_count", "nextn_predict_layers", "context_length", "vocab_size", "embedding_length_out"}
)
_F16_BYTES = 2


@dataclass(frozen=True, slots=True)
class MtpLayers:
    """The MTP layers in a GGUF file.

    Attributes:
        count: Number of MTP layers.
        weight_bytes: Size of the layers' weights.
        token_bytes: Size of the layers' KV cache per token in bytes, in f16.
        vocabulary: Number of tokens in the vocabulary.
        state_size: Number of hidden-state values that the layers read per token.
        graph: llama.cpp's requirements for these layers.
    """

    count: int
    weight_bytes: int
    token_bytes: int
    vocabulary: int
    state_size: int
    graph: MtpGraph


def read_mtp_layers(path: Path) -> MtpLayers:
    """Find the MTP layers in a GGUF file.

    Raises:
        CapabilityError: The file has no MTP layers, or llama.cpp cannot run them.
        ModelFileError: The file is damaged.
    """
    headers = {part: read_header(part) for part in gguf_files(path)}
    header = next(iter(headers.values()))
    sizes = {name: size for part, each in headers.items() for name, size in tensor_bytes(part, each)}
    blocks, count = (header.architecture_number(key) for key in ("block_count", "nextn_predict_layers"))
    graph = MTP_GRAPHS.get(header.architecture)
    if count and (graph is None or count > graph.max_layers):
        raise CapabilityError(
            f"edgespec does not support {count} MTP layer{'s' if count > 1 else ''} in models with"
            f" architecture {shorten(header.architecture)!r}, such as {path.name}",
            "choose another method",
            code="head_not_supported",
        )
    # Check the tensors too, because many files still list MTP layers that were removed during conversion.
    if graph is None or not count or f"blk.{blocks - 1}.{_PROJECTION}" not in sizes:
        raise CapabilityError(
            f"{path.name} does not contain layers for multi-token prediction (MTP)",
            "use a GGUF file that was converted with its MTP layers, or choose another method",
            code="mtp_missing",
        )
    layers = range(blocks - count, blocks)
    if count >= blocks:
        raise ModelFileError(
            f"{path} is damaged: it claims {count:,} MTP layers, but has only {blocks:,} layers in all",
            "download it again",
        )
    has_ranks = all(
        header.architecture_number(f"attention.{key}") for key in ("key_length_mla", "q_lora_rank")
    )
    if graph.is_latent and (not has_ranks or header.architecture_value("attention.temperature_scale")):
        raise CapabilityError(
            f"llama.cpp cannot run the MTP layers of {path.name}, because it does not support their"
            " attention layers",
            "choose another method",
            code="head_not_supported",
        )
    _check_streams(path, header, layers, graph)
    for layer in layers:
        _check_complete(path, {name for name in sizes if name.startswith(f"blk.{layer}.")}, layer, graph)
    embedding = next(
        (t for each in headers.values() for t in each.tensors if t.name == "token_embd.weight"), None
    )
    return MtpLayers(
        count,
        sum(size for name, size in sizes.items() if any(name.startswith(f"blk.{i}.") for i in layers)),
        sum(_layer_token_bytes(header, layer) for layer in layers),
        embedding.shape[-1] if embedding else 0,
        header.architecture_number("embedding_length") * graph.streams,
        graph,
    )


def unloaded_bytes(path: Path) -> int:
    """Return the size of a GGUF file's MTP layers in bytes. llama.cpp loads them only on request.

    Subtract this from `llama_model_size`, which counts MTP layers even if they are not loaded.
    """
    try:
        states = tuple(file_state(part) for part in gguf_files(path))
    except (OSError, ModelFileError):
        return 0
    return _unloaded_bytes(path, states)


@lru_cache(maxsize=64)  # Large headers are slow to read, so read each version of a file only once.
def _unloaded_bytes(path: Path, _file_states: tuple[str, ...]) -> int:
    try:
        return read_mtp_layers(path).weight_bytes
    except (CapabilityError, ModelFileError):
        return 0


def _check_streams(path: Path, header: GgufHeader, layers: range, graph: MtpGraph) -> None:
    """Raise CapabilityError if llama.cpp cannot run these MTP layers with several residual streams.

    llama.cpp would abort or read out of bounds.
    """
    size, output_size = (
        header.architecture_number(key) for key in ("embedding_length", "embedding_length_out")
    )
    ratios = header.architecture_value("attention.compress_ratios")
    attends = isinstance(ratios, np.ndarray) and any(ratios[layer] for layer in layers if layer < len(ratios))
    hashed = header.architecture_number("hash_layer_count") > layers[0]
    key, indexed = (header.architecture_number(f"attention.{part}key_length") for part in ("", "indexer."))
    other_attention = graph.streams > 1 and (attends or hashed or key == indexed)
    if output_size not in (0, size * graph.streams) or other_attention:
        raise CapabilityError(
            f"llama.cpp cannot run the MTP layers of {path.name}, because it does not support their"
            " attention layers or experts, or because their hidden size differs from the model's",
            "choose another method",
            code="head_not_supported",
        )


def _check_complete(path: Path, names: set[str], layer: int, graph: MtpGraph) -> None:
    """Raise ModelFileError if an MTP layer lacks tensors that llama.cpp uses without checking for them."""
    block = f"blk.{layer}."
    forms = {True: _EXPERTS, False: _DENSE, None: _EXPERTS + _DENSE}[graph.has_experts]
    required = (*_REQUIRED, *(("attn_qkv.weight",) if graph.is_fused else ()))
    missing = [name for name in required if block + name not in names]
    if not any(all(block + name in names for name in form) for form in forms):
        missing += forms[0]
    if missing:
        raise ModelFileError(
            f"{path} is damaged: its MTP layer {layer} lacks {missing[0]}",
            "download it again, or choose another method",
        )


def _layer_token_bytes(header: GgufHeader, layer: int) -> int:
    heads = _of_layer(header, "attention.head_count", 0)
    size = header.architecture_number("embedding_length") // heads if heads else 0
    key, value = (header.architecture_number(f"attention.{part}_length") or size for part in ("key", "value"))
    if header.architecture_value("attention.key_length_mla"):
        value = 0
    return _kv_heads(header, layer) * (key + value) * _F16_BYTES


def _of_layer(header: GgufHeader, key: str, layer: int) -> int:
    """Return a layer's value from metadata that holds one value for all layers or one per layer."""
    value = header.architecture_value(key)
    if isinstance(value, np.ndarray):
        return int(value[layer]) if value.dtype.kind in "iu" and 0 <= layer < len(value) else 0
    return header.architecture_number(key)


def _kv_heads(header: GgufHeader, layer: int) -> int:
    key = "attention.head_count_kv"
    return _of_layer(header, "attention.head_count" if header.architecture_value(key) is None else key, layer)


def check_same_model(path: Path, target: Path, target_name: str) -> None:
    """Check that a file with MTP layers was made for a target, by comparing their metadata.

    Raises:
        CapabilityError: The file was made for a different target.
        ModelFileError: A file is damaged.
    """
    own, needed = (read_header(gguf_files(each)[0]) for each in (path, target))
    prefix = f"{needed.architecture}."
    keys = {key for key in (*own.metadata, *needed.metadata) if key.startswith(prefix)}
    keys -= {prefix + key for key in _INDEPENDENT_KEYS}
    for key in ("general.architecture", *sorted(keys)):
        has, needs = own.metadata.get(key), needed.metadata.get(key)
        if not _equal(has, needs):
            raise CapabilityError(
                f"the draft head {path} was made for another model: its {key} is {_shown(has)}, but"
                f" {_shown(needs)} in {target_name}",
                "choose the head that was published for this model",
                code="head_mismatch",
            )


def _equal(first: object, second: object) -> bool:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        # Arrays have one value per layer. Compare only the layers in both files, because the target's file
        # may lack the values for MTP layers.
        length = min(len(first), len(second))
        return bool(np.array_equal(first[:length], second[:length]))
    return type(first) is type(second) and bool(first == second)


def _shown(value: object) -> str:
    return "missing" if value is None else f"{value!r:.60}"


class _KvShape(NamedTuple):
    """The number and size of a layer's KV heads."""

    heads: int
    size: int

    def __str__(self) -> str:
        return f"{self.heads:,} KV head{'' if self.heads == 1 else 's'} of size {self.size:,}"


def is_assistant(path: Path) -> bool:
    """Return whether a GGUF file contains a Gemma 4 assistant. Raises ModelFileError if it is damaged."""
    return read_header(gguf_files(path)[0]).architecture == ASSISTANT


def check_assistant(path: Path, target: Path, target_name: str) -> None:
    """Check that a Gemma 4 assistant can read its target's KV cache.

    Args:
        path: The file of the assistant.
        target: The target's file.
        target_name: The target's name, for messages.

    Raises:
        CapabilityError: The assistant was made for a different target.
        ModelFileError: A file is damaged.
    """
    own, needed = (read_header(gguf_files(each)[0]) for each in (path, target))
    if problem := _assistant_problem(own):
        raise ModelFileError(
            f"the draft head {path} is damaged: {problem}", "download it again, or use --head none"
        )
    if mismatch := _mismatch(own, needed):
        raise CapabilityError(
            f"the draft head {path} was made for a model other than {target_name}: it needs {mismatch}",
            "choose the head that was published for this model",
            code="head_mismatch",
        )


def _assistant_problem(header: GgufHeader) -> str:
    """Return why llama.cpp cannot run the head with any target, or an empty string."""
    layers, predicting = map(header.architecture_number, ("block_count", "nextn_predict_layers"))
    windowed = _windowed(header)
    if layers != predicting or layers != len(windowed) or len(set(windowed)) != 2:
        return f"its {layers:,} layers must all be MTP layers, some with a sliding window and some without"
    if not header.architecture_number("attention.sliding_window"):
        return "it does not state the size of its sliding window"
    for layer, is_windowed in enumerate(windowed):
        heads = _of_layer(header, "attention.head_count", layer)
        kv = _kv_shape(header, layer, is_windowed)
        if not (heads and kv.heads and kv.size) or heads % kv.heads:
            return f"its layer {layer} has {heads:,} heads, but {kv}"
        values = header.architecture_number(f"attention.value_length{_suffix(is_windowed)}")
        if values != kv.size:
            return f"its layer {layer} has keys of size {kv.size:,} but values of size {values:,}"
        rotated = _rotated(header, is_windowed)
        if rotated % 2 or not 0 < rotated <= kv.size:
            return f"its layer {layer} applies RoPE to {rotated:,} of {kv.size:,} dimensions"
    vectors = (each for each in header.tensors if len(each.shape) == 1)
    wrong = next((each.name for each in vectors if each.kind != _F32), "")
    return f"its tensor {shorten(wrong)} must have type F32" if wrong else ""


def _mismatch(own: GgufHeader, needed: GgufHeader) -> str:
    """Describe a property that the head requires but the target lacks, or return an empty string."""
    if needed.architecture != ASSISTANT_TARGET:
        return f"a model with architecture {ASSISTANT_TARGET!r}, not {shorten(needed.architecture)!r}"
    size = own.architecture_number("embedding_length_out")
    target_size = needed.architecture_number("embedding_length")
    if size != target_size:
        return f"hidden states of size {size:,}, not {target_size:,}"
    windowed, layers = _windowed(needed), needed.architecture_number("block_count")
    # In llama.cpp, sliding-window layers read the KV cells of the target's second to last layer, and all
    # other layers read those of its last layer.
    if len(windowed) != layers or windowed[-2:] != [True, False]:
        return "a model with a sliding window in the second to last layer but not in the last one"
    own_kv = layers - needed.architecture_number("attention.shared_kv_layers")
    for layer, is_windowed in enumerate(_windowed(own)):
        from_end = 2 if is_windowed else 1
        # The target's last layers may have no KV cells of their own, and share those of the last two layers
        # that do.
        read = layers - from_end if layers - from_end < own_kv else own_kv - from_end
        shape, target_shape = _kv_shape(own, layer, is_windowed), _kv_shape(needed, read, is_windowed)
        if shape != target_shape:
            return f"{shape} for its layer {layer}, not {target_shape}"
    return ""


def _kv_shape(header: GgufHeader, layer: int, is_windowed: bool) -> _KvShape:
    size = header.architecture_number(f"attention.key_length{_suffix(is_windowed)}")
    return _KvShape(_kv_heads(header, layer), size)


def _suffix(is_windowed: bool) -> str:
    return "_swa" if is_windowed else ""


def _rotated(header: GgufHeader, is_windowed: bool) -> int:
    """Return the number of rotary dimensions per attention head, or llama.cpp's default if it is unset."""
    keys = ("rope.dimension_count_swa", "rope.dimension_count", "attention.key_length")
    present = (key for key in keys[not is_windowed :] if header.architecture_value(key) is not None)
    return header.architecture_number(next(present, ""))


def _windowed(header: GgufHeader) -> list[bool]:
    """Return whether each layer uses sliding-window attention."""
    pattern = header.architecture_value("attention.sliding_window_pattern")
    return [bool(each) for each in pattern] if isinstance(pattern, np.ndarray) else []
