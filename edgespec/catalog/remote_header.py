"""The metadata of a model that is not on this machine: the beginnings of its files, read from the hub.

What comes of it are files as long as the real ones, of which nothing but the beginning was written: they take
hardly any disk, and whatever asks for metadata alone cannot tell them from the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edgespec.backends.gguf_header import TruncatedHeader, parse_header
from edgespec.backends.registry import format_at
from edgespec.catalog.catalogue import ModelEntry, load_catalogue, user_aliases
from edgespec.catalog.download import Progress, choose, list_repository, translate_errors
from edgespec.catalog.hub_files import HubFile, holds_gguf, is_quantisation
from edgespec.catalog.reference import HubReference, NameReference, Resolved, parse, resolve
from edgespec.errors import CancelledError, DownloadError, ModelNotFoundError

__all__ = ["resolve_metadata"]

_FIRST_BYTES = 1 << 20
_MOST_BYTES = 1 << 29
_CHUNK_BYTES = 1 << 16
_LENGTH_BYTES = 8


def resolve_metadata(reference: str, folder: Path, progress: Progress | None = None) -> Resolved:
    """The model a reference stands for: on this machine, or its metadata in `folder`, read from the hub.

    Raises what `resolve` does.
    """
    try:
        return resolve(reference, allow_download=False)
    except ModelNotFoundError:
        meant = _repository_of(reference)
        if meant is None:
            raise
    repository, quantisation, entry = meant
    if progress is not None and not progress(f"reading about {repository}", 0.0):
        raise CancelledError(f"reading about {repository} was cancelled")
    with translate_errors(repository):
        listing = list_repository(repository)
        # Of an MLX model what tokenises is not asked about.
        files = [file for file in choose(repository, listing.files, quantisation) if _says_sizes(file)]
        target = folder / repository.replace("/", "--")
        for done, file in enumerate(files):
            _write_beginning(repository, listing.commit, file, target / Path(file.name).name)
            if progress is not None and not progress(f"reading about {repository}", (done + 1) / len(files)):
                raise CancelledError(f"reading about {repository} was cancelled")
    gguf = holds_gguf(files)
    path = target / Path(files[0].name).name if gguf else target
    label = f"hf:{repository}:{quantisation}" if quantisation else f"hf:{repository}"
    note = f"{reference} -> {label}, not on this machine"
    return Resolved(reference, path, "hub", entry, note, format_at(path).name)


def _repository_of(reference: str) -> tuple[str, str | None, ModelEntry | None] | None:
    """Repository, quantisation and entry of what a reference names on the hub; None for nothing."""
    text, aliases = reference.strip(), user_aliases()
    for _ in range(len(aliases) + 1):
        text = aliases.get(text.lower(), text)
    meaning = parse(text)
    catalogue = load_catalogue()
    if isinstance(meaning, HubReference):
        entry = catalogue.of_repository(meaning.repository)
        return meaning.repository, meaning.quantisation, entry
    if not isinstance(meaning, NameReference):
        return None
    found = catalogue.find(f"{meaning.name}:{meaning.tag}" if meaning.tag else meaning.name)
    if found is None and meaning.tag and is_quantisation(meaning.tag):
        base = catalogue.find(meaning.name)
        found = (base[0], meaning.tag) if base else None
    if found is None or not found[0].repository:
        return None
    entry, quantisation = found
    return entry.repository, quantisation if entry.file_format.one_file_per_quantisation else None, entry


def _write_beginning(repository: str, commit: str, file: HubFile, path: Path) -> None:
    """A file as long as the one of the hub, with its header; small ones whole."""
    from huggingface_hub import constants, hf_hub_url

    url = hf_hub_url(repository, file.name, revision=commit or None, endpoint=constants.ENDPOINT)
    data = b""
    wanted = _FIRST_BYTES
    size_bytes = file.size_bytes
    for total, chunk in _beginning(url):
        size_bytes = total or size_bytes
        data += chunk
        if len(data) >= min(wanted, size_bytes or wanted):
            if _is_whole(file, data):
                break
            wanted *= 2
        if len(data) > _MOST_BYTES:
            raise DownloadError(
                f"the header of {file.name} is longer than {_MOST_BYTES:,} bytes", "choose another model"
            )
    else:
        if not _is_whole(file, data):
            raise DownloadError(f"the header of {file.name} came cut short", "try again")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(data)
        stream.truncate(max(size_bytes, len(data)))


def _says_sizes(file: HubFile) -> bool:
    return file.name.endswith((".gguf", ".safetensors", "config.json", ".index.json"))


def _is_whole(file: HubFile, data: bytes) -> bool:
    """Whether `data` holds the header of a file; of what has none, such as config.json, all is wanted."""
    if file.name.endswith(".safetensors"):
        header = int.from_bytes(data[:_LENGTH_BYTES], "little")
        return len(data) >= _LENGTH_BYTES + header
    if not file.name.endswith(".gguf"):
        return len(data) >= file.size_bytes
    try:
        parse_header(data)
    except TruncatedHeader:
        return False
    except ValueError as error:
        raise DownloadError(f"{file.name} is no GGUF file: {error}", "choose another model") from error
    return True


def _beginning(url: str) -> Iterator[tuple[int, bytes]]:
    """The bytes of `url` from the front, each with the length of the whole; leaving off ends the transfer."""
    from huggingface_hub import constants, get_session, get_token

    token = get_token()
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
    with get_session().stream(
        "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
    ) as response:
        response.raise_for_status()
        total = int(response.headers.get("Content-Length") or 0)
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            yield total, chunk
