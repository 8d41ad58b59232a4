"""Recognise heads and format their details, for `edgespec models`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import EdgespecError
from edgespec.files import format_bytes

if TYPE_CHECKING:
    from edgespec.catalog import HeadEntry, ModelInfo

__all__ = ["head_entry_json", "head_lines", "is_head_folder", "published_head"]


def published_head(reference: str) -> HeadEntry | None:
    """Return the catalogue entry of the head with this name or in this repository, or None."""
    from edgespec.catalog import load_catalogue

    return load_catalogue().find_head(reference.strip().removeprefix("hf:"))


def is_head_folder(reference: str) -> bool:
    """Return whether the reference is the path of a folder that contains a head."""
    from edgespec.catalog import head_info

    path = Path(reference.strip()).expanduser()
    try:
        return path.is_dir() and head_info(path).kind == "head"
    except (EdgespecError, OSError):
        return False


def head_entry_json(entry: HeadEntry) -> dict[str, Any]:
    """Return a head's catalogue entry as a JSON object."""
    return {
        "name": entry.name,
        "kind": entry.kind,
        "targets": list(entry.targets),
        "file_bytes": entry.approximate_file_bytes,
        "embedded": bool(entry.embedded_file),
        "repository": entry.repository,
        "published_speedup": entry.published_speedup or None,
        "published_on": entry.published_on,
    }


def head_lines(reference: str, entry: HeadEntry | None, info: ModelInfo | None) -> list[tuple[str, str]]:
    """Return the (name, value) lines about a head.

    Args:
        reference: The reference that the user typed.
        entry: The head's catalogue entry, if there is one.
        info: Metadata of the head's files. None if the head is not on this machine.
    """
    from edgespec.catalog import method_of

    kind = entry.kind if entry else info.heads[0] if info and info.heads else "unknown"
    method = method_of(kind)
    lines = [
        ("what it is", f"a head: it drafts for one model and cannot run alone ({kind}, method {method})"),
    ]
    if entry:
        lines.append(("drafts for", ", ".join(entry.targets)))
    if entry and not entry.embedded_file:
        lines.append(("source", entry.repository))
    if info is None:
        if entry:
            lines.append(("size", f"about {format_bytes(entry.approximate_file_bytes)}"))
        lines.append(("on this machine", f"no; download it with `edgespec models pull {reference}`"))
    else:
        lines += _file_lines(kind, info)
    if entry and entry.published_speedup:
        measured = f"{entry.published_speedup:.1f}x on {entry.published_on}, measured by its publisher"
        lines.append(("speed-up", measured))
    target = entry.targets[0] if entry else "MODEL"
    use = f"--target {target} --head {shlex.quote(reference)}"
    where = "" if entry else ", where MODEL is the model that it was trained for"
    return [
        *lines,
        ("use it with", f"{use}{where} (add --method {method} to draft even when that is slower)"),
    ]


def _file_lines(kind: str, info: ModelInfo) -> list[tuple[str, str]]:
    lines = [("size", ", ".join(filter(None, (format_bytes(info.size_bytes), info.quantisation))))]
    if info.parameters:
        lines.append(("parameters", f"{info.parameters:,}"))
    lines.append(("reads", _reads(kind, info)))
    if info.draft_vocab_size:
        is_all = info.draft_vocab_size == info.vocab_size
        share = "all" if is_all else f"{info.draft_vocab_size:,} of the"
        lines.append(("can draft", f"{share} {info.vocab_size:,} tokens of the target"))
    return [*lines, ("licence", info.licence)] if info.licence else lines


def _reads(kind: str, info: ModelInfo) -> str:
    """Describe the hidden states that a head reads."""
    if info.read_layers:
        *first, last = map(str, info.read_layers)
        where = f"the hidden states of the target's layers {', '.join(first)} and {last}"
    elif kind in ("EAGLE-3", "DFlash"):
        where = "hidden states of several layers of the target; the files do not say which"
    else:
        where = "the last hidden state of the target"
    return f"{where} ({info.hidden_size:,} numbers each)" if info.hidden_size else where
