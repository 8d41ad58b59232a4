"""GGUF files of a few kilobytes with random weights, to see what real models are too polite to do."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

WORDS = ("▁", "▁the", "▁file", "▁list", "s", "▁of", "é", "🙂", "<|im_start|>", "<|im_end|>")
_CONTROL = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|im_start|>": 3, "<|im_end|>": 3}
_NORMAL, _BYTE = 1, 6

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def _weights(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    weights: NDArray[np.float32] = (random.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
    return weights


def _vocabulary(writer: gguf.GGUFWriter, words: tuple[str, ...], template: str | None) -> int:
    """A sentencepiece vocabulary: control tokens, all bytes, and some words. Its size."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [_CONTROL.get(t, _BYTE if 3 <= i < 259 else _NORMAL) for i, t in enumerate(tokens)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if "<|im_end|>" in tokens:
        writer.add_eot_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(True)
    if template is not None:
        writer.add_chat_template(template)
    return len(tokens)


def _finish(writer: gguf.GGUFWriter, tensors: dict[str, NDArray[np.float32]]) -> None:
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama(
    path: Path,
    *,
    words: tuple[str, ...] = WORDS,
    template: str | None = CHATML,
    seed: int = 0,
    architecture: str = "llama",
    context: int = 512,
) -> Path:
    """A transformer of one layer."""
    random = np.random.default_rng(seed)
    size, feed_forward = 32, 64
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(context)
    writer.add_embedding_length(size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab = _vocabulary(writer, words, template)
    ones = np.ones(size, np.float32)
    _finish(
        writer,
        {
            "token_embd.weight": _weights(random, vocab, size) * 4,
            "output_norm.weight": ones,
            "output.weight": _weights(random, vocab, size) * 4,
            "blk.0.attn_norm.weight": ones,
            "blk.0.attn_q.weight": _weights(random, size, size),
            "blk.0.attn_k.weight": _weights(random, size, size),
            "blk.0.attn_v.weight": _weights(random, size, size),
            "blk.0.attn_output.weight": _weights(random, size, size),
            "blk.0.ffn_norm.weight": ones,
            "blk.0.ffn_gate.weight": _weights(random, feed_forward, size),
            "blk.0.ffn_up.weight": _weights(random, feed_forward, size),
            "blk.0.ffn_down.weight": _weights(random, size, feed_forward),
        },
    )
    return path


def write_mamba(path: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """A recurrent model of one layer: its memory is a state, and a state cannot be cut back."""
    random = np.random.default_rng(seed)
    size, inner, state, rank, kernel = 32, 64, 8, 4, 4
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(512)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(1)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab = _vocabulary(writer, WORDS, template)
    _finish(
        writer,
        {
            "token_embd.weight": _weights(random, vocab, size) * 4,
            "output_norm.weight": np.ones(size, np.float32),
            "output.weight": _weights(random, vocab, size) * 4,
            "blk.0.attn_norm.weight": np.ones(size, np.float32),
            "blk.0.ssm_in.weight": _weights(random, 2 * inner, size),
            "blk.0.ssm_conv1d.weight": _weights(random, inner, kernel),
            "blk.0.ssm_conv1d.bias": np.zeros(inner, np.float32),
            "blk.0.ssm_x.weight": _weights(random, rank + 2 * state, inner),
            "blk.0.ssm_dt.weight": _weights(random, inner, rank),
            "blk.0.ssm_dt.bias": np.ones(inner, np.float32),
            "blk.0.ssm_a": -np.ones((inner, state), np.float32),
            "blk.0.ssm_d": np.ones(inner, np.float32),
            "blk.0.ssm_out.weight": _weights(random, size, inner),
        },
    )
    return path


def write_gemma2(path: Path, *, template: str | None = CHATML, seed: int = 0, window: int = 16) -> Path:
    """A transformer of two layers, of which the first looks back over a window only."""
    random = np.random.default_rng(seed)
    size, feed_forward = 32, 64
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.add_context_length(512)
    writer.add_embedding_length(size)
    writer.add_block_count(2)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(window)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    vocab = _vocabulary(writer, WORDS, template)
    ones = np.ones(size, np.float32)
    tensors = {"token_embd.weight": _weights(random, vocab, size) * 4, "output_norm.weight": ones}
    for layer in range(2):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ones,
            f"blk.{layer}.attn_q.weight": _weights(random, 32, size),
            f"blk.{layer}.attn_k.weight": _weights(random, 16, size),
            f"blk.{layer}.attn_v.weight": _weights(random, 16, size),
            f"blk.{layer}.attn_output.weight": _weights(random, size, 32),
            f"blk.{layer}.post_attention_norm.weight": ones,
            f"blk.{layer}.ffn_norm.weight": ones,
            f"blk.{layer}.ffn_gate.weight": _weights(random, feed_forward, size),
            f"blk.{layer}.ffn_up.weight": _weights(random, feed_forward, size),
            f"blk.{layer}.ffn_down.weight": _weights(random, size, feed_forward),
            f"blk.{layer}.post_ffw_norm.weight": ones,
        }
    _finish(writer, tensors)
    return path


def write_jamba(path: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """A hybrid of a layer with a recurrent state and one of attention."""
    random = np.random.default_rng(seed)
    size, inner, state, rank, kernel, feed_forward = 32, 64, 8, 4, 4, 64
    writer = gguf.GGUFWriter(path, "jamba")
    writer.add_context_length(512)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(feed_forward)
    writer.add_block_count(2)
    writer.add_head_count(2)
    writer.add_head_count_kv([0, 1])
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab = _vocabulary(writer, WORDS, template)
    ones = np.ones(size, np.float32)
    tensors = {
        "token_embd.weight": _weights(random, vocab, size) * 4,
        "output_norm.weight": ones,
        "output.weight": _weights(random, vocab, size) * 4,
        "blk.0.ssm_in.weight": _weights(random, 2 * inner, size),
        "blk.0.ssm_conv1d.weight": _weights(random, inner, kernel),
        "blk.0.ssm_conv1d.bias": np.zeros(inner, np.float32),
        "blk.0.ssm_x.weight": _weights(random, rank + 2 * state, inner),
        "blk.0.ssm_dt_norm.weight": np.ones(rank, np.float32),
        "blk.0.ssm_dt.weight": _weights(random, inner, rank),
        "blk.0.ssm_dt.bias": np.ones(inner, np.float32),
        "blk.0.ssm_b_norm.weight": np.ones(state, np.float32),
        "blk.0.ssm_c_norm.weight": np.ones(state, np.float32),
        "blk.0.ssm_a": -np.ones((inner, state), np.float32),
        "blk.0.ssm_d": np.ones(inner, np.float32),
        "blk.0.ssm_out.weight": _weights(random, size, inner),
        "blk.1.attn_q.weight": _weights(random, size, size),
        "blk.1.attn_k.weight": _weights(random, 16, size),
        "blk.1.attn_v.weight": _weights(random, 16, size),
        "blk.1.attn_output.weight": _weights(random, size, size),
    }
    for layer in range(2):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ones,
            f"blk.{layer}.ffn_norm.weight": ones,
            f"blk.{layer}.ffn_gate.weight": _weights(random, feed_forward, size),
            f"blk.{layer}.ffn_up.weight": _weights(random, feed_forward, size),
            f"blk.{layer}.ffn_down.weight": _weights(random, size, feed_forward),
        }
    _finish(writer, tensors)
    return path


def write_lfm2(path: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """A hybrid of a short convolution and attention: a small state, of which llama.cpp can keep several."""
    random = np.random.default_rng(seed)
    size, feed_forward = 32, 64
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_context_length(512)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(feed_forward)
    writer.add_block_count(2)
    writer.add_head_count(2)
    writer.add_head_count_kv([0, 1])
    writer.add_shortconv_l_cache(3)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab = _vocabulary(writer, WORDS, template)
    ones = np.ones(size, np.float32)
    tensors = {
        "token_embd.weight": _weights(random, vocab, size) * 4,
        "token_embd_norm.weight": ones,
        "output.weight": _weights(random, vocab, size) * 4,
        "blk.0.shortconv.conv.weight": _weights(random, size, 3),
        "blk.0.shortconv.in_proj.weight": _weights(random, 3 * size, size),
        "blk.0.shortconv.out_proj.weight": _weights(random, size, size),
        "blk.1.attn_q_norm.weight": np.ones(16, np.float32),
        "blk.1.attn_k_norm.weight": np.ones(16, np.float32),
        "blk.1.attn_q.weight": _weights(random, size, size),
        "blk.1.attn_k.weight": _weights(random, 16, size),
        "blk.1.attn_v.weight": _weights(random, 16, size),
        "blk.1.attn_output.weight": _weights(random, size, size),
    }
    for layer in range(2):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ones,
            f"blk.{layer}.ffn_norm.weight": ones,
            f"blk.{layer}.ffn_gate.weight": _weights(random, feed_forward, size),
            f"blk.{layer}.ffn_up.weight": _weights(random, feed_forward, size),
            f"blk.{layer}.ffn_down.weight": _weights(random, size, feed_forward),
        }
    _finish(writer, tensors)
    return path
