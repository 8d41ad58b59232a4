"""Write GGUF files with random weights, one for each kind of memory that llama.cpp allocates.

Most weights are in the embedding and the output layer. The files are therefore large enough to measure, but
long prompts are prefilled quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.quantise import quantise

Tensors: TypeAlias = Iterator[tuple[str, tuple[int, ...]]]

_TRAINED_TOKENS = 1 << 17
_CONTROL, _NORMAL, _BYTE = 3, 1, 6


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a model.

    Attributes:
        vocab: tokens of the vocabulary.
        embedding: width of the hidden states.
        feed_forward: width of the feed-forward blocks.
        layers: number of layers.
        heads: attention heads.
        heads_kv: key and value heads.
        head: width of a head.
        experts: experts of a mixture.
        window: size of the sliding attention window in tokens.
        inner: width of a Mamba mixer.
        state: state size of a Mamba mixer.
        rank: time step rank of a Mamba mixer.
    """

    vocab: int = 24_576
    embedding: int = 1024
    feed_forward: int = 2048
    layers: int = 4
    heads: int = 4
    heads_kv: int = 2
    head: int = 64
    experts: int = 4
    window: int = 1024
    inner: int = 2048
    state: int = 16
    rank: int = 64

    def attention(self, layer: int, heads_kv: int | None = None) -> Tensors:
        """Yield the tensors of one layer's attention and its norm."""
        kv = (self.heads_kv if heads_kv is None else heads_kv) * self.head
        yield f"blk.{layer}.attn_norm.weight", (self.embedding,)
        yield f"blk.{layer}.attn_q.weight", (self.heads * self.head, self.embedding)
        yield f"blk.{layer}.attn_k.weight", (kv, self.embedding)
        yield f"blk.{layer}.attn_v.weight", (kv, self.embedding)
        yield f"blk.{layer}.attn_output.weight", (self.embedding, self.heads * self.head)

    def feed_forward_block(self, layer: int) -> Tensors:
        """Yield the tensors of one layer's feed-forward block and its norm."""
        yield f"blk.{layer}.ffn_norm.weight", (self.embedding,)
        yield f"blk.{layer}.ffn_gate.weight", (self.feed_forward, self.embedding)
        yield f"blk.{layer}.ffn_up.weight", (self.feed_forward, self.embedding)
        yield f"blk.{layer}.ffn_down.weight", (self.embedding, self.feed_forward)

    def mixture_of_experts(self, layer: int) -> Tensors:
        """Yield the tensors of a mixture of experts, in place of a feed-forward block."""
        yield f"blk.{layer}.ffn_norm.weight", (self.embedding,)
        yield f"blk.{layer}.ffn_gate_inp.weight", (self.experts, self.embedding)
        yield f"blk.{layer}.ffn_gate_exps.weight", (self.experts, self.feed_forward, self.embedding)
        yield f"blk.{layer}.ffn_up_exps.weight", (self.experts, self.feed_forward, self.embedding)
        yield f"blk.{layer}.ffn_down_exps.weight", (self.experts, self.embedding, self.feed_forward)

    def state_space(self, layer: int) -> Tensors:
        """Yield the tensors of one layer's Mamba mixer and its norm."""
        yield f"blk.{layer}.attn_norm.weight", (self.embedding,)
        yield f"blk.{layer}.ssm_in.weight", (2 * self.inner, self.embedding)
        yield f"blk.{layer}.ssm_conv1d.weight", (self.inner, 4)
        yield f"blk.{layer}.ssm_conv1d.bias", (self.inner,)
        yield f"blk.{layer}.ssm_x.weight", (self.rank + 2 * self.state, self.inner)
        yield f"blk.{layer}.ssm_dt.weight", (self.inner, self.rank)
        yield f"blk.{layer}.ssm_dt.bias", (self.inner,)
        yield f"blk.{layer}.ssm_a", (self.inner, self.state)
        yield f"blk.{layer}.ssm_d", (self.inner,)
        yield f"blk.{layer}.ssm_out.weight", (self.embedding, self.inner)


_Kind: TypeAlias = Callable[[gguf.GGUFWriter, Sizes], Tensors]


