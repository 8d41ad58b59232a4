"""GGUF files of a few kilobytes with random weights, for behaviour that trained models rarely show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray

WORDS = ("▁", "▁the", "▁file", "▁list", "s", "▁of", "é", "🙂", "<|im_start|>", "<|im_end|>")
_CONTROL = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|im_start|>": 3, "<|im_end|>": 3}
_NORMAL, _BYTE = 1, 6

# Sizes of the embedding, an attention head and the feed-forward block.
_SIZE, _HEAD, _FEED_FORWARD = 32, 16, 64
_INNER, _STATE, _RANK, _KERNEL = 64, 8, 4, 4
_EXPERTS = 4

Tensors: TypeAlias = dict[str, NDArray[np.float32]]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def _weights(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    weights: NDArray[np.float32] = (random.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
    return weights


def _ones(size: int) -> NDArray[np.float32]:
    return np.ones(size, np.float32)


def _open(
    path: Path, architecture: str, *, layers: int, feed_forward: int = _FEED_FORWARD, context: int = 512
) -> gguf.GGUFWriter:
    """Return a writer with the metadata that all architectures share."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(context)
    writer.add_embedding_length(_SIZE)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def _add_state_sizes(writer: gguf.GGUFWriter) -> None:
    writer.add_ssm_conv_kernel(_KERNEL)
    writer.add_ssm_inner_size(_INNER)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_RANK)


def _vocabulary(writer: gguf.GGUFWriter, words: tuple[str, ...], template: str | None) -> int:
    """Add a SentencePiece vocabulary of control tokens, all bytes and `words`, and return its size."""
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


