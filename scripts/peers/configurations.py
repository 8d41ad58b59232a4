"""Names of the compared configurations, and the flags of llama-server for each of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from edgespec.errors import OptionError

# Default configurations of llama-server: plain decoding, a draft model with several draft lengths (the
# default is 3), each n-gram method, and n-grams combined with a draft model. Most n-gram methods also run
# with short n-grams, because short replies contain no long repetitions.
GRID = (
    "none,draft:1,draft:2,draft:3,draft:4,draft:6,draft:8,draft:12,draft:16,"
    "ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache,"
    "ngram-simple:3:8,ngram-map-k:3:8,ngram-map-k4v:3:8,ngram-mod:4:8,ngram-simple:3:8+draft:4"
)

# Methods that need a separate model, and llama-server's names for them.
_MODELS = {"draft": "draft-simple", "mtp": "draft-mtp", "eagle": "draft-eagle3", "dflash": "draft-dflash"}
_MAPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
_HINT = (
    "give none, draft:LENGTH, mtp:LENGTH, eagle:LENGTH, dflash:LENGTH, ngram-cache, or one of ngram-simple,"
    " ngram-map-k, ngram-map-k4v and ngram-mod with or without :LOOKUP:LENGTH"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Configuration:
    """One program in one configuration, such as `llama-server draft:4` or `edgespec model:4`."""

    program: str
    name: str

    def __str__(self) -> str:
        return f"{self.program} {self.name}"


def parse(method: str) -> tuple[str, int | None]:
    """Split a name such as `model:4` into the method and its draft length, which is None if missing.

    Raises:
        OptionError: The name is not METHOD or METHOD:LENGTH.
    """
    name, colon, length = method.partition(":")
    if not name or (colon and not re.fullmatch(r"[1-9]\d*", length)):
        raise OptionError(
            f"{method!r} is not a method with a draft length", "give METHOD or METHOD:LENGTH, such as model:4"
        )
    return name, int(length) if colon else None


def rotated_order(items: Sequence[T], index: int) -> list[T]:
    """Return the items in an order that depends on `index`, so that each is first and last equally often.

    The order rotates with the index, and is reversed for odd indexes.
    """
    shift = index // 2 % len(items)
    rotated = [*items[shift:], *items[:shift]]
    return rotated if index % 2 == 0 else rotated[::-1]


def server_flags(name: str, draft: str | None, head: str | None = None) -> list[str]:
    """Return the flags of llama-server for a configuration.

    Args:
        name: Name of the configuration. `+` combines several methods.
        draft: Path of the draft model, or None.
        head: Path of the head, or None. `mtp` then uses the head in the target's own file.

    Raises:
        OptionError: llama-server has no such configuration, or the draft model or head is missing.
    """
    if name == "none":
        return []
    kinds, flags = [], []
    for part in name.split("+"):
        kind, *sizes = part.split(":")
        kinds.append(_MODELS.get(kind, kind))
        flags += _part_flags(part, kind, sizes, draft if kind == "draft" else head)
    return ["--spec-type", ",".join(kinds), *flags]


def _part_flags(part: str, kind: str, sizes: list[str], model: str | None) -> list[str]:
    if not all(re.fullmatch(r"[1-9]\d*", size) for size in sizes):
        raise OptionError(f"{part!r} has an invalid size", _HINT)
    if kind in _MODELS and len(sizes) == 1:
        length = ["--spec-draft-n-max", *sizes]
        if model is None and kind == "mtp":
            return length
        if model is None:
            raise OptionError(
                f"{part!r} needs a {'draft model' if kind == 'draft' else 'head'}",
                "give --draft FILE or --head FILE",
            )
        return ["--spec-draft-model", model, *length]
    if (kind == "ngram-cache" or kind == "ngram-mod" or kind in _MAPS) and not sizes:
        return []
    if kind in _MAPS and len(sizes) == 2:
        return [f"--spec-{kind}-size-n", sizes[0], f"--spec-{kind}-size-m", sizes[1]]
    if kind == "ngram-mod" and len(sizes) == 2:
        # Lower the minimum, which is 48 tokens by default.
        lengths = ["--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", sizes[1]]
        return ["--spec-ngram-mod-n-match", sizes[0], *lengths]
    raise OptionError(f"{part!r} is not a llama-server configuration", _HINT)
