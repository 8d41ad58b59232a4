"""Find models in Ollama's store, without modifying it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.options.reply_options import stated_sampling
from edgespec.store.stored_models import EntryBudget, StoredModel, files_below, find_child
from edgespec.system.files import error_reason, home_folder, read_regular_file, regular_file_bytes

_MODEL = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_PROJECTOR = "application/vnd.ollama.image.projector"
_PARAMETERS = "application/vnd.ollama.image.params"
# Media types of files that edgespec ignores, with user-facing names. Templates are ignored because Ollama
# writes them in Go's template language.
_UNUSED = {
    "application/vnd.ollama.image.template": "template",
    "application/vnd.ollama.image.system": "system prompt",
    "application/vnd.ollama.image.messages": "messages",
}
_DIGEST = re.compile(r"sha256:([0-9a-f]+)")
_REGISTRY, _OWN = "registry.ollama.ai", "library"
# The store of Ollama's system service on Linux.
_SERVICE_STORE = Path("/usr/share/ollama/.ollama/models")
_MAX_MANIFEST_BYTES = 1 << 20


def ollama_model(name: str, tag: str | None = None) -> StoredModel | None:
    """Return the Ollama model `name:tag`, or None.

    Args:
        name: `llama3.2`, `user/name`, or a name with a registry, such as `hf.co/user/repo`.
        tag: The tag. Defaults to `latest`.
    """
    for folder in _folders():
        root = at = folder / "manifests"
        for part in (*_manifest_path(name), tag or "latest"):
            child = find_child(at, part)
            if child is None:
                break
            at = child
        else:
            if at.is_file():
                return _stored(folder, at, at.relative_to(root).as_posix())
    return None


def ollama_models() -> Iterator[StoredModel]:
    """Yield all Ollama models, including those that edgespec cannot run."""
    for folder in _folders():
        root, budget = folder / "manifests", EntryBudget()
        for path in files_below(root, 5, budget, inside=root):
            place = path.relative_to(root).as_posix()
            if place.count("/") >= 3:
                yield _stored(folder, path, place)
        yield from budget.notice("ollama")


def _folders() -> list[Path]:
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [Path(chosen).expanduser()]
    home = home_folder()
    return [*([home / ".ollama" / "models"] if home else []), _SERVICE_STORE]


def _manifest_path(name: str) -> tuple[str, ...]:
    """Split a name into registry, owner and model."""
    parts = tuple(name.split("/"))
    if len(parts) == 1:
        return (_REGISTRY, _OWN, *parts)
    return (_REGISTRY, *parts) if len(parts) == 2 else parts


def _stored(folder: Path, manifest: Path, place: str) -> StoredModel:
    """Return the model whose manifest is at `place`, a path of the form registry/owner/name/tag."""
    name, _, tag = place.rpartition("/")
    shown = f"{name.removeprefix(f'{_REGISTRY}/').removeprefix(f'{_OWN}/')}:{tag}"
    names = (shown, f"ollama:{shown}")
    try:
        layers = _layers(manifest)
        model, adapters = _gguf_files(folder, layers)
        parameters = _parameters(folder, layers)
        return StoredModel(
            "ollama",
            names,
            model,
            adapters=adapters,
            unused=_unused(layers, parameters),
            sampling=stated_sampling(parameters),
            projector=_projector(folder, layers),
        )
    except ModelFileError as error:
        return StoredModel("ollama", names, None, problem=error.what)


def _layers(manifest: Path) -> list[tuple[str, str]]:
    """Return the kind and digest of each file that a manifest lists. Raises ModelFileError."""
    try:
        layers = json.loads(read_regular_file(manifest, _MAX_MANIFEST_BYTES))["layers"]
        return [(str(layer["mediaType"]), str(layer["digest"])) for layer in layers]
    except OSError as error:
        raise ModelFileError(
            f"the model's manifest cannot be read: {error_reason(error)}", code="model_file_unreadable"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # Ollama may change its manifest format at any time.
        raise ModelFileError("the model's manifest is damaged or in an unknown format") from error


def _gguf_files(folder: Path, parts: Sequence[tuple[str, str]]) -> tuple[Path, tuple[Path, ...]]:
    """Return the GGUF files of a model and its adapters.

    Raises:
        ModelFileError: edgespec cannot run the model.
    """
    models = [digest for kind, digest in parts if kind == _MODEL]
    if not models:
        raise ModelFileError("the model has no GGUF file", code="model_file_incomplete")
    adapters = [digest for kind, digest in parts if kind == _ADAPTER]
    model = _gguf_file(folder, models[-1], "the model's file")
    return model, tuple(_gguf_file(folder, digest, "the model's adapter") for digest in adapters)


def _parameters(folder: Path, parts: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the parameters in a model's Modelfile, or an empty mapping if they are missing or unreadable."""
    match = _DIGEST.fullmatch(dict(parts).get(_PARAMETERS, ""))
    if match:
        with suppress(OSError, ValueError, RecursionError):
            values = json.loads(
                read_regular_file(folder / "blobs" / f"sha256-{match[1]}", _MAX_MANIFEST_BYTES)
            )
            return values if isinstance(values, dict) else {}
    return {}


def _projector(folder: Path, parts: Sequence[tuple[str, str]]) -> Path | None:
    """Return a model's projector, or None. A damaged one is ignored, because text chats do not need it."""
    with suppress(ModelFileError):
        for kind, digest in parts:
            if kind == _PROJECTOR:
                return _gguf_file(folder, digest, "the model's projector")
    return None


def _unused(parts: Sequence[tuple[str, str]], parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a model's parts that edgespec does not use.

    Stop strings are left out because most manifests contain some, which only duplicate the end tokens in the
    GGUF file.
    """
    kinds = dict(parts)
    unused = [name for kind, name in _UNUSED.items() if kind in kinds]
    others = [name for name, value in parameters.items() if not stated_sampling({name: value})]
    return (*unused, *(name for name in others if name != "stop"))


def _gguf_file(folder: Path, digest: str, what: str) -> Path:
    """Return the file with this digest. Raises ModelFileError if it is not a GGUF file."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise ModelFileError(f"{what} has an invalid digest")
    blob = folder / "blobs" / f"sha256-{match[1]}"
    try:
        regular_file_bytes(blob)
        with blob.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFileError(f"{what} is not a GGUF file")
    except OSError as error:
        raise ModelFileError(
            f"{what} {blob} cannot be read: {error_reason(error)}", code="model_file_unreadable"
        ) from error
    return blob
