"""Random Medusa and Hydra heads in their published layouts, and a straightforward implementation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edgespec.options.methods import method_names, methods
from tests.model.heads.torch_files import write_torch_file

Arrays = dict[str, NDArray[Any]]


class Attention(NamedTuple):
    """The target's attention: query heads, key heads, and the RoPE frequency base."""

    heads: int = 2
    kv_heads: int = 2
    theta: float = 10000.0
    epsilon: float = 1e-5


ATTENTION = Attention()


@dataclass(frozen=True)
class Layout:
    """A kind of heads.

    Attributes:
        suffix: Suffix of the file.
        grounded: Whether the heads read tokens.
        dropouts: Whether dropouts are numbered as layers.
        outputs: Whether the heads have their own output matrices.
    """

    method: str
    suffix: str = ".safetensors"
    layers: int = 1
    count: int = 3
    grounded: bool = False
    prefix: bool = False
    dropouts: bool = False
    dtype: str = "float32"
    config: bool = True
    outputs: bool = True

    def __str__(self) -> str:
        words = [self.method, self.suffix[1:], f"{self.layers} layers", self.dtype]
        words += [name for name in ("grounded", "prefix", "dropouts") if getattr(self, name)]
        return ", ".join(words if self.outputs else [*words, "no outputs"])

    def block(self, head: int, layer: int) -> str:
        if self.method == "medusa":
            return f"{head}.{layer}"
        return f"hydra_mlp.{head}.{2 * layer + 1 if self.dropouts else layer}"

    def output(self, head: int) -> str:
        if self.method == "medusa":
            return f"{head}.{self.layers}"
        return f"hydra_lm_head.{head}" + (".1" if self.dropouts else "")

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            f"{self.method}_num_heads": self.count, f"{self.method}_num_layers": self.layers,
            "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        }  # fmt: skip
        if self.method == "hydra":
            arch = "prefix-mlp" if self.prefix else "mlp"
            settings |= {"hydra_head_arch": arch, "grounded_heads": self.grounded, "hidden_state_offset": 0}
        return settings


RESIDUAL_METHODS = [each.name for each in methods() if each.head and each.head.network == "residual"]
LAYOUTS = (
    Layout("medusa"),
    Layout("medusa", ".pt", dtype="float16"),
    Layout("medusa", layers=2, count=1, config=False),
    Layout("medusa", ".pt", count=5, dtype="bfloat16"),
    Layout("medusa", outputs=False),
    Layout("hydra", ".pt", grounded=True),
    Layout("hydra", layers=3, grounded=True, dtype="float16"),
    Layout("hydra", ".pt"),
    Layout("hydra", ".pt", layers=2, grounded=True, prefix=True, dropouts=True),
    Layout("hydra", prefix=True, dropouts=True, dtype="bfloat16"),
)


def random_arrays(layout: Layout, size: int, vocab: int, attention: Attention = ATTENTION) -> Arrays:
    """Return the tensors of random heads, as float32 values that the layout's data type can represent."""
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> NDArray[Any]:
        values = (random.normal(size=shape) * scale / np.sqrt(shape[-1])).astype(np.float32)
        return from_stored(stored(values, layout.dtype))

    arrays: Arrays = {}
    for head in range(layout.count):
        for layer in range(layout.layers):
            inputs = size * (head + 2) if layout.grounded and layer == 0 else size
            name = layout.block(head, layer)
            arrays[f"{name}.linear.weight"] = normal(size, inputs)
            arrays[f"{name}.linear.bias"] = normal(size)
            if inputs > size:
                arrays[f"{name}.res_connection.weight"] = normal(size, inputs)
                arrays[f"{name}.res_connection.bias"] = normal(size)
        if not layout.outputs:
            continue
        arrays[f"{layout.output(head)}.weight"] = normal(vocab, size, scale=4.0)
        if layout.method == "hydra":
            arrays[f"{layout.output(head)}.bias"] = normal(vocab)
    if layout.prefix:
        model = "prefix_embeding_layer."
        keys, inner = size // attention.heads * attention.kv_heads, 48
        arrays[f"{model}embed_tokens.weight"] = normal(vocab, size)
        arrays[f"{model}norm.weight"] = 1 + normal(size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{model}layers.0.{norm}.weight"] = 1 + normal(size)
        for part, rows in zip("qkvo", (size, keys, keys, size), strict=True):
            arrays[f"{model}layers.0.self_attn.{part}_proj.weight"] = normal(rows, size, scale=3.0)
        for part, shape in (("gate", (inner, size)), ("up", (inner, size)), ("down", (size, inner))):
            arrays[f"{model}layers.0.mlp.{part}_proj.weight"] = normal(*shape)
    return {name: from_stored(stored(values, layout.dtype)) for name, values in arrays.items()}


def fitted_arrays(
    layout: Layout,
    states: Sequence[NDArray[Any]],
    texts: Sequence[Sequence[int]],
    prompt: int,
    table: NDArray[Any],
) -> Arrays:
    """Return the tensors of heads that predict texts well: linear functions fitted by least squares.

    Args:
        states: The hidden states of each text's tokens.
        prompt: The number of leading tokens in each text that need not be predicted.
        table: The target's embeddings.
    """
    size, vocab = states[0].shape[1], len(table)
    arrays = random_arrays(layout, size, vocab)
    for head in range(layout.count):
        inputs = []
        for rows, text in zip(states, texts, strict=True):
            ends = np.arange(prompt - 2, len(text) - head - 2)
            read = [table[np.asarray(text)[ends + 1 + i]] for i in range(head + 1)] if layout.grounded else []
            inputs.append(np.concatenate([rows[ends], *read], axis=1))
        wanted = np.concatenate([text[prompt + head :] for text in texts])
        scores = 30.0 * np.eye(vocab)[wanted]
        fitted = np.linalg.lstsq(np.concatenate(inputs), scores, rcond=1e-4)[0].T
        block, output = layout.block(head, 0), layout.output(head)
        # silu(0) is 0, so nothing is added to the output of the shortcut.
        for part in ("weight", "bias"):
            arrays[f"{block}.linear.{part}"][:] = 0
        if layout.grounded:
            left, values, right = np.linalg.svd(fitted, full_matrices=False)
            arrays[f"{block}.res_connection.weight"] = np.ascontiguousarray(right[:size], np.float32)
            arrays[f"{block}.res_connection.bias"][:] = 0
            fitted = left[:, :size] * values[:size]
        arrays[f"{output}.weight"] = np.ascontiguousarray(fitted, np.float32)
        if f"{output}.bias" in arrays:
            arrays[f"{output}.bias"][:] = 0
    return arrays


def stored(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Convert values to a file's data type. BF16, the upper half of float32, is returned as uint16."""
    if dtype == "bfloat16":
        return np.array(values.astype(np.float32).view(np.uint32) >> 16, np.uint16)
    return values.astype(dtype)


def from_stored(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]], dtype: str = "float32") -> Path:
    """Write tensors in safetensors format, or as PyTorch does."""
    held = {name: stored(values, dtype) for name, values in arrays.items()}
    if file.suffix != ".safetensors":
        return write_torch_file(file, held)
    save_file(held, file)
    if dtype == "bfloat16":  # safetensors writes no BF16 with NumPy, so only its name is changed.
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length].replace(b'"U16"', b'"BF16"').rstrip(b" ")
        header = header + b" " * (-len(header) % 8)
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return file


