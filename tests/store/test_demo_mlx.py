"""The embedded MLX and GGUF models have the same weights, tokens and template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from numpy.typing import NDArray

from edgespec.store.catalogue import models_folder

PAIRS = [("demo-target-q8_0.gguf", "demo-mlx"), ("demo-draft-q8_0.gguf", "demo-mlx-draft")]
PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
GROUP = 32


def safetensors(path: Path) -> dict[str, NDArray[Any]]:
    raw = path.read_bytes()
    data = memoryview(raw)[8 + int.from_bytes(raw[:8], "little") :]
    header = json.loads(raw[8 : len(raw) - len(data)])
    assert header.pop("__metadata__") == {"format": "mlx"}
    kinds = {"U32": "<u4", "F16": "<f2", "F32": "<f4"}
    tensors = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        tensors[name] = np.frombuffer(data[begin:end], kinds[about["dtype"]]).reshape(about["shape"])
    return tensors


def of_mlx(tensors: dict[str, NDArray[Any]], module: str) -> NDArray[np.float64]:
    """Return the weights of a module in double precision, where scale * code + bias is exact."""
    weight = tensors[f"{module}.weight"]
    if f"{module}.scales" not in tensors:
        return weight.astype(np.float64)
    # The lowest eight bits of the first word hold the first code of a group.
    codes = np.stack([weight >> shift & 0xFF for shift in (0, 8, 16, 24)], axis=-1).reshape(len(weight), -1)
    scales, biases = (
        np.repeat(tensors[f"{module}.{name}"].astype(np.float64), GROUP, axis=1)
        for name in ("scales", "biases")
    )
    return scales * codes + biases


def unpermuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return rows in the order of Hugging Face files. llama.cpp interleaves the rows of rotated pairs."""
    halves = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.concatenate([halves[:, :, 0], halves[:, :, 1]], axis=1).reshape(rows.shape)


@pytest.mark.long
@pytest.mark.parametrize(("file", "folder"), PAIRS)
def test_weights_equal_the_gguf_weights(file: str, folder: str) -> None:
    reader = gguf.GGUFReader(models_folder() / file)
    ours = safetensors(models_folder() / folder / "model.safetensors")
    config = json.loads((models_folder() / folder / "config.json").read_text(encoding="utf-8"))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    modules = set()
    for tensor in reader.tensors:
        *layer, part = tensor.name.removesuffix(".weight").split(".")
        module = f"model.layers.{layer[1]}.{PARTS[part]}" if layer else PARTS[part]
        modules.add(module)
        theirs = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            theirs = unpermuted(theirs, heads[part])
        assert np.array_equal(of_mlx(ours, module), theirs.astype(np.float64)), tensor.name
    assert {name.rpartition(".")[0] for name in ours} == modules


@pytest.mark.long
@pytest.mark.parametrize(("file", "folder"), PAIRS)
def test_configuration_tokens_and_template_agree(file: str, folder: str) -> None:
    fields = gguf.GGUFReader(models_folder() / file).fields

    def field(key: str) -> Any:
        return fields[key].contents()

    def read(name: str) -> Any:
        return json.loads((models_folder() / folder / name).read_text(encoding="utf-8"))

    config, tokenizer, settings = read("config.json"), read("tokenizer.json"), read("tokenizer_config.json")
    assert config["quantization"] == {"group_size": GROUP, "bits": 8}
    assert config["num_hidden_layers"] == field("llama.block_count")
    assert config["hidden_size"] == field("llama.embedding_length")
    assert config["head_dim"] == field("llama.rope.dimension_count")
    assert config["rope_theta"] == field("llama.rope.freq_base")
    assert config["max_position_embeddings"] == field("llama.context_length")
    assert config["rms_norm_eps"] == pytest.approx(field("llama.attention.layer_norm_rms_epsilon"))
    assert config["tie_word_embeddings"]
    assert settings["chat_template"] == field("tokenizer.chat_template")
    by_id = {token: text for text, token in tokenizer["model"]["vocab"].items()}
    by_id |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    assert [by_id[token] for token in sorted(by_id)] == field("tokenizer.ggml.tokens")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    assert merges == field("tokenizer.ggml.merges")
