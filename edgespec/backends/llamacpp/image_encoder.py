"""Encode images with a model's projector (its mmproj file), through llama.cpp's libmtmd."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.loading import check_file, default_threads
from edgespec.backends.llamacpp.native import library, mtmd, recent_errors, use_threads
from edgespec.errors import AttachmentError, BackendError, ModelFileError
from edgespec.model.base import LoadOptions, Progress
from edgespec.model.base_model import scaled_progress
from edgespec.model.formats.projector import read_projector
from edgespec.model.image import Image
from edgespec.model.image_tokens import PreparedImage, image_token_ids, token_runs
from edgespec.system.files import file_state

__all__ = ["NO_PROJECTOR", "ImageEncoder", "ImagePart", "knows_projector", "open_encoder"]

# Explains why a GGUF model without an mmproj file cannot see images, and what to do about it.
NO_PROJECTOR = (
    "it was loaded without an mmproj file, so it can read only text",
    (
        "choose a model that supports images; if this one does, name its mmproj file with --mmproj, or put it"
        " into the model's folder and load the model again"
    ),
)

_MARKER = b"<__media__>"
_TEXT, _IMAGE = 0, 1
# Formats that libmtmd decodes itself. Its decoder produces the same pixels as in llama.cpp's own programs.
_DECODED_BY_LIBMTMD = ("PNG", "JPEG", "GIF")
# Number of position components of each token with multimodal rotary positions (M-RoPE).
_MROPE_COMPONENTS = 4
# Types of projectors that every version of libmtmd supports.
_COMMON_TYPES = ("mlp", "gemma3", "qwen2.5vl_merger")


@dataclass(eq=False)
class ImagePart:
    """An image, or part of one, that the model processes in one call.

    Attributes:
        tokens: The image tokens that represent the part.
        index: Index of the part within its image.
        image: The image.
        positions: The position of each token relative to the first, as int32 [components, tokens].
        position_count: Number of positions that the part takes up before the next token.
        is_causal: Whether tokens attend only to earlier tokens, rather than to the whole part.
        chunk: The preprocessed pixels. Freed once they are encoded.
    """

    tokens: tuple[int, ...]
    index: int
    image: Image
    positions: NDArray[np.int32]
    position_count: int
    is_causal: bool
    chunk: _Chunk | None = field(default=None, repr=False)

    def positions_from(self, first: int) -> NDArray[np.int32]:
        """Return the positions of the tokens if the part starts at position `first`."""
        positions = self.positions + np.int32(first)
        # With M-RoPE, leave the last component unshifted, because it is unused.
        positions[_MROPE_COMPONENTS - 1 :] = self.positions[_MROPE_COMPONENTS - 1 :]
        return positions


class _Chunk:
    """A copy of one of libmtmd's chunks, which is freed with this object."""

    def __init__(self, chunk: Any) -> None:
        lib = mtmd()
        self.native = lib.mtmd_input_chunk_copy(chunk)
        weakref.finalize(self, lib.mtmd_input_chunk_free, self.native)


def knows_projector(kind: str) -> bool:
    """Return whether the installed libmtmd can load projectors of the given type, such as `gemma3`.

    libmtmd cannot list its types, so this searches for their names in the library's file. The result is True
    if the search is not reliable, because the file is missing or lacks the names of common types too.
    """
    package = find_spec("llama_cpp")
    for folder in (package and package.submodule_search_locations) or ():
        for file in Path(folder, "lib").glob("*mtmd.*"):
            data = file.read_bytes()
            *common, is_known = (f"{name}\0".encode() in data for name in (*_COMMON_TYPES, kind))
            return is_known or not all(common)
    return True


def open_encoder(model: Any, options: LoadOptions) -> ImageEncoder | None:
    """Load a model's projector, or return None if it has none. See `ImageEncoder` for the errors."""
    if not options.projector:
        return None
    threads = options.threads or default_threads(check_file(options.projector))
    if threads > 1:
        use_threads()
    # An image can be run in one pass only if it fits into a single batch.
    return ImageEncoder(
        *(options.projector, model, threads, options.batch_tokens),
        gpu=options.gpu_layers != 0,
        small_images=options.small_images,
    )


