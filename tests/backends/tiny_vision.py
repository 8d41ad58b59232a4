"""Tiny vision models with random weights: a language model and its projector (mmproj file)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gguf
import numpy as np
import PIL.Image

from tests.backends.tiny_gguf import SIZE, WORDS, Tensors, finish, ones, random_weights
from tests.backends.tiny_models import write_gemma3, write_llama, write_qwen2vl

__all__ = ["KINDS", "VisionKind", "VisionModel", "jpeg_bytes", "picture", "png_bytes", "write_vision_model"]

VisionKind = Literal["llava", "gemma3", "qwen2.5vl"]
KINDS: tuple[VisionKind, ...] = ("llava", "gemma3", "qwen2.5vl")

# Sizes of the image encoder: its embedding, its feed-forward block and a patch in pixels, and its layer
# count.
_WIDTH, _INNER, _PATCH, _LAYERS = 32, 48, 14, 2
_MARKERS: dict[VisionKind, tuple[str, ...]] = {
    "llava": (),
    "gemma3": ("<start_of_image>", "<end_of_image>"),
    "qwen2.5vl": ("<|vision_start|>", "<|vision_end|>"),
}


class VisionModel(NamedTuple):
    """The files of a language model and of its projector."""

    model: Path
    projector: Path


def write_vision_model(folder: Path, kind: VisionKind, *, seed: int = 0, layers: int = 2) -> VisionModel:
    """Write a model and its projector: CLIP with an MLP, Gemma 3, or Qwen2.5-VL."""
    folder.mkdir(parents=True, exist_ok=True)
    model, projector = folder / "tiny.gguf", folder / "mmproj-tiny.gguf"
    words = (*WORDS, *_MARKERS[kind])
    if kind == "gemma3":
        write_gemma3(model, seed=seed, words=words)
    elif kind == "llava":
        write_llama(model, seed=seed, words=words, layers=layers, context=1024)
    else:
        write_qwen2vl(model, seed=seed, words=words, layers=layers)
    _WRITERS[kind](projector, np.random.default_rng(seed + 100))
    return VisionModel(model, projector)


def _open(path: Path, kind: str, image_size: int, activation: str = "") -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("general.type", "mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    if activation:
        writer.add_bool(f"clip.use_{activation}", True)
    for key, value in {
        "image_size": image_size,
        "patch_size": _PATCH,
        "embedding_length": _WIDTH,
        "feed_forward_length": _INNER,
        "block_count": _LAYERS,
        "projection_dim": SIZE,
        "attention.head_count": 2,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for key, numbers in {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}.items():
        writer.add_array(f"clip.vision.{key}", numbers)
    return writer


def _linear(random: np.random.Generator, name: str, rows: int, columns: int) -> Tensors:
    bias = (0.1 * random.normal(size=rows)).astype(np.float32)
    return {f"{name}.weight": random_weights(random, rows, columns), f"{name}.bias": bias}


def _norm(name: str, *, bias: bool = True) -> Tensors:
    return {f"{name}.weight": ones(_WIDTH)} | ({f"{name}.bias": 0 * ones(_WIDTH)} if bias else {})


def _patches(random: np.random.Generator) -> Any:
    return random_weights(random, _WIDTH, 3, _PATCH, _PATCH)


def _layers(random: np.random.Generator, *, gated: bool = False) -> Tensors:
    tensors: Tensors = {}
    for layer in range(_LAYERS):
        name = f"v.blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            tensors |= _linear(random, f"{name}.{part}", _WIDTH, _WIDTH)
        tensors |= _norm(f"{name}.ln1", bias=not gated) | _norm(f"{name}.ln2", bias=not gated)
        tensors |= _linear(random, f"{name}.ffn_up", _INNER, _WIDTH)
        tensors |= _linear(random, f"{name}.ffn_down", _WIDTH, _INNER)
        if gated:
            tensors |= _linear(random, f"{name}.ffn_gate", _INNER, _WIDTH)
    return tensors


def _write_llava(path: Path, random: np.random.Generator) -> None:
    """Write CLIP with a class token and a two-layer MLP: 9 tokens per image, with one position each."""
    side = 3
    tensors = {
        "v.patch_embd.weight": _patches(random),
        "v.class_embd": random_weights(random, _WIDTH),
        "v.position_embd.weight": random_weights(random, side * side + 1, _WIDTH),
    }
    tensors |= _norm("v.pre_ln") | _norm("v.post_ln") | _layers(random)
    tensors |= _linear(random, "mm.0", SIZE, _WIDTH) | _linear(random, "mm.2", SIZE, SIZE)
    finish(_open(path, "mlp", side * _PATCH), tensors)


def _write_gemma3(path: Path, random: np.random.Generator) -> None:
    """Write SigLIP with Gemma 3's pooling: 4 tokens per image, which attend to each other."""
    side = 4
    writer = _open(path, "gemma3", side * _PATCH, "gelu")
    writer.add_uint32("clip.vision.projector.scale_factor", 2)
    tensors = {
        "v.patch_embd.weight": _patches(random),
        "v.patch_embd.bias": 0 * ones(_WIDTH),
        "v.position_embd.weight": random_weights(random, side * side, _WIDTH),
        "mm.input_projection.weight": random_weights(random, _WIDTH, SIZE) * 4,
        "mm.soft_emb_norm.weight": ones(_WIDTH),
    }
    finish(writer, tensors | _norm("v.post_ln") | _layers(random))


def _write_qwen(path: Path, random: np.random.Generator) -> None:
    """Write Qwen2.5-VL's encoder: images of any size, with a row and a column for each token."""
    writer = _open(path, "qwen2.5vl_merger", 8 * _PATCH, "silu")
    writer.add_uint32("clip.vision.n_wa_pattern", 2)
    tensors = {
        "v.patch_embd.weight": _patches(random),
        "v.patch_embd.weight.1": _patches(random),
    }
    tensors |= _norm("v.post_ln", bias=False) | _layers(random, gated=True)
    tensors |= _linear(random, "mm.0", 4 * _WIDTH, 4 * _WIDTH) | _linear(random, "mm.2", SIZE, 4 * _WIDTH)
    finish(writer, tensors)


_WRITERS = {"llava": _write_llava, "gemma3": _write_gemma3, "qwen2.5vl": _write_qwen}


def picture(width: int = 60, height: int = 40, *, seed: int = 0, mode: str = "RGB") -> PIL.Image.Image:
    """Return a picture of random coloured rectangles."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 4), np.uint8)
    for _ in range(8):
        rows, columns = np.sort(random.integers(0, height + 1, 2)), np.sort(random.integers(0, width + 1, 2))
        pixels[rows[0] : rows[1], columns[0] : columns[1]] = random.integers(0, 256, 4)
    return PIL.Image.fromarray(pixels, "RGBA").convert(mode)


def png_bytes(image: PIL.Image.Image, **options: Any) -> bytes:
    return _saved(image, "PNG", **options)


def jpeg_bytes(image: PIL.Image.Image, **options: Any) -> bytes:
    return _saved(image, "JPEG", **options)


def _saved(image: PIL.Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()