def _finish(writer: gguf.GGUFWriter, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _ends(random: np.random.Generator, vocab: int, norm: str = "output_norm") -> Tensors:
    """Return embedding, final norm and output head, scaled so that logits differ by a few units."""
    return {
        "token_embd.weight": _weights(random, vocab, _SIZE) * 4,
        f"{norm}.weight": _ones(_SIZE),
        "output.weight": _weights(random, vocab, _SIZE) * 4,
    }


def _attention(random: np.random.Generator, layer: int, heads_kv: int = 1) -> Tensors:
    """Return the attention tensors of a layer with two heads, without the norm."""
    return {
        f"blk.{layer}.attn_q.weight": _weights(random, 2 * _HEAD, _SIZE),
        f"blk.{layer}.attn_k.weight": _weights(random, heads_kv * _HEAD, _SIZE),
        f"blk.{layer}.attn_v.weight": _weights(random, heads_kv * _HEAD, _SIZE),
        f"blk.{layer}.attn_output.weight": _weights(random, _SIZE, 2 * _HEAD),
    }


def _state_space(random: np.random.Generator, layer: int) -> Tensors:
    """Return the tensors of a Mamba mixer, without the norm."""
    return {
        f"blk.{layer}.ssm_in.weight": _weights(random, 2 * _INNER, _SIZE),
        f"blk.{layer}.ssm_conv1d.weight": _weights(random, _INNER, _KERNEL),
        f"blk.{layer}.ssm_conv1d.bias": np.zeros(_INNER, np.float32),
        f"blk.{layer}.ssm_x.weight": _weights(random, _RANK + 2 * _STATE, _INNER),
        f"blk.{layer}.ssm_dt.weight": _weights(random, _INNER, _RANK),
        f"blk.{layer}.ssm_dt.bias": _ones(_INNER),
        f"blk.{layer}.ssm_a": -np.ones((_INNER, _STATE), np.float32),
        f"blk.{layer}.ssm_d": _ones(_INNER),
        f"blk.{layer}.ssm_out.weight": _weights(random, _SIZE, _INNER),
    }


def _norms_and_feed_forward(random: np.random.Generator, layer: int) -> Tensors:
    """Return both norms and the gated feed-forward block of a layer."""
    return {
        f"blk.{layer}.attn_norm.weight": _ones(_SIZE),
        f"blk.{layer}.ffn_norm.weight": _ones(_SIZE),
        f"blk.{layer}.ffn_gate.weight": _weights(random, _FEED_FORWARD, _SIZE),
        f"blk.{layer}.ffn_up.weight": _weights(random, _FEED_FORWARD, _SIZE),
        f"blk.{layer}.ffn_down.weight": _weights(random, _SIZE, _FEED_FORWARD),
    }


def write_llama(
    path: Path,
    *,
    words: tuple[str, ...] = WORDS,
    template: str | None = CHATML,
    seed: int = 0,
    architecture: str = "llama",
    context: int = 512,
    layers: int = 1,
    long_from: int = 0,
    pooling: gguf.PoolingType | None = None,
    twins: bool = False,
) -> Path:
    """Write a transformer.

    long_from: use LongRoPE, with other factors in contexts above this size. pooling: embed texts like this,
    after adding the EOS token. twins: give tokens 4 and 5, 6 and 7 and so on nearly equal logits, which
    differ less than their rounding errors.
    """
    random = np.random.default_rng(seed)
    writer = _open(path, architecture, layers=layers, context=context)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    vocab = _vocabulary(writer, words, template)
    tensors = _ends(random, vocab)
    if twins:
        output = tensors["output.weight"]
        output[5::2] = np.nextafter(output[4:-1:2], np.float32(np.inf))
    for layer in range(layers):
        tensors |= _attention(random, layer, heads_kv=2) | _norms_and_feed_forward(random, layer)
    if pooling is not None:
        writer.add_pooling_type(pooling)
        writer.add_add_eos_token(True)
    if long_from:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(long_from)
        for name, factor in (("short", 1.0), ("long", 4.0)):
            tensors[f"rope_factors_{name}.weight"] = np.full(_HEAD // 2, factor, np.float32)
    _finish(writer, tensors)
    return path


def write_eagle(
    path: Path,
    *,
    layers: Sequence[int] = (0, 0, 0),
    vocab: int = 259 + len(WORDS),
    size: int = _SIZE,
    rotated: int = _HEAD,
) -> Path:
    """An EAGLE-3 head for the model that `write_llama` writes. It drafts three quarters of the tokens."""
    random = np.random.default_rng(7)
    writer = _open(path, "eagle3", layers=1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_rope_dimension_count(rotated)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("none")
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", size)
    writer.add_bool("eagle3.norm_before_residual", False)
    writer.add_bool("eagle3.norm_before_fc", False)
    drafted = np.sort(random.permutation(vocab)[: vocab * 3 // 4])
    block = "blk.0."
    tensors = {
        "fc.weight": _weights(random, _SIZE, len(layers) * size),
        "output_norm.weight": _ones(_SIZE),
        "output.weight": _weights(random, len(drafted), _SIZE),
        **{f"{block}{norm}.weight": _ones(_SIZE) for norm in ("attn_norm", "attn_norm_2", "ffn_norm")},
        f"{block}attn_q.weight": _weights(random, 2 * _HEAD, 2 * _SIZE),
        f"{block}attn_k.weight": _weights(random, _HEAD, 2 * _SIZE),
        f"{block}attn_v.weight": _weights(random, _HEAD, 2 * _SIZE),
        f"{block}attn_output.weight": _weights(random, _SIZE, 2 * _HEAD),
        f"{block}ffn_gate.weight": _weights(random, _FEED_FORWARD, _SIZE),
        f"{block}ffn_up.weight": _weights(random, _FEED_FORWARD, _SIZE),
        f"{block}ffn_down.weight": _weights(random, _SIZE, _FEED_FORWARD),
    }
    writer.add_tensor("d2t", drafted.astype(np.int64))
    _finish(writer, tensors)
    return path


def write_dflash(
    path: Path,
    *,
    layers: Sequence[int] = (1, 1, 1),
    depth: int = 2,
    block: int = 6,
    vocab: int = 259 + len(WORDS),
    mask: int | None = 0,
    drafted: int | None = None,
    size: int = _SIZE,
    rank: int = 0,
    candidates: int = 0,
    sections: Sequence[int] = (),
    window: int = 0,
    kv_heads: int = 1,
    value_size: int = _HEAD,
    **metadata: int | bool | str,
) -> Path:
    """A DFlash head for the model that `write_llama` writes.

    depth: the number of its layers. drafted: it drafts so many of the tokens. rank: the rank of the Markov
    head, which makes it a DSpark head. candidates: the number of candidates of a
    DFlash 2 head. sections: it has
    M-RoPE. window: all layers but the first have a sliding window. metadata: further values of its
    architecture, such as `sample_from_anchor`.
    """
    random = np.random.default_rng(9)
    writer = _open(path, "dflash", layers=depth)
    writer.add_head_count(2)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(_HEAD)
    writer.add_value_length(value_size)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("none")
    writer.add_array("dflash.target_layers", list(layers))
    writer.add_uint32("dflash.block_size", block)
    if mask is not None:
        writer.add_mask_token_id(mask)
    if sections:
        writer.add_rope_dimension_sections(sections)
    if window:
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([False, *[True] * (depth - 1)])
    for key, value in metadata.items():
        name = f"dflash.{key.replace('__', '.')}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    tensors = {
        "fc.weight": _weights(random, _SIZE, len(layers) * size),
        "enc.output_norm.weight": _ones(_SIZE),
        "output_norm.weight": _ones(_SIZE),
    }
    for layer in range(depth):
        tensors |= _attention(random, layer, kv_heads) | _norms_and_feed_forward(random, layer)
        if value_size != _HEAD:
            tensors[f"blk.{layer}.attn_v.weight"] = _weights(random, kv_heads * value_size, _SIZE)
        norms = (f"blk.{layer}.attn_{part}_norm.weight" for part in "qk")
        tensors |= dict.fromkeys(norms, _ones(_HEAD))
    if candidates:
        tensors |= _path_selector(random, vocab, depth)
        for key, value in {"selector_rank": 8, "conv_kernel_size": 2, "conv_group_size": _SIZE // 4}.items():
            writer.add_uint32(f"dflash.{key}", value)
        writer.add_uint32("dflash.selector_top_k", candidates)
    if rank:
        tensors |= {
            "markov_w1.weight": _weights(random, vocab, rank),
            "markov_w2.weight": 8 * _weights(random, drafted or vocab, rank),
            "conf_proj.weight": _weights(random, 1, _SIZE + rank),
        }
    if drafted:
        tensors["output.weight"] = 4 * _weights(random, drafted, _SIZE)
        ids = np.sort(random.permutation(vocab)[:drafted])
        writer.add_tensor("d2t", ids.astype(np.int64))
    _finish(writer, tensors)
    return path


def _path_selector(random: np.random.Generator, vocab: int, depth: int) -> dict[str, np.ndarray]:
    """What a DFlash 2 head has more: the path selector, and convolutions around each part of a layer."""
    tensors = {
        "selector_hidden.weight": _weights(random, 8, _SIZE),
        "selector_predecessor.weight": 8 * _weights(random, vocab, 8),
        "selector_successor.weight": _weights(random, vocab, 8),
    }
    for layer in range(depth):
        for part in ("attn", "ffn"):
            base = np.array([0.7, 0.3], np.float32)[None, :, None]
            noise = 0.1 * random.normal(size=(2, 2, _SIZE)).astype(np.float32)
            tensors[f"blk.{layer}.{part}_conv_base"] = base + noise
            tensors[f"blk.{layer}.{part}_conv_proj.weight"] = 0.3 * _weights(random, 2 * 2 * 4, _SIZE)
    return tensors


def write_moe(path: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """Write a mixture of experts: two of four experts per token, and two heads that share their keys."""
    random = np.random.default_rng(seed)
    writer = _open(path, "llama", layers=2)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_expert_count(_EXPERTS)
    writer.add_expert_used_count(2)
    vocab = _vocabulary(writer, WORDS, template)
    tensors = _ends(random, vocab)
    for layer in range(2):
        tensors |= _attention(random, layer)
        tensors |= {
            f"blk.{layer}.attn_norm.weight": _ones(_SIZE),
            f"blk.{layer}.ffn_norm.weight": _ones(_SIZE),
            f"blk.{layer}.ffn_gate_inp.weight": _weights(random, _EXPERTS, _SIZE),
            f"blk.{layer}.ffn_gate_exps.weight": _weights(random, _EXPERTS, _FEED_FORWARD, _SIZE),
            f"blk.{layer}.ffn_up_exps.weight": _weights(random, _EXPERTS, _FEED_FORWARD, _SIZE),
            f"blk.{layer}.ffn_down_exps.weight": _weights(random, _EXPERTS, _SIZE, _FEED_FORWARD),
        }
    _finish(writer, tensors)
    return path


def write_mamba(
    path: Path,
    *,
    template: str | None = CHATML,
    seed: int = 0,
    layers: int = 1,
    architecture: str = "mamba",
) -> Path:
    """Write a recurrent model, whose state cannot be truncated."""
    random = np.random.default_rng(seed)
    writer = _open(path, architecture, layers=layers, feed_forward=0)
    writer.add_head_count(0)
    _add_state_sizes(writer)
    vocab = _vocabulary(writer, WORDS, template)
    tensors = _ends(random, vocab)
    for layer in range(layers):
        tensors |= {f"blk.{layer}.attn_norm.weight": _ones(_SIZE)} | _state_space(random, layer)
    _finish(writer, tensors)
    return path


def write_gemma2(path: Path, *, template: str | None = CHATML, seed: int = 0, window: int = 16) -> Path:
    """Write a transformer of two layers, the first with a sliding window."""
    return _write_gemma(path, "gemma2", template, seed, window, layers=2)


def write_gemma3(path: Path, *, template: str | None = CHATML, seed: int = 0, window: int = 16) -> Path:
    """Write a transformer of eight layers, all but the sixth with a sliding window."""
    return _write_gemma(path, "gemma3", template, seed, window, layers=8)


def _write_gemma(
    path: Path, architecture: str, template: str | None, seed: int, window: int, layers: int
) -> Path:
    random = np.random.default_rng(seed)
    writer = _open(path, architecture, layers=layers)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_sliding_window(window)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    vocab = _vocabulary(writer, WORDS, template)
    # The embedding is tied to the output. Without a large norm the model would only repeat its input token.
    loud = 20 * _ones(_SIZE)
    tensors = {"token_embd.weight": _weights(random, vocab, _SIZE) * 4, "output_norm.weight": _ones(_SIZE)}
    for layer in range(layers):
        tensors |= _attention(random, layer) | _norms_and_feed_forward(random, layer)
        tensors |= {
            f"blk.{layer}.post_attention_norm.weight": loud,
            f"blk.{layer}.post_ffw_norm.weight": loud,
        }
        if architecture == "gemma3":
            norms = (f"blk.{layer}.attn_{part}_norm.weight" for part in "qk")
            tensors |= dict.fromkeys(norms, _ones(_HEAD))
    _finish(writer, tensors)
    return path


def write_jamba(path: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """Write a hybrid of a recurrent layer and an attention layer."""
    random = np.random.default_rng(seed)
    writer = _open(path, "jamba", layers=2)
    writer.add_head_count(2)
    writer.add_head_count_kv([0, 1])
    _add_state_sizes(writer)
    vocab = _vocabulary(writer, WORDS, template)
    tensors = _ends(random, vocab) | _state_space(random, 0) | _attention(random, 1)
    tensors |= {
        "blk.0.ssm_dt_norm.weight": _ones(_RANK),
        "blk.0.ssm_b_norm.weight": _ones(_STATE),
        "blk.0.ssm_c_norm.weight": _ones(_STATE),
    }
    for layer in range(2):
        tensors |= _norms_and_feed_forward(random, layer)
    _finish(writer, tensors)
    return path


def write_lfm2(path: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """Write a hybrid of a short convolution and attention. llama.cpp can keep several of its small states."""
    random = np.random.default_rng(seed)
    writer = _open(path, "lfm2", layers=2)
    writer.add_head_count(2)
    writer.add_head_count_kv([0, 1])
    writer.add_shortconv_l_cache(3)
    vocab = _vocabulary(writer, WORDS, template)
    tensors = _ends(random, vocab, norm="token_embd_norm")
    tensors |= {
        "blk.0.shortconv.conv.weight": _weights(random, _SIZE, 3),
        "blk.0.shortconv.in_proj.weight": _weights(random, 3 * _SIZE, _SIZE),
        "blk.0.shortconv.out_proj.weight": _weights(random, _SIZE, _SIZE),
        "blk.1.attn_q_norm.weight": _ones(_HEAD),
        "blk.1.attn_k_norm.weight": _ones(_HEAD),
    }
    tensors |= _attention(random, 1)
    for layer in range(2):
        tensors |= _norms_and_feed_forward(random, layer)
    _finish(writer, tensors)
    return path
