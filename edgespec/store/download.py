"""Download models into the Hugging Face cache. Interrupted downloads can be resumed.

`huggingface_hub` lists and locates the files. This module downloads them itself, because `huggingface_hub`
deletes the partial file of an interrupted download, and a model can take hours to download.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

from edgespec.errors import (
    CancelledError,
    DownloadError,
    EdgespecError,
    ModelNotFoundError,
    NotDownloadedError,
)
from edgespec.model.base import Progress as Progress
from edgespec.model.formats.mlx_files import missing_files, missing_from_head, require_mlx
from edgespec.store.catalogue import load_catalogue
from edgespec.store.hub_files import (
    HubFile,
    best_projector,
    cached_model,
    choose_files,
    choose_head_files,
    choose_mlx_files,
    hub_cache_folder,
    hub_name,
    is_gguf_model,
    repository_folder,
)
from edgespec.system.files import error_reason, format_bytes, replace_when_written, write_advice

_CHUNK_BYTES = 1 << 18
_GIT_ETAG_CHARACTERS, _SHA256_ETAG_CHARACTERS = 40, 64
# Number of consecutive retries without progress after which a download fails.
_MAX_RETRIES = 5
_RETRY_SECONDS = 1.0
# Maximum time in seconds to wait for another program that is downloading the same file but makes no progress,
# and seconds between the checks for progress. Both values were chosen rather than measured.
_LOCK_SECONDS, _POLL_SECONDS = 10.0, 0.2
_SIGN_IN = "log in with `hf auth login` or set HF_TOKEN"


@dataclass(frozen=True, slots=True)
class RepositoryContent:
    """Rules for choosing the files of a model or head in a Hugging Face repository.

    Attributes:
        choose: Returns the files to download, given the repository, its files and the quantisation.
        missing_from_folder: Returns the names of files missing from a downloaded folder.
    """

    choose: Callable[[str, list[HubFile], str | None], list[HubFile]]
    missing_from_folder: Callable[[Path], list[str]]


def fetch(
    repository: str,
    quantisation: str | None,
    *,
    allow_download: bool = True,
    progress: Progress | None = None,
    content: RepositoryContent | None = None,
) -> Path:
    """Return the path of a Hugging Face model or head, downloading it if it is not in the cache.

    Args:
        repository: `user/repo`.
        quantisation: The quantisation or file to select. See `choose_files`.
        allow_download: Whether to download the model if it is not in the cache.
        progress: Called during the download. Returning False cancels it.
        content: What to look for. Defaults to a model.

    Returns:
        The first file of a GGUF model, or the folder of an MLX model or a head.

    Raises:
        ModelNotFoundError: The repository or quantisation does not exist.
        NotDownloadedError: The model is not in the cache, and `allow_download` is False.
        BackendMissingError: The model is an MLX model, and MLX cannot run on this machine.
        DownloadError: The download failed, for example because of the network or a full disk.
        CancelledError: `progress` returned False.
    """
    content = content or MODEL
    if cached := cached_model(repository, quantisation, content.missing_from_folder):
        return cached
    if not allow_download:
        name = hub_name(repository, quantisation)
        raise NotDownloadedError(
            f"{name} is not on this machine", f"download it with `edgespec models pull {name}`"
        )
    with translate_errors(repository):
        commit, listed = list_repository(repository)
        files = content.choose(repository, listed, quantisation)
        snapshot = repository_folder(repository) / "snapshots" / commit
        _check_disk(repository, [file for file in files if not (snapshot / file.name).exists()])
        paths: dict[HubFile, Path] = {}
        finished_bytes = 0
        total_bytes = max(1, sum(file.size_bytes for file in files))
        # Download a projector before its model, because a cached model without it counts as complete.
        for file in sorted(files, key=is_gguf_model):
            report = partial(_report, progress, file, finished_bytes, total_bytes)
            paths[file] = _fetch_file(repository, file, commit, report)
            finished_bytes += file.size_bytes
    first = paths[files[0]]
    if is_gguf_model(files[0]):
        return first
    folder = first.parent
    if missing := content.missing_from_folder(folder):
        raise DownloadError(
            f"{repository} is incomplete: it lacks {', '.join(missing[:3])}",
            "choose another repository of the same model",
            code="repository_unusable",
        )
    return folder


def _choose_model(repository: str, files: list[HubFile], quantisation: str | None) -> list[HubFile]:
    """Return the files of a model, preferring GGUF to MLX."""
    if any(map(is_gguf_model, files)):
        chosen = choose_files(repository, files, quantisation)
        projector = best_projector([file.name for file in files], chosen[0].name)
        return [*chosen, *(file for file in files if file.name == projector)]
    chosen = choose_mlx_files(repository, files)
    if quantisation is not None:
        raise ModelNotFoundError(
            f"{repository} is an MLX model with only one quantisation, so {quantisation} is not available",
            f"omit the quantisation (use {repository}), or use a repository of the same model whose name"
            " ends in -GGUF",
            code="quantisation_unavailable",
        )
    require_mlx(repository)
    return chosen


MODEL = RepositoryContent(_choose_model, missing_files)
HEAD = RepositoryContent(choose_head_files, missing_from_head)


def list_repository(repository: str) -> tuple[str, list[HubFile]]:
    """Return a repository's latest commit and its files."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repository, files_metadata=True)
    files = [
        HubFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id or "")
        for file in info.siblings or ()
    ]
    return info.sha or "", [file for file in files if _stays_inside(file.name)]