def _heads(writer: gguf.GGUFWriter, sizes: Sizes, heads_kv: int | list[int] | None = None) -> None:
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.heads_kv if heads_kv is None else heads_kv)
    writer.add_key_length(sizes.head)
    writer.add_value_length(sizes.head)
    writer.add_rope_dimension_count(sizes.head)


def _dense(writer: gguf.GGUFWriter, sizes: Sizes) -> Tensors:
    _heads(writer, sizes, sizes.heads)
    for layer in range(sizes.layers):
        yield from sizes.attention(layer, sizes.heads)
        yield from sizes.feed_forward_block(layer)


def _gqa(writer: gguf.GGUFWriter, sizes: Sizes) -> Tensors:
    _heads(writer, sizes)
    for layer in range(sizes.layers):
        yield from sizes.attention(layer)
        yield from sizes.feed_forward_block(layer)


def _moe(writer: gguf.GGUFWriter, sizes: Sizes) -> Tensors:
    _heads(writer, sizes)
    writer.add_expert_count(sizes.experts)
    writer.add_expert_used_count(2)
    for layer in range(sizes.layers):
        yield from sizes.attention(layer)
        yield from sizes.mixture_of_experts(layer)


def _window(writer: gguf.GGUFWriter, sizes: Sizes) -> Tensors:
    """Yield the tensors of six layers. All but the last have a sliding attention window."""
    _heads(writer, sizes)
    writer.add_sliding_window(sizes.window)
    writer.add_final_logit_softcapping(30.0)
    for layer in range(6):
        yield from sizes.attention(layer)
        yield from sizes.feed_forward_block(layer)
        for name, size in (
            ("post_attention_norm", sizes.embedding),
            ("post_ffw_norm", sizes.embedding),
            ("attn_q_norm", sizes.head),
            ("attn_k_norm", sizes.head),
        ):
            yield f"blk.{layer}.{name}.weight", (size,)


def _mamba(writer: gguf.GGUFWriter, sizes: Sizes) -> Tensors:
    writer.add_head_count(0)
    _states(writer, sizes)
    for layer in range(sizes.layers):
        yield from sizes.state_space(layer)


def _states(writer: gguf.GGUFWriter, sizes: Sizes) -> None:
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(sizes.inner)
    writer.add_ssm_state_size(sizes.state)
    writer.add_ssm_time_step_rank(sizes.rank)


