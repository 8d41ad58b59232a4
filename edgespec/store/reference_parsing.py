"""Parse model references: paths, Hugging Face repositories, Ollama and LM Studio models, and names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgespec.errors import ModelNotFoundError

__all__ = ["HubReference", "NameReference", "PathReference", "Reference", "StoreReference", "parse_reference"]


@dataclass(frozen=True)
class PathReference:
    """A file or folder on this machine."""

    path: Path


@dataclass(frozen=True)
class HubReference:
    """A model in a Hugging Face repository.

    Attributes:
        repository: `user/repo`.
        quantisation: A label such as `Q4_K_M`, the name of a `.gguf` file, or None for the default.
        explicit: Whether the reference starts with `hf:` or a Hugging Face URL and therefore cannot mean an
            Ollama model.
    """

    repository: str
    quantisation: str | None
    explicit: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class StoreReference:
    """The model named `name` in Ollama or LM Studio."""

    store: Literal["ollama", "lmstudio"]
    name: str


@dataclass(frozen=True)
class NameReference:
    """A name from the catalogue, Ollama or the user's aliases, and the tag after the colon."""

    name: str
    tag: str | None

    @property
    def full_name(self) -> str:
        """The name as typed, including the tag."""
        return f"{self.name}:{self.tag}" if self.tag else self.name


Reference = PathReference | HubReference | StoreReference | NameReference

_MAX_PATH_CHARACTERS, _MAX_NAME_CHARACTERS = 4096, 512
# Maximum number of characters of a model reference to quote in an error message.
_MAX_SHOWN_CHARACTERS = 60
_HUB_PREFIX = re.compile(r"^(?:hf:|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)", re.IGNORECASE)
_STORE_PREFIX = re.compile(r"^(ollama|lmstudio):(.*)$", re.IGNORECASE)
_REPOSITORY = re.compile(r"^([\w.-]+/[\w.-]+?)/?(?::([\w./-]+))?$")
# Matches the URL path of a folder or file page on Hugging Face.
_WEB_PAGE = re.compile(
    r"^([\w.-]+/[\w.-]+)/(?:tree|blob|resolve)/main(?:/|/([\w./-]+\.gguf))?(?:\?.*)?$", re.IGNORECASE
)
_REVISION = re.compile(r"^((?:hf:)?(?:[\w.-]+/)?[\w.-]+)@([\w./-]*)(:[\w./-]+)?$")
_NAME = re.compile(r"^([\w.-]+)(?::([\w.-]+))?$")
_WRITTEN_AS_PATH = re.compile(r"^(?:[/~]|\.\.?(?:[/\\]|$))|\\|\.gguf$", re.IGNORECASE)
_HINT = "use a path, user/repo:quant or a name such as demo"


def parse_reference(reference: str) -> Reference:
    """Parse a model reference.

    The disk is accessed only to distinguish the repository `user/repo` from a local path.

    Raises:
        ModelNotFoundError: The string is not a valid reference.
    """
    text = reference.strip()
    if not text:
        raise ModelNotFoundError("the model reference is empty", _HINT, code="reference_invalid")
    if len(text) > _MAX_PATH_CHARACTERS:
        raise _too_long(text)
    if prefix := _HUB_PREFIX.match(text):
        return _parse_hub(text, text[prefix.end() :])
    if store := _STORE_PREFIX.match(text):
        if not store[2].strip():
            raise ModelNotFoundError(
                f"{text} has no model name", f"write it as {store[1].lower()}:NAME", code="reference_invalid"
            )
        return StoreReference("ollama" if store[1].lower() == "ollama" else "lmstudio", store[2].strip())
    path = Path(os.path.expanduser(text))
    if _WRITTEN_AS_PATH.search(text) and "://" not in text:
        # `user/repo:file.gguf` is a file in a repository, unless there is a local file of that name.
        in_repository = _REPOSITORY.match(text) if ":" in text and not os.path.exists(path) else None
        if in_repository:
            return _hub_reference(in_repository)
        return PathReference(path)
    if name := _NAME.match(text):
        return NameReference(_check_length(name.group(1)), name.group(2))
    if os.path.exists(path):
        return PathReference(path)
    if name := _NAME.match(text.rstrip("/")):
        return NameReference(_check_length(name.group(1)), name.group(2))
    if repository := _REPOSITORY.match(text):
        return _hub_reference(repository)
    _reject_near_misses(text)
    return PathReference(path)


def _parse_hub(text: str, rest: str) -> HubReference:
    """Parse the rest of a reference after `hf:` or the host name. Raises ModelNotFoundError."""
    if rest:
        _reject_near_misses(text)
    match = _REPOSITORY.match(rest) or _WEB_PAGE.match(rest)
    if not match:
        raise ModelNotFoundError(
            f"{_shorten(text)} is not a Hugging Face repository",
            "write it as hf:user/repo or hf:user/repo:Q4_K_M",
            code="reference_invalid",
        )
    return _hub_reference(match, explicit=True)


def _hub_reference(match: re.Match[str], *, explicit: bool = False) -> HubReference:
    """Return the reference of a repository. Ollama's tag `latest` means the default quantisation."""
    tag = match.group(2)
    is_default = tag is None or tag.lower() == "latest"
    return HubReference(_check_length(match.group(1)), None if is_default else tag, explicit)


def _reject_near_misses(text: str) -> None:
    """Raise ModelNotFoundError with a specific hint if the reference contains a common mistake."""
    if "://" in text and not _HUB_PREFIX.match(text):
        raise ModelNotFoundError(
            f"{_shorten(text)} is not a Hugging Face URL",
            "download the file yourself and use its path, or write hf:user/repo:Q4_K_M",
            code="reference_invalid",
        )
    if revision := _REVISION.match(text):
        requested = f"revision {revision[2]}" if revision[2] else "a revision"
        raise ModelNotFoundError(
            f"{_shorten(text)} specifies {requested}, but edgespec supports only the newest revision",
            f"write {_shorten(revision[1])}{revision[3] or ''}",
            code="reference_invalid",
        )
    if text.endswith(":"):
        raise ModelNotFoundError(
            f"{_shorten(text)} ends in a colon without a quantisation",
            f"write {_shorten(text)}Q4_K_M, or remove the colon",
            code="reference_invalid",
        )


def _check_length(name: str) -> str:
    if len(name) > _MAX_NAME_CHARACTERS:
        raise _too_long(name)
    return name


def _too_long(text: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"a reference of {len(text):,} characters is too long: {_shorten(text)}",
        _HINT,
        code="reference_invalid",
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
