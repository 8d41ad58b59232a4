"""Write tiny MLX models with random weights, for every kind of cache in mlx-lm."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes, load_model, quantize_model, save_config, save_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WINDOW_TOKENS = 16
PADDING_ROWS = 9

_MERGES = ("t h", "th e", "Ġ the", "l i", "li s", "lis t", "Ġ list", "f i", "fi l", "fil e", "Ġ file", "e s")
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_WORDS = {word: i for i, word in enumerate([*_BYTES, *(merge.replace(" ", "") for merge in _MERGES)])}
_START, _END = len(_WORDS) + 1, len(_WORDS) + 2
TOKENS = len(_WORDS) + len(CONTROL)
ROWS = TOKENS + PADDING_ROWS

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": ROWS,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": _END,
}
_MOE = {"num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SSM = {"conv_kernel": 4, "n_groups": 1, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5}

# Differences of each kind from the common configuration.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_sliding": {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW_TOKENS,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 16},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW_TOKENS,
        "sliding_window_pattern": 2,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        **_MLA,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **_MLA},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 64, **_MOE},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": WINDOW_TOKENS,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        "pad_token_id": 0,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": WINDOW_TOKENS,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 8,
        "state_size": 16,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        **_SSM,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_n_heads": 8,
        "mamba_chunk_size": 16,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "shared_expert_intermediate_size": 64,
        "moe_intermediate_size": 64,
        "partial_rotary_factor": 0.5,
        **_MOE,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": ["M", "*", "-", "M"],
        "num_hidden_layers": 4,
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "mlp_bias": False,
        **_SSM,
    },
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "jamba": {
        "model_type": "jamba",
        "num_hidden_layers": 3,
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
}


def configuration(kind: str) -> dict[str, Any]:
    """Return the config.json of a kind of model."""
    config = {**_COMMON, **KINDS[kind]}
    if "text_config" in config:
        config["text_config"] = {**_COMMON, **config["text_config"]}
    return config


def write_tokenizer(folder: Path, *, template: str | None = CHATML) -> Path:
    """Write a byte-level BPE tokenizer with a dozen merges and ChatML's control tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=_WORDS, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_checkpoint(
    folder: Path,
    kind: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    quantisation: tuple[str, int, int] | tuple[str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model with its tokenizer. `quantisation` is a mode, or a tuple of mode, bits and group size.

    `config` changes values of the kind's configuration.
    """
    write_tokenizer(folder)
    written = {**configuration(kind), **(config or {})}
    model_class, arguments_class = _get_classes(written)
    model = model_class(arguments_class.from_dict(written))
    model.update(tree_unflatten(_lively(model, seed)))
    model.set_dtype(getattr(mx, dtype))
    if quantisation is not None:
        mode, bits, group = quantisation if len(quantisation) == 3 else (quantisation[0], None, None)
        with contextlib.redirect_stdout(io.StringIO()):
            model, written = quantize_model(model, written, group, bits, mode=mode)
    save_model(folder, model)
    save_config(written, folder / "config.json")
    return folder


def _lively(model: Any, seed: int) -> list[tuple[str, mx.array]]:
    """Return weights for which every layer matters, and logits differ by a few units."""
    key = mx.random.key(seed)
    tied = sum(weight.shape[0] == ROWS for _, weight in _arrays(model)) == 1
    weights = []
    for name, weight in _arrays(model):
        key, here = mx.random.split(key)
        noise = mx.random.normal(weight.shape, key=here)
        if weight.ndim < 2 or name.endswith("A_log"):
            # With a tied output layer, small layer outputs would always predict the input token again.
            louder = 20 if tied and "post_" in name else 0
            weights.append((name, weight + louder + 0.1 * noise))
            continue
        fan_in = weight.size // weight.shape[0] if "conv" in name else weight.shape[-1]
        scaled = noise * 2 / fan_in**0.5
        if weight.shape[0] == ROWS:
            # Zero rows never give the largest logit, so no reply ends early or contains padding.
            drawn = [i < TOKENS and i not in (_START - 1, _END) for i in range(ROWS)]
            scaled = 2 * scaled * mx.array(drawn)[:, None]
        weights.append((name, scaled))
    return weights


def _arrays(model: Any) -> list[tuple[str, Any]]:
    leaves: Any = tree_flatten(model.parameters())
    return list(leaves)


def write_adapter(folder: Path, checkpoint: Path, *, seed: int = 1, rank: int = 4) -> Path:
    """Write a LoRA adapter for the last layer of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    model, _ = load_model(checkpoint)
    parameters = {"rank": rank, "scale": 4.0, "dropout": 0.0}
    linear_to_lora_layers(model, 1, parameters)
    mx.random.seed(seed)
    lora = {
        name: mx.random.normal(weight.shape) / weight.shape[0] ** 0.5
        for name, weight in _arrays(model)
        if name.endswith(("lora_a", "lora_b"))
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), lora)
    settings = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
