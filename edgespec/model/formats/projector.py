"""Read the metadata of projectors (mmproj files), which convert images to a language model's embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from edgespec.errors import ModelFileError
from edgespec.model.formats.gguf_header import GgufHeader, read_header
from edgespec.model.formats.gguf_metadata import tensor_bytes
from edgespec.model.memory_estimate import GPU, MEMORY, MemoryEstimate, MemoryPart

# Projectors whose image tokens depend on the text before the image in the prompt.
_POSITION_DEPENDENT = ("deepseek4v", "hunyuanvl")
_MAX_IMAGE_SIZE = 1 << 13
_F16_BYTES, _F32_BYTES = 2, 4
# Projectors for which llama.cpp reduces images to at most `_MAX_TOKENS` tokens, each of which covers
# `_PATCHES_PER_SIDE` patches in each direction.
_LARGE = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "glm4v")
_MAX_TOKENS, _PATCHES_PER_SIDE = 4096, 2
# Projectors that accept images of any size. For those not in `_LARGE`, buffers are planned for
# `_PLANNED_PATCHES` patches, as in an image of about a megapixel.
_ANY_SIZE = (*_LARGE, "pixtral", "lfm2", "kimivl")
_PLANNED_PATCHES = 4096
# The tensor, and its dimension, whose size is the hidden size of the language model. The headers of old files
# of these types contain another number instead.
_LAST_TENSORS = {
    **dict.fromkeys(("mlp", *_LARGE[:2]), ("mm.2.weight", 1)),
    "mlp_norm": ("mm.3.bias", 0),
    "ldp": ("mm.model.mb_block.1.block.2.1.bias", 0),
    "ldpv2": ("mm.model.peg.0.bias", 0),
}
# Copies of the preprocessed pixels in main memory: libmtmd's own and the one in an `ImagePart`.
_PIXEL_COPIES = 2
# Bytes needed to decode a 12-megapixel photo: twice its size at three bytes per pixel.
_DECODING_BYTES = 2 * 3 * 12_000_000


class Projector(NamedTuple):
    """The properties of a projector that determine its memory use and compatibility.

    Attributes:
        kind: The type of the projector, such as `gemma3`. Empty if the file does not say it.
        hidden_size: The hidden size of the language models that the projector was made for. 0 if unknown.
        weight_bytes: The size of the projector's weights.
        compute_bytes: The size of the buffers for one image. If the projector accepts images of any size and
            does not reduce them, this is the size for an image of about a megapixel.
        pixel_bytes: The size of the copies of an image's preprocessed pixels in main memory.
        mask_bytes: The size of the attention mask in main memory before it is copied to the buffers.
        max_tokens: Maximum number of tokens per image. Larger images must be reduced to fit the buffers. 0 if
            the projector reduces them itself.
        can_save: Whether reducing images makes the buffers much smaller.
    """

    kind: str
    hidden_size: int
    weight_bytes: int
    compute_bytes: int
    pixel_bytes: int
    mask_bytes: int
    max_tokens: int
    can_save: bool


def read_projector(path: Path, *, small_images: bool = False) -> Projector:
    """Read a projector's metadata.

    Args:
        path: The mmproj file.
        small_images: Whether images will be reduced to about a megapixel.

    Raises:
        ModelFileError: The file is not an image projector, is damaged, or is of an unsupported kind.
    """
    header = read_header(path)
    if header.architecture != "clip" or not header.metadata.get("clip.has_vision_encoder"):
        raise ModelFileError(
            f"{path} is not an image projector",
            "choose the mmproj file that was published with the model",
            code="model_file_not_supported",
        )
    kind = header.metadata.get("clip.projector_type") or header.metadata.get("clip.vision.projector_type")
    if kind in _POSITION_DEPENDENT:
        raise ModelFileError(
            f"{path} is an image projector of type {kind}, which edgespec does not support",
            "choose another model, or --mmproj none",
            code="model_file_not_supported",
        )
    image, patch, width = (_number(header, key) for key in ("image_size", "patch_size", "embedding_length"))
    heads, layers = _number(header, "attention.head_count"), _number(header, "block_count")
    if not (patch and width and heads and layers and patch <= image <= _MAX_IMAGE_SIZE and not width % heads):
        raise ModelFileError(f"{path} has invalid sizes in its header", "download it again")
    sizes = tensor_bytes(path, header)
    small = patches = (image // patch) ** 2
    if kind in _ANY_SIZE:
        small = patches = max(patches, _PLANNED_PATCHES)
    if kind in _LARGE:
        own_pixels = _number(header, "image_max_pixels") or _MAX_TOKENS * (_PATCHES_PER_SIDE * patch) ** 2
        patches = own_pixels // patch**2
    can_save = small < patches
    if small_images:
        patches = min(small, patches)
    values_per_patch = 3 * patch**2
    return Projector(
        kind if isinstance(kind, str) else "",
        _hidden_size(header, kind),
        sum(size_bytes for _, size_bytes in sizes),
        _compute_bytes(header, patches, values_per_patch),
        _PIXEL_COPIES * _F32_BYTES * patches * values_per_patch,
        _F32_BYTES * patches**2 if _number(header, "n_wa_pattern") else 0,
        patches // _PATCHES_PER_SIDE**2 if small_images and can_save else 0,
        can_save,
    )


def _hidden_size(header: GgufHeader, kind: object) -> int:
    name, dimension = _LAST_TENSORS.get(str(kind), ("", 0))
    shapes = (tensor.shape for tensor in header.tensors if tensor.name == name)
    shape = next(shapes, ())
    return shape[dimension] if dimension < len(shape) else _number(header, "projection_dim")


def _compute_bytes(header: GgufHeader, patches: int, values_per_patch: int) -> int:
    """Return the size of the buffers for intermediate results.

    The formulas reproduce the sizes in libmtmd's log. Most are exact, and the others within 10 %.
    """
    names = {tensor.name for tensor in header.tensors}
    width = _number(header, "embedding_length")
    inner = _number(header, "feed_forward_length") or 4 * width
    # A gated feed-forward block holds the gate, its input and their product at the same time.
    blocks = 3 if "v.blk.0.ffn_gate.weight" in names else 1
    if _number(header, "n_wa_pattern"):
        # Windowed attention needs a mask in F32, of which F16 copies are made. Later, its buffer is reused
        # for as many results of the feed-forward block as fit into it.
        masks_bytes = (_F32_BYTES + _F16_BYTES) * patches**2
        values = 4 * width + values_per_patch + inner * max(0, blocks - patches // inner)
    else:
        masks_bytes = 0
        values = 3 * width + max(blocks * inner, 2 * width) + values_per_patch
        # The class token makes later results larger than those of the patches, so their buffers cannot be
        # reused.
        values += width if "v.class_embd" in names else 0
    # A matrix product converts its input to the type of its weights, of at most 16 bits.
    return masks_bytes + patches * (_F32_BYTES * values + _F16_BYTES * inner)


def estimate_projector(path: Path, *, on_gpu: bool, small_images: bool = False) -> MemoryEstimate:
    """Estimate a projector's memory use. Raises ModelFileError if the file cannot be used."""
    projector = read_projector(path, small_images=small_images)
    pool = GPU if on_gpu else MEMORY
    # An image is decoded before its mask is created. The buffers remain allocated between images.
    temporary_bytes = max(_DECODING_BYTES, projector.mask_bytes)
    parts = (
        MemoryPart("weights", projector.weight_bytes, pool),
        MemoryPart("compute", projector.compute_bytes, pool),
        MemoryPart("compute", projector.pixel_bytes + temporary_bytes, MEMORY),
    )
    return MemoryEstimate(0, "", parts)


def _number(header: GgufHeader, key: str) -> int:
    value = header.metadata.get(f"clip.vision.{key}")
    return value if isinstance(value, int) and value > 0 else 0