def write_heads(
    folder: Path,
    layout: Layout,
    arrays: Mapping[str, NDArray[Any]],
    **settings: Any,
) -> Path:
    """Write heads as they are published. Skip the test if edgespec does not have their method."""
    if layout.method not in method_names():
        pytest.skip(f"edgespec has no method named {layout.method}")
    folder.mkdir(parents=True, exist_ok=True)
    if layout.config:
        (folder / "config.json").write_text(json.dumps(layout.settings | settings))
    write_arrays(folder / f"{layout.method}_lm_head{layout.suffix}", arrays, layout.dtype)
    return folder


def plain_logits(
    layout: Layout,
    arrays: Mapping[str, NDArray[Any]],
    attention: Attention,
    states: NDArray[Any],
    embed: Callable[[int], NDArray[Any]],
    path: Sequence[int],
    lm_head: NDArray[Any],
) -> NDArray[np.float64]:
    """Return the logits after the last token of a path.

    Args:
        states: The hidden states of all tokens before the path.
        path: The root of the tree and the drafted tokens.
        lm_head: The target's LM head.
    """
    weights = {name: values.astype(np.float64) for name, values in arrays.items()}
    states = states.astype(np.float64)
    head = len(path) - 1
    x = _plain_prefix(weights, attention, states)[-1] if layout.prefix else states[-1]
    if layout.grounded:
        x = np.concatenate([x, *(embed(token).astype(np.float64) for token in path)])
    for layer in range(layout.layers):
        name = layout.block(head, layer)
        y = weights[f"{name}.linear.weight"] @ x + weights[f"{name}.linear.bias"]
        if layout.grounded and layer == 0:
            x = weights[f"{name}.res_connection.weight"] @ x + weights[f"{name}.res_connection.bias"]
        x = x + y / (1 + np.exp(-y))
    if not layout.outputs:
        return np.array(lm_head.astype(np.float64) @ x)
    output = layout.output(head)
    logits: NDArray[np.float64] = weights[f"{output}.weight"] @ x + weights.get(f"{output}.bias", 0.0)
    return logits


def _plain_prefix(
    weights: Mapping[str, NDArray[np.float64]], attention: Attention, states: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Run a Llama layer one position and one head at a time. Pairs are rotated as complex numbers."""
    model, layer = "prefix_embeding_layer.", "prefix_embeding_layer.layers.0."
    count, size = states.shape
    head_size = size // attention.heads
    half = head_size // 2
    turns = attention.theta ** (-np.arange(half) / half)

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        scale = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + attention.epsilon)
        return np.array(x * scale * weights[f"{name}.weight"])

    def rotated(x: NDArray[np.float64], position: int) -> NDArray[np.float64]:
        turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * turns)
        return np.concatenate([turned.real, turned.imag])

    def project(x: NDArray[np.float64], part: str) -> NDArray[np.float64]:
        rows = x @ weights[f"{layer}self_attn.{part}_proj.weight"].T
        return np.array(rows.reshape(count, -1, head_size))

    x = norm(states, f"{layer}input_layernorm")
    q, k, v = (project(x, part) for part in "qkv")
    mixed = np.zeros((count, attention.heads, head_size))
    for at in range(count):
        for head in range(attention.heads):
            shared = head * attention.kv_heads // attention.heads
            query = rotated(q[at, head], at)
            scores = np.array([query @ rotated(k[i, shared], i) for i in range(at + 1)]) / np.sqrt(head_size)
            shares = np.exp(scores - scores.max())
            mixed[at, head] = shares @ v[: at + 1, shared] / shares.sum()
    x = states + mixed.reshape(count, size) @ weights[f"{layer}self_attn.o_proj.weight"].T
    y = norm(x, f"{layer}post_attention_layernorm")
    gate = y @ weights[f"{layer}mlp.gate_proj.weight"].T
    up = y @ weights[f"{layer}mlp.up_proj.weight"].T
    x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}mlp.down_proj.weight"].T
    return norm(x, f"{model}norm")