def _stays_inside(name: str) -> bool:
    """Return whether a relative path from the hub stays in the folder that it is joined to, on any system."""
    path = PureWindowsPath(name)  # This class treats both slashes and backslashes as separators.
    return not path.anchor and ".." not in path.parts


def _check_disk(repository: str, files: list[HubFile]) -> None:
    cache, blobs = hub_cache_folder(), repository_folder(repository) / "blobs"
    needed_bytes = 0
    for file in files:
        partial_file = blobs / f"{file.etag}.edgespec"
        needed_bytes += file.size_bytes - (partial_file.stat().st_size if partial_file.exists() else 0)
    free_bytes = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if needed_bytes > free_bytes:
        raise DownloadError(
            f"{repository} needs {format_bytes(needed_bytes)},"
            f" but {cache} has only {format_bytes(free_bytes)} free",
            "free some space, choose a smaller quantisation, or set HF_HUB_CACHE to a folder on a larger"
            " disk",
            code="disk_full",
        )


def _report(
    progress: Progress | None, file: HubFile, finished_bytes: int, total_bytes: int, done_bytes: int
) -> None:
    """Report the total download progress. `finished_bytes` is the total size of the finished files.

    Raises CancelledError if `progress` returns False.
    """
    fraction = min((finished_bytes + done_bytes) / total_bytes, 1.0)
    name = file.name.rsplit("/", 1)[-1]
    if progress and not progress(f"downloading {name} ({format_bytes(total_bytes)})", fraction):
        raise CancelledError(
            f"the download of {name} was cancelled at {fraction:.0%}", "start the download again to resume it"
        )


def _fetch_file(repository: str, file: HubFile, revision: str, report: Callable[[int], None]) -> Path:
    """Download a file into the cache and return its path.

    The cache stores file contents as blobs named by checksum, and each commit's folder links to its blobs.
    """
    from filelock import FileLock
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, file.name, revision=revision or None)
    metadata = get_hf_file_metadata(url)
    etag, commit = metadata.etag, metadata.commit_hash
    if not etag or not commit or not _stays_inside(etag) or not _stays_inside(commit):
        raise DownloadError(
            f"{constants.ENDPOINT} does not seem to be a Hugging Face server",
            "check HF_ENDPOINT and your proxy settings",
        )
    folder = repository_folder(repository)
    blob = folder / "blobs" / etag
    pointer = folder / "snapshots" / commit / file.name
    lock = folder.parent / ".locks" / folder.name / f"{etag}.lock"
    for parent in (blob.parent, pointer.parent, lock.parent, folder / "refs"):
        parent.mkdir(parents=True, exist_ok=True)
    # Other programs take the same lock, so only one program downloads the file at a time.
    with _file_lock(lock, blob, report):
        # If links are not possible, the pointer is the file itself, and there is no blob.
        if not pointer.exists():
            if not blob.exists():
                partial_file = blob.with_name(f"{etag}.edgespec")
                _stream(url, partial_file, metadata.size or file.size_bytes, etag, report)
                partial_file.replace(blob)
            _link(blob, pointer)
    # Downloads of other files in this repository write the same ref.
    main = folder / "refs" / "main"
    with FileLock(lock.with_name("refs"), timeout=_LOCK_SECONDS), replace_when_written(main) as ref:
        ref.write_text(commit, encoding="utf-8")
    return pointer


