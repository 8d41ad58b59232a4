"""Configurations by name, and what llama-server is told for each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgespec.errors import OptionError

__all__ = ["GRID", "Configuration", "parse", "server_flags"]

# Plain; draft models (3 is the default length); the n-gram kinds as they come, and short, which small texts
# need to find anything at all; and a draft model that n-grams help.
GRID = (
    "none,draft:1,draft:2,draft:3,draft:4,draft:6,draft:8,draft:12,draft:16,"
    "ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache,"
    "ngram-simple:3:8,ngram-map-k:3:8,ngram-map-k4v:3:8,ngram-mod:4:8,ngram-simple:3:8+draft:4"
)

_MAPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
_HINT = (
    "give none, draft:LENGTH, ngram-cache, or ngram-simple, ngram-map-k, ngram-map-k4v or ngram-mod, as they"
    " come or with :LOOKUP:LENGTH"
)


@dataclass(frozen=True)
class Configuration:
    """One program in one configuration, such as `llama-server draft:4` or `edgespec model:4`."""

    program: str
    name: str

    def __str__(self) -> str:
        return f"{self.program} {self.name}"


def parse(method: str) -> tuple[str, int | None]:
    """`model:4` as a method and its draft length; None where it names none. Raises OptionError."""
    name, colon, length = method.partition(":")
    if not name or (colon and not re.fullmatch(r"[1-9]\d*", length)):
        raise OptionError(f"{method!r} is no method", "give METHOD or METHOD:LENGTH, such as model:4")
    return name, int(length) if colon else None


def server_flags(name: str, draft: str | None) -> list[str]:
    """What llama-server is told for a configuration; `+` puts several together. Raises OptionError."""
    if name == "none":
        return []
    kinds, flags = [], []
    for part in name.split("+"):
        kind, *sizes = part.split(":")
        kinds.append("draft-simple" if kind == "draft" else kind)
        flags += _part_flags(part, kind, sizes, draft)
    return ["--spec-type", ",".join(kinds), *flags]


def _part_flags(part: str, kind: str, sizes: list[str], draft: str | None) -> list[str]:
    if not all(re.fullmatch(r"[1-9]\d*", size) for size in sizes):
        raise OptionError(f"{part!r} has a size that is none", _HINT)
    if kind == "draft" and len(sizes) == 1:
        if draft is None:
            raise OptionError(f"{part!r} needs a draft model", "give --draft FILE")
        return ["--spec-draft-model", draft, "--spec-draft-n-max", *sizes]
    if (kind == "ngram-cache" or kind == "ngram-mod" or kind in _MAPS) and not sizes:
        return []
    if kind in _MAPS and len(sizes) == 2:
        return [f"--spec-{kind}-size-n", sizes[0], f"--spec-{kind}-size-m", sizes[1]]
    if kind == "ngram-mod" and len(sizes) == 2:
        # Its least length is 48 unless it is told otherwise.
        lengths = ["--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", sizes[1]]
        return ["--spec-ngram-mod-n-match", sizes[0], *lengths]
    raise OptionError(f"{part!r} is no configuration of llama-server", _HINT)