def _jamba(writer: gguf.GGUFWriter, sizes: Sizes) -> Tensors:
    """Yield alternating Mamba and attention layers. The attention is as wide as the embedding."""
    sizes = replace(sizes, heads=sizes.embedding // sizes.head)
    here = [sizes.heads_kv * (layer % 2) for layer in range(sizes.layers)]
    _heads(writer, sizes, here)
    _states(writer, sizes)
    for layer, heads_kv in enumerate(here):
        if heads_kv:
            yield from sizes.attention(layer)
        else:
            yield from sizes.state_space(layer)
            yield f"blk.{layer}.ssm_dt_norm.weight", (sizes.rank,)
            yield f"blk.{layer}.ssm_b_norm.weight", (sizes.state,)
            yield f"blk.{layer}.ssm_c_norm.weight", (sizes.state,)
        yield from sizes.feed_forward_block(layer)


def _lfm2(writer: gguf.GGUFWriter, sizes: Sizes) -> Tensors:
    """Yield alternating short-convolution and attention layers. The attention is as wide as the embedding."""
    sizes = replace(sizes, heads=sizes.embedding // sizes.head)
    here = [sizes.heads_kv * (layer % 2) for layer in range(sizes.layers)]
    _heads(writer, sizes, here)
    writer.add_shortconv_l_cache(3)
    for layer, heads_kv in enumerate(here):
        if heads_kv:
            yield from sizes.attention(layer)
            yield f"blk.{layer}.attn_q_norm.weight", (sizes.head,)
            yield f"blk.{layer}.attn_k_norm.weight", (sizes.head,)
        else:
            yield f"blk.{layer}.attn_norm.weight", (sizes.embedding,)
            yield f"blk.{layer}.shortconv.conv.weight", (sizes.embedding, 3)
            yield f"blk.{layer}.shortconv.in_proj.weight", (3 * sizes.embedding, sizes.embedding)
            yield f"blk.{layer}.shortconv.out_proj.weight", (sizes.embedding, sizes.embedding)
        yield from sizes.feed_forward_block(layer)


def _latent(writer: gguf.GGUFWriter, sizes: Sizes) -> Tensors:
    """Yield layers with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    rope, rank = sizes.head // 2, 4 * sizes.head
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(sizes.head)
    writer.add_value_length_mla(sizes.head)
    writer.add_rope_dimension_count(rope)
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(rank)
    writer.add_leading_dense_block_count(sizes.layers)
    writer.add_expert_count(sizes.experts)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(sizes.feed_forward)
    for layer in range(sizes.layers):
        yield f"blk.{layer}.attn_norm.weight", (sizes.embedding,)
        yield f"blk.{layer}.attn_q_a.weight", (rank, sizes.embedding)
        yield f"blk.{layer}.attn_q_a_norm.weight", (rank,)
        yield f"blk.{layer}.attn_q_b.weight", (sizes.heads * sizes.head, rank)
        yield f"blk.{layer}.attn_kv_a_mqa.weight", (rank + rope, sizes.embedding)
        yield f"blk.{layer}.attn_kv_a_norm.weight", (rank,)
        yield f"blk.{layer}.attn_k_b.weight", (sizes.heads, rank, sizes.head - rope)
        yield f"blk.{layer}.attn_v_b.weight", (sizes.heads, sizes.head, rank)
        yield f"blk.{layer}.attn_output.weight", (sizes.embedding, sizes.heads * sizes.head)
        yield from sizes.feed_forward_block(layer)


# For each kind: llama.cpp's architecture name, the function for its layers, and the name of the final norm.
KINDS: dict[str, tuple[str, _Kind, str]] = {
    "dense": ("llama", _dense, "output_norm"),
    "gqa": ("llama", _gqa, "output_norm"),
    "moe": ("llama", _moe, "output_norm"),
    "window": ("gemma3", _window, "output_norm"),
    "mamba": ("mamba", _mamba, "output_norm"),
    "jamba": ("jamba", _jamba, "output_norm"),
    "lfm2": ("lfm2", _lfm2, "token_embd_norm"),
    "latent": ("deepseek2", _latent, "output_norm"),
}


def write_gguf(path: Path, kind: str, type_name: str = "F16", sizes: Sizes | None = None) -> Path:
    """Write a model of the given kind and return `path`.

    Args:
        path: the file to write.
        kind: a key of `KINDS`.
        type_name: F16, or a type that llama.cpp's quantiser supports.
        sizes: the dimensions, or None for the defaults.
    """
    sizes = sizes or Sizes()
    if type_name != "F16":
        whole = path.with_suffix(".f16")
        if not whole.exists():
            write_gguf(whole, kind, sizes=sizes)
        quantise(whole, path, type_name)
        return path
    architecture, of_kind, norm = KINDS[kind]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(_TRAINED_TOKENS)
    writer.add_embedding_length(sizes.embedding)
    writer.add_feed_forward_length(0 if kind == "mamba" else sizes.feed_forward)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(sizes.vocab)
    _add_vocabulary(writer, sizes.vocab)
    ends = [(f"{norm}.weight", (sizes.embedding,)), ("token_embd.weight", (sizes.vocab, sizes.embedding))]
    if kind != "window":
        ends.append(("output.weight", (sizes.vocab, sizes.embedding)))
    shapes = [*ends, *of_kind(writer, sizes)]
    writer.add_block_count(1 + max(int(name.split(".")[1]) for name, _ in shapes if name.startswith("blk.")))
    random = np.random.default_rng(0)
    for name, shape in shapes:
        writer.add_tensor(name, _weights(random, name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    if name.endswith("ssm_a"):
        return -np.ones(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    weights = random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
    # llama.cpp supports convolution weights in float32 only.
    return weights if "conv" in name and "proj" not in name else weights.astype(np.float16)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, _CONTROL, _CONTROL, *[_BYTE] * 256]
    words = [f"▁word{i}" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + words)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types(types + [_NORMAL] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
