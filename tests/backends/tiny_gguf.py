"""Parts shared by the tests' tiny GGUF files: a vocabulary and random layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray

WORDS = ("▁", "▁the", "▁file", "▁list", "s", "▁of", "é", "🙂", "<|im_start|>", "<|im_end|>")
_CONTROL = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|im_start|>": 3, "<|im_end|>": 3} | dict.fromkeys(
    ("<start_of_image>", "<end_of_image>", "<|vision_start|>", "<|vision_end|>"), 3
)
_NORMAL, _BYTE = 1, 6

# Sizes of the embedding, an attention head and the feed-forward block.
SIZE, HEAD, FEED_FORWARD = 32, 16, 64
# Sizes of the inner state and the convolution kernel of a recurrent layer.
INNER, KERNEL = 64, 4
EXPERTS = 4

Tensors: TypeAlias = dict[str, NDArray[np.float32]]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def random_weights(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    weights: NDArray[np.float32] = (random.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
    return weights


def ones(size: int) -> NDArray[np.float32]:
    return np.ones(size, np.float32)


def open_writer(
    path: Path,
    architecture: str,
    *,
    layers: int,
    feed_forward: int | Sequence[int] = FEED_FORWARD,
    context: int = 512,
) -> gguf.GGUFWriter:
    """Return a writer with the metadata that all architectures share."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(context)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def add_vocabulary(writer: gguf.GGUFWriter, words: tuple[str, ...], template: str | None) -> int:
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


def finish(writer: gguf.GGUFWriter, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ends(random: np.random.Generator, vocab: int, norm: str = "output_norm") -> Tensors:
    """Return the embedding, final norm and output head, scaled so that logits differ by a few units."""
    return {
        "token_embd.weight": random_weights(random, vocab, SIZE) * 4,
        f"{norm}.weight": ones(SIZE),
        "output.weight": random_weights(random, vocab, SIZE) * 4,
    }


def attention(random: np.random.Generator, layer: int, heads_kv: int = 1) -> Tensors:
    """Return the attention tensors of a layer with two heads, without the norm."""
    return {
        f"blk.{layer}.attn_q.weight": random_weights(random, 2 * HEAD, SIZE),
        f"blk.{layer}.attn_k.weight": random_weights(random, heads_kv * HEAD, SIZE),
        f"blk.{layer}.attn_v.weight": random_weights(random, heads_kv * HEAD, SIZE),
        f"blk.{layer}.attn_output.weight": random_weights(random, SIZE, 2 * HEAD),
    }


def norms_and_feed_forward(random: np.random.Generator, layer: int, size: int = FEED_FORWARD) -> Tensors:
    """Return both norms and the gated feed-forward block of a layer."""
    return {
        f"blk.{layer}.attn_norm.weight": ones(SIZE),
        f"blk.{layer}.ffn_norm.weight": ones(SIZE),
        f"blk.{layer}.ffn_gate.weight": random_weights(random, size, SIZE),
        f"blk.{layer}.ffn_up.weight": random_weights(random, size, SIZE),
        f"blk.{layer}.ffn_down.weight": random_weights(random, SIZE, size),
    }
