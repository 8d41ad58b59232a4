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
# Number of copies of a patch's pixels held while an image is encoded (measured with scaled-down models).
_PIXEL_COPIES = 4
# Bytes needed to decode a 12-megapixel photo: twice its size at three bytes per pixel.
_DECODING_BYTES = 2 * 3 * 12_000_000


class Projector(NamedTuple):
    """The properties of a projector that determine its memory use and compatibility.

    Attributes:
        hidden_size: The hidden size of the language models that the projector was made for.
        weight_bytes: The size of the projector's weights.
        compute_bytes: The size of the buffers for one image. If the projector accepts images of any size and
            does not reduce them, this is the size for an image of about a megapixel.
        mask_bytes: The size of the attention mask in main memory before it is copied to the buffers.
        max_tokens: Maximum number of tokens per image. Larger images must be reduced to fit the buffers. 0 if
            the projector reduces them itself.
        can_save: Whether reducing images makes the buffers much smaller.
    """

    hidden_size: int
    weight_bytes: int
    compute_bytes: int
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
    inner = max(_number(header, "feed_forward_length"), 3 * width)
    small = patches = (image // patch) ** 2
    if kind in _ANY_SIZE:
        small = patches = max(patches, _PLANNED_PATCHES)
    if kind in _LARGE:
        own_pixels = _number(header, "image_max_pixels") or _MAX_TOKENS * (_PATCHES_PER_SIDE * patch) ** 2
        patches = own_pixels // patch**2
    can_save = small < patches
    if small_images:
        patches = min(small, patches)
    # The buffers hold the values of one feed-forward block (measured with libmtmd's log) and, for windowed
    # attention, a mask in two data types.
    values = inner + 3 * width + _PIXEL_COPIES * 3 * patch**2
    compute_bytes = _F32_BYTES * patches * values
    mask_bytes = _F32_BYTES * patches**2 if _number(header, "n_wa_pattern") else 0
    if mask_bytes:
        compute_bytes += (_F32_BYTES + _F16_BYTES) * patches**2
    return Projector(
        _number(header, "projection_dim"),
        sum(size_bytes for _, size_bytes in sizes),
        compute_bytes,
        mask_bytes,
        patches // _PATCHES_PER_SIDE**2 if small_images and can_save else 0,
        can_save,
    )


def estimate_projector(path: Path, *, on_gpu: bool, small_images: bool = False) -> MemoryEstimate:
    """Estimate a projector's memory use. Raises ModelFileError if the file cannot be used."""
    projector = read_projector(path, small_images=small_images)
    pool = GPU if on_gpu else MEMORY
    # Most of the buffers are still unused while the mask is being copied, so they take up no main memory.
    masks_bytes = projector.mask_bytes if on_gpu else 2 * projector.mask_bytes - projector.compute_bytes
    parts = (
        MemoryPart("weights", projector.weight_bytes, pool),
        MemoryPart("compute", projector.compute_bytes, pool),
        MemoryPart("compute", max(_DECODING_BYTES, masks_bytes), MEMORY),
    )
    return MemoryEstimate(0, "", parts)


def _number(header: GgufHeader, key: str) -> int:
    value = header.metadata.get(f"clip.vision.{key}")
    return value if isinstance(value, int) and value > 0 else 0
