"""Reads the metadata of a model that is not on this machine by downloading only its file headers.

The headers are written to sparse files of full length, which take almost no disk space. Code that only reads
metadata can treat them like the real files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edgespec.backends.gguf_header import TruncatedHeader, parse_header
from edgespec.backends.registry import format_at
from edgespec.catalog.catalogue import ModelEntry, load_catalogue, user_aliases
from edgespec.catalog.download import Progress, choose, list_repository, translate_errors
from edgespec.catalog.hub_files import HubFile, holds_gguf, is_quantisation
from edgespec.catalog.reference import HubReference, NameReference, Resolved, parse_reference, resolve
from edgespec.errors import CancelledError, DownloadError, ModelNotFoundError

__all__ = ["resolve_metadata"]

# Number of downloaded bytes after which parsing the header is first attempted. After a failed attempt, it
# doubles.
_FIRST_PARSE_BYTES = 1 << 20
# Maximum size of a header. The largest known headers are a few dozen megabytes.
_MAX_HEADER_BYTES = 1 << 29
_CHUNK_BYTES = 1 << 16
# A safetensors file begins with the length of its header, an integer of this many bytes.
_LENGTH_BYTES = 8


def resolve_metadata(reference: str, folder: Path, progress: Progress | None = None) -> Resolved:
    """Return the model that a reference names. If it is not on this machine, download its metadata only.

    Args:
        reference: What the user typed.
        folder: Folder for the downloaded metadata.
        progress: Called during the download. Returning False cancels it.

    Raises:
        ModelNotFoundError, ModelFileError, DownloadError, CancelledError, BackendMissingError: As in
            `resolve`.
    """
    try:
        return resolve(reference, allow_download=False)
    except ModelNotFoundError:
        source = _repository_of(reference)
        if source is None:
            raise
    repository, quantisation, entry = source
    if progress is not None and not progress(f"reading metadata of {repository}", 0.0):
        raise CancelledError(f"reading the metadata of {repository} was cancelled")
    with translate_errors(repository):
        listing = list_repository(repository)
        # Skip files without metadata, such as the tokenizer of an MLX model.
        files = [file for file in choose(repository, listing.files, quantisation) if _has_metadata(file)]
        target = folder / repository.replace("/", "--")
        for done, file in enumerate(files):
            _write_header(repository, listing.commit, file, target / Path(file.name).name)
            if progress is not None and not progress(
                f"reading metadata of {repository}", (done + 1) / len(files)
            ):
                raise CancelledError(f"reading the metadata of {repository} was cancelled")
    gguf = holds_gguf(files)
    path = target / Path(files[0].name).name if gguf else target
    label = f"hf:{repository}:{quantisation}" if quantisation else f"hf:{repository}"
    note = f"{reference} -> {label}, not on this machine"
    return Resolved(reference, path, "hub", entry, note, format_at(path).name)


def _repository_of(reference: str) -> tuple[str, str | None, ModelEntry | None] | None:
    """Return the repository, quantisation and catalogue entry of a reference, or None if unknown."""
    text, aliases = reference.strip(), user_aliases()
    for _ in range(len(aliases) + 1):
        text = aliases.get(text.lower(), text)
    parsed = parse_reference(text)
    catalogue = load_catalogue()
    if isinstance(parsed, HubReference):
        entry = catalogue.of_repository(parsed.repository)
        return parsed.repository, parsed.quantisation, entry
    if not isinstance(parsed, NameReference):
        return None
    named = catalogue.find(f"{parsed.name}:{parsed.tag}" if parsed.tag else parsed.name)
    if named is None and parsed.tag and is_quantisation(parsed.tag):
        base = catalogue.find(parsed.name)
        named = (base[0], parsed.tag) if base else None
    if named is None or not named[0].repository:
        return None
    entry, quantisation = named
    return entry.repository, quantisation if entry.file_format.one_file_per_quantisation else None, entry


def _write_header(repository: str, commit: str, file: HubFile, path: Path) -> None:
    """Download the header of a file, and write it to a sparse file of full length.

    Files without a header, such as config.json, are downloaded completely.
    """
    from huggingface_hub import constants, hf_hub_url

    url = hf_hub_url(repository, file.name, revision=commit or None, endpoint=constants.ENDPOINT)
    data = b""
    parse_at = _FIRST_PARSE_BYTES
    size_bytes = file.size_bytes
    for total, chunk in _stream_from_start(url):
        size_bytes = total or size_bytes
        data += chunk
        if len(data) >= min(parse_at, size_bytes or parse_at):
            if _is_header_complete(file, data):
                break
            parse_at *= 2
        if len(data) > _MAX_HEADER_BYTES:
            raise DownloadError(
                f"the header of {file.name} is longer than {_MAX_HEADER_BYTES:,} bytes",
                "choose another model",
            )
    else:
        if not _is_header_complete(file, data):
            raise DownloadError(f"the download of the header of {file.name} was incomplete", "try again")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(data)
        stream.truncate(max(size_bytes, len(data)))


def _has_metadata(file: HubFile) -> bool:
    return file.name.endswith((".gguf", ".safetensors", "config.json", ".index.json"))


def _is_header_complete(file: HubFile, data: bytes) -> bool:
    """Return whether `data` contains the complete header, or the complete file if it has no header."""
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
        raise DownloadError(f"{file.name} is not a GGUF file: {error}", "choose another model") from error
    return True


def _stream_from_start(url: str) -> Iterator[tuple[int, bytes]]:
    """Yield (total length, next chunk) while downloading a file. Closing the iterator ends the transfer."""
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
