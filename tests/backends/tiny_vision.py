"""Vision models with random weights, usually tiny: a language model and its projector (mmproj file)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gguf
import numpy as np
import PIL.Image

from tests.backends.tiny_gguf import SIZE, WORDS, Tensors, finish, ones, random_weights
from tests.backends.tiny_models import write_gemma3, write_llama, write_qwen2vl

__all__ = [
    "KINDS",
    "EncoderSizes",
    "VisionKind",
    "VisionModel",
    "jpeg_bytes",
    "picture",
    "png_bytes",
    "write_projector",
    "write_vision_model",
]

VisionKind = Literal["llava", "gemma3", "qwen2.5vl"]
KINDS: tuple[VisionKind, ...] = ("llava", "gemma3", "qwen2.5vl")

# Size of a patch in pixels.
_PATCH = 14
# Number of patches per side of an image. Qwen2.5-VL accepts other sizes too.
_SIDES: dict[VisionKind, int] = {"llava": 3, "gemma3": 4, "qwen2.5vl": 8}
_MARKERS: dict[VisionKind, tuple[str, ...]] = {
    "llava": (),
    "gemma3": ("<start_of_image>", "<end_of_image>"),
    "qwen2.5vl": ("<|vision_start|>", "<|vision_end|>"),
}


class VisionModel(NamedTuple):
    """The files of a language model and of its projector."""

    model: Path
    projector: Path


class EncoderSizes(NamedTuple):
    """The sizes of a projector. The defaults are tiny.

    Attributes:
        width: Embedding size of the image encoder.
        inner: Size of its feed-forward blocks.
        layers: Number of its layers.
        side: Number of patches per side of an image. 0 for the default of the projector's kind.
        merge: Number of patches per side that Gemma 3's projector averages into a token.
        output: Hidden size of the language model.
        is_half: Whether the matrices of the layers are stored in F16 instead of F32.
    """

    width: int = 32
    inner: int = 48
    layers: int = 2
    side: int = 0
    merge: int = 2
    output: int = SIZE
    is_half: bool = False


def write_vision_model(
    folder: Path, kind: VisionKind, *, seed: int = 0, layers: int = 2, context: int = 1024
) -> VisionModel:
    """Write a model and its projector: CLIP with an MLP, Gemma 3, or Qwen2.5-VL."""
    folder.mkdir(parents=True, exist_ok=True)
    model, projector = folder / "tiny.gguf", folder / "mmproj-tiny.gguf"
    words = (*WORDS, *_MARKERS[kind])
    if kind == "gemma3":
        write_gemma3(model, seed=seed, words=words)
    elif kind == "llava":
        write_llama(model, seed=seed, words=words, layers=layers, context=context)
    else:
        write_qwen2vl(model, seed=seed, words=words, layers=layers, context=context)
    write_projector(projector, kind, seed=seed + 100)
    return VisionModel(model, projector)


def write_projector(
    path: Path, kind: VisionKind, sizes: EncoderSizes | None = None, *, seed: int = 0
) -> None:
    """Write only a projector."""
    sizes = sizes or EncoderSizes()
    sizes = sizes._replace(side=sizes.side or _SIDES[kind])
    _WRITERS[kind](path, np.random.default_rng(seed), sizes)


def _open(path: Path, kind: str, sizes: EncoderSizes, activation: str = "") -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("general.type", "mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    if activation:
        writer.add_bool(f"clip.use_{activation}", True)
    for key, value in {
        "image_size": sizes.side * _PATCH,
        "patch_size": _PATCH,
        "embedding_length": sizes.width,
        "feed_forward_length": sizes.inner,
        "block_count": sizes.layers,
        "projection_dim": sizes.output,
        "attention.head_count": max(2, sizes.width // 64),
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for key, numbers in {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}.items():
        writer.add_array(f"clip.vision.{key}", numbers)
    return writer


def _linear(random: np.random.Generator, name: str, rows: int, columns: int) -> Tensors:
    bias = (0.1 * random.normal(size=rows)).astype(np.float32)
    return {f"{name}.weight": random_weights(random, rows, columns), f"{name}.bias": bias}


def _norm(name: str, size: int, *, bias: bool = True) -> Tensors:
    return {f"{name}.weight": ones(size)} | ({f"{name}.bias": 0 * ones(size)} if bias else {})


def _patches(random: np.random.Generator, sizes: EncoderSizes) -> Any:
    return random_weights(random, sizes.width, 3, _PATCH, _PATCH)


def _layers(random: np.random.Generator, sizes: EncoderSizes, *, gated: bool = False) -> Tensors:
    width, inner = sizes.width, sizes.inner
    tensors: Tensors = {}
    for layer in range(sizes.layers):
        name = f"v.blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            tensors |= _linear(random, f"{name}.{part}", width, width)
        tensors |= _norm(f"{name}.ln1", width, bias=not gated) | _norm(f"{name}.ln2", width, bias=not gated)
        tensors |= _linear(random, f"{name}.ffn_up", inner, width)
        tensors |= _linear(random, f"{name}.ffn_down", width, inner)
        if gated:
            tensors |= _linear(random, f"{name}.ffn_gate", inner, width)
    return _in_half_precision(tensors) if sizes.is_half else tensors


def _in_half_precision(tensors: Tensors) -> Any:
    """Convert the matrices, but not the vectors, to F16."""
    return {
        name: tensor.astype(np.float16) if tensor.ndim > 1 else tensor for name, tensor in tensors.items()
    }


def _write_llava(path: Path, random: np.random.Generator, sizes: EncoderSizes) -> None:
    """Write CLIP with a class token and a two-layer MLP: a token and a position per patch (9 by default)."""
    width, output = sizes.width, sizes.output
    tensors = {
        "v.patch_embd.weight": _patches(random, sizes),
        "v.class_embd": random_weights(random, width),
        "v.position_embd.weight": random_weights(random, sizes.side**2 + 1, width),
    }
    tensors |= _norm("v.pre_ln", width) | _norm("v.post_ln", width) | _layers(random, sizes)
    tensors |= _linear(random, "mm.0", output, width) | _linear(random, "mm.2", output, output)
    finish(_open(path, "mlp", sizes), tensors)


def _write_gemma3(path: Path, random: np.random.Generator, sizes: EncoderSizes) -> None:
    """Write SigLIP with Gemma 3's pooling (4 tokens per image by default), which attend to each other."""
    width = sizes.width
    writer = _open(path, "gemma3", sizes, "gelu")
    writer.add_uint32("clip.vision.projector.scale_factor", sizes.merge)
    tensors = {
        "v.patch_embd.weight": _patches(random, sizes),
        "v.patch_embd.bias": 0 * ones(width),
        "v.position_embd.weight": random_weights(random, sizes.side**2, width),
        "mm.input_projection.weight": random_weights(random, width, sizes.output) * 4,
        "mm.soft_emb_norm.weight": ones(width),
    }
    finish(writer, tensors | _norm("v.post_ln", width) | _layers(random, sizes))


def _write_qwen(path: Path, random: np.random.Generator, sizes: EncoderSizes) -> None:
    """Write Qwen2.5-VL's encoder: images of any size, with a row and a column for each token."""
    writer = _open(path, "qwen2.5vl_merger", sizes, "silu")
    writer.add_uint32("clip.vision.n_wa_pattern", 2)
    tensors = {
        "v.patch_embd.weight": _patches(random, sizes),
        "v.patch_embd.weight.1": _patches(random, sizes),
    }
    tensors |= _norm("v.post_ln", sizes.width, bias=False) | _layers(random, sizes, gated=True)
    merged = 4 * sizes.width
    tensors |= _linear(random, "mm.0", merged, merged) | _linear(random, "mm.2", sizes.output, merged)
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