class ImageEncoder:
    """The projector of a loaded model. All methods can be called from any thread.

    Args:
        path: The mmproj file.
        model: The llama_model handle of the language model.
        threads: Number of CPU threads.
        max_tokens: Maximum number of tokens in a part that must be run in one pass.
        gpu: Whether the projector runs on the GPU, if there is one.
        small_images: Whether to downscale images to at most about a megapixel.

    Attributes:
        has_wide_positions: Whether images take up fewer positions than tokens (M-RoPE).

    Raises:
        ModelFileError: The file is not a projector, is damaged, or belongs to another model.
    """

    def __init__(
        self,
        path: str,
        model: Any,
        threads: int,
        max_tokens: int,
        *,
        gpu: bool,
        small_images: bool = False,
    ) -> None:
        self._mtmd = lib = mtmd()
        self._max_tokens = max_tokens
        projector = read_projector(Path(path), small_images=small_images)
        self._row_size: int = library().llama_model_n_embd_inp(model)
        # Include the projector's file and its size limit, because both affect image embeddings.
        self._identity = f"{file_state(Path(path))} {projector.max_tokens}".encode()
        params = lib.mtmd_context_params_default()
        params.use_gpu, params.n_threads = gpu, threads
        params.print_timings = params.warmup = False
        params.media_marker = _MARKER
        if projector.max_tokens:
            params.image_max_tokens = projector.max_tokens
        recent_errors(clear=True)
        self._context = lib.mtmd_init_from_file(path.encode(), model, params)
        if not self._context:
            detail = (recent_errors() or ["llama.cpp reported no reason"])[-1]
            raise ModelFileError(
                f"the projector {path} cannot be loaded: {detail}",
                "use the mmproj file that was published with this model, or --mmproj none",
                code="model_file_not_supported",
            )
        self._lock = threading.Lock()
        self.has_wide_positions: bool = lib.mtmd_decode_use_mrope(self._context)
        # Image parts that prompts still use, keyed by their tokens.
        self._parts: weakref.WeakValueDictionary[tuple[int, ...], ImagePart] = weakref.WeakValueDictionary()

    def prepare(self, image: Image) -> PreparedImage:
        """Preprocess an image, and return its tokens. Raises AttachmentError if the model cannot use it."""
        tokens: list[int] = []
        parts: list[ImagePart] = []
        for chunk in self._chunks(image):
            kind = self._mtmd.mtmd_input_chunk_get_type(chunk.native)
            if kind == _TEXT:
                count = ctypes.c_size_t()
                text = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk.native, ctypes.byref(count))
                tokens += text[: count.value]
            else:
                parts.append(self._part(image, len(parts), chunk))
                tokens += parts[-1].tokens
        for number, part in enumerate(parts):
            # Reuse existing parts, because another prompt may be using the same image.
            parts[number] = self._parts.setdefault(part.tokens, part)
        return PreparedImage(tuple(tokens), tuple(parts))

    def _part(self, image: Image, index: int, chunk: _Chunk) -> ImagePart:
        lib, native = self._mtmd, chunk.native
        count = lib.mtmd_input_chunk_get_n_tokens(native)
        shape = lib.mtmd_input_chunk_get_tokens_image(native)
        offsets = [lib.mtmd_image_tokens_get_decoder_pos(shape, 0, at) for at in range(count)]
        # The components are in the same order as in llama.cpp's `set_position_mrope_2d`.
        positions = np.array([[each.t, each.y, each.x, each.z] for each in offsets], np.int32).T
        is_causal = not lib.mtmd_decode_use_non_causal(self._context, native)
        if not is_causal and count > self._max_tokens:
            raise AttachmentError(
                f"{image.name} takes {count:,} tokens, but the model accepts images of at most"
                f" {self._max_tokens:,} tokens",
                "use a smaller image",
                code="attachment_too_large",
            )
        content = b"\0".join([self._identity, image.digest, str(index).encode()])
        return ImagePart(
            tuple(image_token_ids(content, count)),
            index,
            image,
            np.ascontiguousarray(positions[: _MROPE_COMPONENTS if self.has_wide_positions else 1]),
            lib.mtmd_input_chunk_get_n_pos(native),
            is_causal,
            chunk,
        )

    def _chunks(self, image: Image) -> list[_Chunk]:
        """Divide an image into the chunks of text and pixels that represent it in a prompt."""
        lib = self._mtmd
        bitmap, chunks = self._bitmap(image), lib.mtmd_input_chunks_init()
        try:
            text = lib.mtmd_input_text(_MARKER, len(_MARKER), False, True)
            recent_errors(clear=True)
            status = lib.mtmd_tokenize(
                self._context, chunks, ctypes.byref(text), (ctypes.c_void_p * 1)(bitmap), 1
            )
            if status:
                detail = (recent_errors() or [f"llama.cpp returned {status}"])[-1]
                raise AttachmentError(
                    f"cannot use {image.name} ({image.width} x {image.height} pixels): {detail}",
                    "choose another image",
                )
            count = lib.mtmd_input_chunks_size(chunks)
            return [_Chunk(lib.mtmd_input_chunks_get(chunks, index)) for index in range(count)]
        finally:
            lib.mtmd_bitmap_free(bitmap)
            lib.mtmd_input_chunks_free(chunks)

    def _bitmap(self, image: Image) -> Any:
        lib = self._mtmd
        if image.format in _DECODED_BY_LIBMTMD:
            data = (ctypes.c_uint8 * len(image.data)).from_buffer_copy(image.data)
            bitmap = lib.mtmd_helper_bitmap_init_from_buf(self._context, data, len(image.data), False)
            if bitmap and image.orientation == 1:
                return bitmap
            if bitmap:
                shape = lib.mtmd_bitmap_get_ny(bitmap), lib.mtmd_bitmap_get_nx(bitmap), 3
                stored = np.ctypeslib.as_array(lib.mtmd_bitmap_get_data(bitmap), (int(np.prod(shape)),))
                pixels = image.upright(stored.reshape(shape))
                lib.mtmd_bitmap_free(bitmap)
                return self._bitmap_of(pixels)
        return self._bitmap_of(image.pixels())

    def _bitmap_of(self, pixels: NDArray[np.uint8]) -> Any:
        height, width, _ = pixels.shape
        pointer = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return self._mtmd.mtmd_bitmap_init(width, height, pointer)

    def runs(
        self, tokens: Sequence[int], progress: Progress | None
    ) -> Iterator[tuple[ImagePart | Sequence[int], Progress | None]]:
        """Split a prompt into text and image parts, each with a progress callback."""
        for start, end, is_image in token_runs(tokens):
            begin, share = start / len(tokens), (end - start) / len(tokens)
            run = tokens[start:end]
            yield (
                self._part_of(run) if is_image else run,
                progress and scaled_progress(progress, begin, share),
            )

    def _part_of(self, tokens: Sequence[int]) -> ImagePart:
        """Return the image part that these tokens represent.

        Raises:
            BackendError: No prompt uses the image any more.
        """
        part = self._parts.get(tuple(tokens))
        if part is None:
            raise BackendError("an image in the prompt is no longer in memory", "send the message again")
        return part

    def encode(self, part: ImagePart) -> NDArray[np.float32]:
        """Return the image embeddings that replace token embeddings, float32 [tokens, size].

        Raises:
            BackendError: libmtmd failed.
        """
        chunk, part.chunk = part.chunk, None
        if chunk is None:
            # Preprocess the image again. Its pixels were freed after they were first encoded, because most
            # images are encoded only once.
            chunk = [
                each
                for each in self._chunks(part.image)
                if self._mtmd.mtmd_input_chunk_get_type(each.native) == _IMAGE
            ][part.index]
        with self._lock:
            recent_errors(clear=True)
            if self._mtmd.mtmd_encode_chunk(self._context, chunk.native):
                detail = (recent_errors() or ["llama.cpp reported no reason"])[-1]
                raise BackendError(
                    f"{part.image.name} cannot be encoded: {detail}",
                    "close other programs, or choose a smaller image",
                )
            rows = self._mtmd.mtmd_get_output_embd(self._context)
            count = len(part.tokens)
            return np.ctypeslib.as_array(rows, (count * self._row_size,)).reshape(count, -1).copy()

    def close(self) -> None:
        """Free the projector."""
        self._mtmd.mtmd_free(self._context)
