"""Token ids that represent images in prompts. They are larger than any id in any vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import shake_256
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = Sequence[int] | NDArray[np.int32]

# Image tokens fill the upper half of the ids that fit in 32 bits. The lowest bit marks the first token of an
# image, so that adjacent images can be distinguished. The other bits are a hash of the image's content.
_FIRST_ID = 1 << 30
_HASH_BITS = 29


@dataclass(frozen=True, eq=False, slots=True)
class PreparedImage:
    """An image prepared for a prompt. `prefill` accepts its tokens only while this object exists.

    Attributes:
        tokens: The tokens that stand for the image in a prompt: runs of image tokens, and the control tokens
            around them.
        data: The backend's representation of the image.
    """

    tokens: tuple[int, ...]
    data: Any


class TokenRun(NamedTuple):
    """A range [start, end) of tokens that is either text or a single image."""

    start: int
    end: int
    is_image: bool


def image_token_ids(content: bytes, count: int) -> list[int]:
    """Return `count` token ids for an image, derived from its content.

    Prefixes with images can therefore be compared and cached like any others.
    """
    words = np.frombuffer(shake_256(content).digest(4 * count), "<u4") % (1 << _HASH_BITS)
    ids = _FIRST_ID + 2 * words.astype(np.int64)
    ids[0] += 1
    return [int(each) for each in ids]


def contains_image(tokens: Tokens) -> bool:
    """Return whether a sequence contains image tokens."""
    return len(tokens) > 0 and max(tokens) >= _FIRST_ID


def text_tokens(tokens: Tokens) -> list[int]:
    """Return the tokens that are not image tokens."""
    return [token for token in tokens if token < _FIRST_ID]


def whole_images(tokens: Tokens, length: int) -> int:
    """Return `length`, or the start of the image that a cut at `length` would split."""
    while 0 < length < len(tokens) and tokens[length] >= _FIRST_ID and not tokens[length] & 1:
        length -= 1
    return length


def cut_between_images(tokens: Tokens, start: int, count: int) -> int:
    """Return the end of a batch of about `count` tokens from `start`, without splitting an image."""
    end = whole_images(tokens, min(len(tokens), start + count))
    if end <= start:
        end = start + 1
        while whole_images(tokens, end) < end:
            end += 1
    return end


def end_of_images(tokens: Tokens) -> int:
    """Return the position after the last image, or 0 if there is none."""
    if not contains_image(tokens):
        return 0
    return next(end for end in range(len(tokens), 0, -1) if tokens[end - 1] >= _FIRST_ID)


def token_runs(tokens: Tokens) -> Iterator[TokenRun]:
    """Split a sequence into runs of text and single images. The sequence must not start inside an image."""
    if len(tokens) and not contains_image(tokens):
        yield TokenRun(0, len(tokens), False)
        return
    start = 0
    for at in range(1, len(tokens) + 1):
        is_image = tokens[start] >= _FIRST_ID
        if at == len(tokens) or (tokens[at] >= _FIRST_ID) != is_image or (is_image and tokens[at] & 1):
            yield TokenRun(start, at, is_image)
            start = at
