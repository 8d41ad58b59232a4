"""What a person types for a model, told apart: a path, a hub repository, a store's model, a name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgespec.errors import ModelNotFoundError

__all__ = ["HubReference", "NameReference", "PathReference", "Reference", "StoreReference", "parse"]


@dataclass(frozen=True)
class PathReference:
    """A file or a folder on this machine."""

    path: Path


@dataclass(frozen=True)
class HubReference:
    """A model of a hub repository; `quantisation` is a label, a `.gguf` file name, or None (the default).

    explicit: written as one of the hub, so that a name of Ollama's is not meant.
    """

    repository: str
    quantisation: str | None
    explicit: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class StoreReference:
    """A model of one store: what `ollama` or `lmstudio` calls `name`."""

    store: Literal["ollama", "lmstudio"]
    name: str


@dataclass(frozen=True)
class NameReference:
    """A name to look up, with what stood after its colon."""

    name: str
    tag: str | None


Reference = PathReference | HubReference | StoreReference | NameReference

# No system has longer paths, and no hub or store longer names.
_LONGEST_PATH, _LONGEST_NAME = 4096, 512
_SHOWN = 60
_HUB_PREFIX = re.compile(r"^(?:hf:|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)", re.IGNORECASE)
_STORE_PREFIX = re.compile(r"^(ollama|lmstudio):(.*)$", re.IGNORECASE)
_REPOSITORY = re.compile(r"^([\w.-]+/[\w.-]+?)/?(?::([\w./-]+))?$")
# As a browser shows it: a folder of a repository, or one of its files.
_PAGE = re.compile(
    r"^([\w.-]+/[\w.-]+)/(?:tree|blob|resolve)/main(?:/|/([\w./-]+\.gguf))?(?:\?.*)?$", re.IGNORECASE
)
_REVISION = re.compile(r"^((?:hf:)?(?:[\w.-]+/)?[\w.-]+)@([\w./-]*)(:[\w./-]+)?$")
_NAME = re.compile(r"^([\w.-]+)(?::([\w.-]+))?$")
_WRITTEN_AS_PATH = re.compile(r"^(?:[/~]|\.\.?(?:[/\\]|$))|\\|\.gguf$", re.IGNORECASE)
_HOW = "give a path, user/repo:quant or a name such as demo"


def parse(reference: str) -> Reference:
    """Tell what kind of reference this is. Looks at the disk only to tell `user/repo` from a folder's file.

    Raises ModelNotFoundError when it is none.
    """
    text = reference.strip()
    if not text:
        raise ModelNotFoundError("the model reference is empty", _HOW)
    if len(text) > _LONGEST_PATH:
        raise _too_long(text)
    if prefix := _HUB_PREFIX.match(text):
        return _of_hub(text, text[prefix.end() :])
    if store := _STORE_PREFIX.match(text):
        if not store[2].strip():
            raise ModelNotFoundError(f"{text} names no model", f"write it as {store[1].lower()}:NAME")
        return StoreReference("ollama" if store[1].lower() == "ollama" else "lmstudio", store[2].strip())
    path = Path(os.path.expanduser(text))
    if _WRITTEN_AS_PATH.search(text) and "://" not in text:
        return PathReference(path)
    if name := _NAME.match(text):
        return NameReference(_short(name.group(1)), name.group(2))
    if os.path.exists(path):
        return PathReference(path)
    if name := _NAME.match(text.rstrip("/")):
        return NameReference(_short(name.group(1)), name.group(2))
    if repository := _REPOSITORY.match(text):
        return HubReference(_short(repository.group(1)), repository.group(2))
    _refuse_misspelt(text)
    return PathReference(path)


def _of_hub(text: str, rest: str) -> HubReference:
    """What stands after `hf:`, or after the hub's address. Raises ModelNotFoundError."""
    if rest:
        _refuse_misspelt(text)
    found = _REPOSITORY.match(rest) or _PAGE.match(rest)
    if not found:
        raise ModelNotFoundError(
            f"{_cut(text)} names no hub repository", "write it as hf:user/repo or hf:user/repo:Q4_K_M"
        )
    return HubReference(_short(found.group(1)), found.group(2), explicit=True)


def _refuse_misspelt(text: str) -> None:
    """Raises ModelNotFoundError for what is nearly a reference, and would only be called a missing file."""
    if "://" in text and not _HUB_PREFIX.match(text):
        raise ModelNotFoundError(
            f"{_cut(text)} is not an address of the Hugging Face hub",
            "download the file yourself and give its path, or write hf:user/repo:Q4_K_M",
        )
    if revision := _REVISION.match(text):
        wanted = f"revision {revision[2]}" if revision[2] else "a revision"
        raise ModelNotFoundError(
            f"{_cut(text)} asks for {wanted}, and only the newest can be had",
            f"write {_cut(revision[1])}{revision[3] or ''}",
        )
    if text.endswith(":"):
        raise ModelNotFoundError(
            f"{_cut(text)} ends in a colon, and no quantisation follows",
            f"write {_cut(text)}Q4_K_M, or leave the colon out",
        )


def _short(name: str) -> str:
    if len(name) > _LONGEST_NAME:
        raise _too_long(name)
    return name


def _too_long(text: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"no model has a name of {len(text):,} characters: {_cut(text)}", _HOW)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
