"""Read the metadata of a model that is not on this machine, downloading only its file headers.

The headers are written to sparse files of the original size, which take up almost no disk space. Code that
reads only metadata cannot tell them apart from the real files.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from edgespec.errors import CancelledError, DownloadError
from edgespec.model.formats.gguf_header import TruncatedHeader, parse_header
from edgespec.store.download import (
    HEAD,
    MODEL,
    Progress,
    RepositoryContent,
    list_repository,
    stream_chunks,
    translate_errors,
)
from edgespec.store.heads import resolve_head_with
from edgespec.store.hub_files import HubFile, is_gguf_model, repository_folder
from edgespec.store.reference import Resolved, resolve_with

# Number of bytes to download before first trying to parse a model's header.
_FIRST_PARSE_BYTES = 1 << 20
# Maximum size of a model file's header. The largest known headers are a few dozen megabytes.
_MAX_HEADER_BYTES = 1 << 29
_CHUNK_BYTES = 1 << 16
# Size in bytes of the field at the start of a safetensors file that holds the length of its header.
_LENGTH_BYTES = 8
_WITH_METADATA = (".gguf", ".safetensors", "config.json", ".index.json")
# Extensions of PyTorch files, which have no header because they list their tensors at the end.
_WITHOUT_HEADER = (".bin", ".pt")


def resolve_metadata(reference: str, folder: Path, progress: Progress | None = None) -> Resolved:
    """Return the model that a reference names. If it is not on this machine, download only its metadata.

    Args:
        reference: The reference that the user typed.
        folder: Folder for the downloaded metadata.
        progress: Called during the download. Returning False cancels it.

    Raises:
        ModelNotFoundError, ModelFileError, DownloadError, CancelledError, BackendMissingError: As in
            `resolve`.
    """
    fetch = partial(fetch_metadata, folder=folder, content=MODEL, progress=progress)
    return _named(folder, resolve_with(reference, fetch, progress))


def resolve_head_metadata(reference: str, folder: Path, progress: Progress | None = None) -> Resolved:
    """Return the head that a reference names. If it is not on this machine, download only its metadata.

    This takes the same arguments and raises the same errors as `resolve_metadata`.
    """
    fetch = partial(fetch_metadata, folder=folder, content=HEAD, progress=progress)
    return _named(folder, resolve_head_with(reference, fetch))


def _named(folder: Path, resolved: Resolved) -> Resolved:
    """If only metadata was downloaded, replace the path in the model's note with `not on this machine`."""
    if not resolved.path.is_relative_to(folder):
        return resolved
    return replace(resolved, note=resolved.note.removesuffix(f": {resolved.path}") + ", not on this machine")


def fetch_metadata(
    repository: str,
    quantisation: str | None,
    *,
    folder: Path,
    content: RepositoryContent,
    progress: Progress | None = None,
) -> Path:
    """Download the metadata of a model or head on Hugging Face, even if its files are on this machine.

    Args:
        repository: `user/repo`.
        quantisation: The quantisation or file to select. See `choose_files`.
        folder: Folder for the downloaded metadata.
        content: What to look for: a model or a head.
        progress: Called during the download. Returning False cancels it.

    Returns:
        The path of the first GGUF file, or the folder of an MLX model or a head.

    Raises:
        ModelNotFoundError: The repository does not exist, or lacks the quantisation or file.
        DownloadError: Hugging Face cannot be reached, or its response is damaged.
        CancelledError: `progress` returned False.
    """
    with translate_errors(repository):
        commit, listed = list_repository(repository)
        chosen = content.choose(repository, listed, quantisation)
        files = [one for one in chosen if one.name.endswith((*_WITH_METADATA, *_WITHOUT_HEADER))]
        if not is_gguf_model(files[0]):
            # The model card states the licence, which a GGUF file has in its header.
            files += [one for one in listed if one.name == "README.md"]
        # Use the layout of the cache, in which other code finds the files that belong to a model.
        target = folder / repository_folder(repository).name / "snapshots" / "main"
        for done, file in enumerate(files):
            if progress and not progress(f"reading the metadata of {repository}", done / len(files)):
                raise CancelledError(f"reading the metadata of {repository} was cancelled")
            _write_header(repository, commit, file, target / file.name)
    return target / files[0].name if is_gguf_model(files[0]) else target


def _write_header(repository: str, commit: str, file: HubFile, path: Path) -> None:
    """Download the header of a file and write it to a sparse file of the original size.

    Files without a header, such as config.json, are downloaded completely. For PyTorch files, only the name
    and size are kept.
    """
    from huggingface_hub import hf_hub_url

    path.parent.mkdir(parents=True, exist_ok=True)
    if file.name.endswith(_WITHOUT_HEADER):
        with path.open("wb") as stream:
            stream.truncate(file.size_bytes)
        return
    url = hf_hub_url(repository, file.name, revision=commit or None)
    data = b""
    parse_at = _FIRST_PARSE_BYTES
    for _, chunk in stream_chunks(url, chunk_bytes=_CHUNK_BYTES):
        data += chunk
        if len(data) >= min(parse_at, file.size_bytes or parse_at):
            if _is_header_complete(file, data):
                break
            parse_at *= 2
        if len(data) > _MAX_HEADER_BYTES:
            raise DownloadError(
                f"the metadata in {file.name} exceeds the limit of {_MAX_HEADER_BYTES:,} bytes",
                "choose another model",
            )
    else:
        if not _is_header_complete(file, data):
            raise DownloadError(f"the metadata of {file.name} was not downloaded completely", "try again")
    with path.open("wb") as stream:
        stream.write(data)
        stream.truncate(max(file.size_bytes, len(data)))


def _is_header_complete(file: HubFile, data: bytes) -> bool:
    """Return whether `data` contains the complete header, or the whole file if it has none."""
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