@contextmanager
def _file_lock(path: Path, blob: Path, report: Callable[[int], None]) -> Iterator[None]:
    """Hold the lock of a file, waiting for as long as another program makes progress in downloading the file.

    Raises `filelock.Timeout` if the other program has made no progress for `_LOCK_SECONDS`.
    """
    from filelock import FileLock, Timeout

    lock, since, done_bytes = FileLock(path), time.monotonic(), 0
    while not lock.is_locked:
        try:
            lock.acquire(timeout=_POLL_SECONDS)
        except Timeout:
            before, done_bytes = done_bytes, _partial_bytes(blob)
            if done_bytes != before:
                since = time.monotonic()
            elif time.monotonic() - since > _LOCK_SECONDS:
                raise
            report(done_bytes)
    try:
        yield
    finally:
        lock.release()


def _partial_bytes(blob: Path) -> int:
    """Return the total size of a blob's unfinished downloads, by edgespec and by `huggingface_hub`."""
    total = 0
    for suffix in ("edgespec", "incomplete"):
        with suppress(FileNotFoundError):
            total += blob.with_name(f"{blob.name}.{suffix}").stat().st_size
    return total


def _link(blob: Path, pointer: Path) -> None:
    pointer.unlink(missing_ok=True)
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        # Windows allows symbolic links only in developer mode, so store the file itself rather than a link.
        shutil.move(blob, pointer)


def _stream(url: str, path: Path, size_bytes: int, etag: str, report: Callable[[int], None]) -> None:
    """Download the rest of a partial file and verify it. The file is deleted only if verification fails."""
    import httpx2

    failures = 0
    with path.open("a+b") as file:
        if file.tell() > size_bytes:
            file.truncate(0)
        file.seek(0)
        digest, done_bytes = _new_digest(etag, size_bytes), 0
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            report(done_bytes)
        while done_bytes < size_bytes or size_bytes == 0:
            before = done_bytes
            try:
                for is_restarted, chunk in stream_chunks(url, done_bytes):
                    if is_restarted:
                        file.truncate(0)
                        digest, done_bytes = _new_digest(etag, size_bytes), 0
                    file.write(chunk)
                    digest.update(chunk)
                    done_bytes += len(chunk)
                    report(done_bytes)
                break
            except httpx2.TransportError as error:
                failures = 0 if done_bytes > before else failures + 1
                if failures > _MAX_RETRIES:
                    raise DownloadError(
                        f"the connection was lost {failures} times at {format_bytes(done_bytes)} of"
                        f" {format_bytes(size_bytes)}: {_network_reason(error)}",
                        "try again later to resume the download",
                        code="download_interrupted",
                    ) from error
                time.sleep(_RETRY_SECONDS)
                # Report progress so that the user can cancel the download even while no data arrives.
                report(done_bytes)
    has_checksum = len(etag) in (_GIT_ETAG_CHARACTERS, _SHA256_ETAG_CHARACTERS)
    if size_bytes and done_bytes != size_bytes:
        problem = f"it has {done_bytes} bytes instead of {size_bytes}"
    elif has_checksum and digest.hexdigest() != etag:
        problem = "its checksum does not match"
    else:
        return
    path.unlink()
    name = url.rsplit("/", 1)[-1]
    raise DownloadError(
        f"the downloaded file {name} is damaged: {problem}", "download it again", code="download_damaged"
    )


