#!/usr/bin/env python3
"""Convert a Llama GGUF to a Hugging Face folder in half precision, for MLX and for training heads.

    .venv/bin/python -m scripts.gguf_to_hf build/real-models/smollm2-q4_1.gguf build/real-models/smollm2-hf

Supports models of the Llama architecture with a byte-level BPE vocabulary (`tokenizer.ggml.model` is `gpt2`).
The folder has `model.safetensors`, `config.json`, `generation_config.json`, `tokenizer.json` and
`tokenizer_config.json`. Quantised weights are dequantised first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from scripts.make_demo_mlx import mlx_name, row_order, write_safetensors

_CONTROL_TOKEN = 3  # `tokenizer.ggml.token_type` of tokens such as <|im_start|>


def convert(source: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a GGUF model. Existing files in the folder are replaced.

    Raises:
        SystemExit: The architecture or the kind of vocabulary is not supported.
    """
    reader = gguf.GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    for key, supported in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if metadata[key] != supported:
            raise SystemExit(f"error: {key} is {metadata[key]!r}; only {supported!r} is supported")
    tensors = _tensors(reader, metadata)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    ends = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
    }
    config = _config(metadata, is_tied="lm_head.weight" not in tensors) | ends
    contents = {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer.json": _tokenizer(metadata),
        "tokenizer_config.json": _tokenizer_config(metadata),
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _tensors(reader: gguf.GGUFReader, metadata: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the weights in half precision, with the rows of the query and key projections reordered."""
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
        if (part := tensor.name.split(".")[-2]) in heads:
            weights = weights[row_order(weights.shape[0], heads[part])]
        tensors[f"{mlx_name(tensor.name)}.weight"] = weights
    return tensors


def _config(metadata: dict[str, Any], *, is_tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10_000.0),
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return `tokenizer.json`. Like SmolLM2's own, it splits numbers into digits before applying BPE."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": text, **flags, "special": True}
            for token, (text, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level | {"add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens, start = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.bos_token_id")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if start is None else tokens[start],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "chat_template": metadata.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the GGUF file to convert")
    parser.add_argument("folder", type=Path, help="the folder to write")
    args = parser.parse_args()
    convert(args.source, args.folder)


if __name__ == "__main__":
    main()