def _new_digest(etag: str, size_bytes: int) -> Any:
    if len(etag) == _GIT_ETAG_CHARACTERS:
        return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    return hashlib.sha256()


def stream_chunks(url: str, start: int = 0, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[tuple[bool, bytes]]:
    """Yield the content of a URL, starting at byte `start`. Closing the iterator ends the transfer.

    Each chunk comes with a flag, which is True for the first chunk if the server ignored `start` and is
    sending the whole file.
    """
    from huggingface_hub import constants, get_session, get_token

    headers = {"Accept-Encoding": "identity"}
    if token := get_token():
        headers["Authorization"] = f"Bearer {token}"
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream(
        "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
    ) as response:
        response.raise_for_status()
        is_restarted = start > 0 and response.status_code != 206
        for chunk in response.iter_bytes(chunk_bytes):
            yield is_restarted, chunk
            is_restarted = False


def _network_reason(error: Exception) -> str:
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


@contextmanager
def translate_errors(repository: str) -> Iterator[None]:
    """Translate exceptions from `huggingface_hub`, the network and the disk into one-line edgespec errors."""
    import httpx2
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except (OSError, httpx2.HTTPError, HFValidationError, NotImplementedError) as error:
        raise _translated(repository, error) from error


def _translated(repository: str, error: Exception) -> EdgespecError:
    import httpx2
    from filelock import Timeout
    from huggingface_hub import constants, errors

    cache = hub_cache_folder()
    match error:
        case errors.OfflineModeIsEnabled():
            return DownloadError(
                f"{repository} is not on this machine, and offline mode is on",
                "unset HF_HUB_OFFLINE, or specify the path of a model file",
                code="offline",
            )
        case errors.GatedRepoError():
            return DownloadError(
                f"{repository} is gated: you must accept its licence first",
                f"accept it at {constants.ENDPOINT}/{repository}, then {_SIGN_IN}",
                code="access_denied",
            )
        case errors.RepositoryNotFoundError():
            near = load_catalogue().nearest_repository(repository)
            return ModelNotFoundError(
                f"{constants.ENDPOINT} has no model repository {repository}, or you have no access to it",
                (f"did you mean {near}? If" if near else "check the spelling; if")
                + f" the repository is private, {_SIGN_IN}",
            )
        case errors.HfHubHTTPError() | httpx2.HTTPStatusError():
            return _http_error(repository, error.response.status_code)
        case errors.HFValidationError():
            return ModelNotFoundError(
                f"{repository} is not a valid repository name",
                "write it as user/repo or hf:user/repo:Q4_K_M",
                code="reference_invalid",
            )
        case httpx2.HTTPError():
            return DownloadError(
                f"cannot reach {constants.ENDPOINT} to download {repository}: {_network_reason(error)}",
                "check your network connection and try again, or specify the path of a model file",
                code="network_unreachable",
            )
        case Timeout():
            return DownloadError(
                f"another program is downloading {repository}",
                "wait until it finishes, then try again",
                code="file_in_use",
            )
        case NotImplementedError():
            return DownloadError(
                f"cannot download models to {cache}, because its file system does not support file locks",
                "set HF_HUB_CACHE to a folder on a local disk",
                code="file_not_written",
            )
        case OSError():
            return DownloadError(
                f"{repository} cannot be stored in {cache}: {error_reason(error)}",
                f"{write_advice(error, cache, 'HF_HUB_CACHE')}; then try again to resume the download",
                code="file_not_written",
            )
    return DownloadError(f"{repository} cannot be downloaded: {error_reason(error)}", "try again later")


def _http_error(repository: str, status: int) -> DownloadError:
    match status:
        case 401 | 403:
            return DownloadError(
                f"access to {repository} was denied (status {status})",
                f"{_SIGN_IN} with a token that has access to it",
                code="access_denied",
            )
        case 404:
            return DownloadError(
                f"a file in {repository} no longer exists (status 404)",
                "try again, or choose another quantisation",
            )
        case 429:
            return DownloadError(
                "Hugging Face received too many requests (status 429)", "wait a few minutes and try again"
            )
    return DownloadError(f"Hugging Face could not provide {repository} (status {status})", "try again later")
