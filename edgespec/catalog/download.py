"""Downloads models into the Hugging Face cache. Downloads are resumable, verified and cancellable.

`huggingface_hub` lists and locates the files. This module downloads them itself, because that library
discards partial files when a download is interrupted, and a model can take hours to download.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.backends.base import Progress
from edgespec.backends.mlx_files import missing_files, require_mlx
from edgespec.catalog.hub_files import (
    HubFile,
    cached_folder,
    cached_model,
    choose_files,
    choose_folder_files,
    holds_gguf,
    repository_folder,
)
from edgespec.errors import CancelledError, DownloadError, ModelNotFoundError
from edgespec.files import format_bytes, replace_when_written

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

__all__ = ["Progress", "RepositoryListing", "choose", "fetch", "list_repository", "translate_errors"]

_CHUNK_BYTES = 1 << 18
# Number of characters in a git hash and in a SHA-256 checksum. The server sends one of them as the ETag.
_GIT_ETAG_CHARACTERS, _SHA256_ETAG_CHARACTERS = 40, 64
# Number of attempts without progress after which a download fails, and the wait between attempts.
_MAX_RETRIES = 5
_RETRY_SECONDS = 1.0
# How long to wait while another program downloads the same file. Small files finish within this time.
_LOCK_SECONDS = 2.0


def fetch(
    repository: str,
    quantisation: str | None,
    *,
    allow_download: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Return the path of a Hugging Face model. Download the model if it is not in the cache.

    An interrupted download resumes where it stopped.

    Args:
        repository: `user/repo`.
        quantisation: The quantisation or file to select, as in `choose_files`.
        allow_download: Download the model if it is not in the cache.
        progress: Called during the download. Returning False cancels it.

    Returns:
        The first file of a GGUF model, or the folder of an MLX model.

    Raises:
        ModelNotFoundError: The repository or quantisation does not exist.
        BackendMissingError: The model is an MLX model, which cannot run on this machine.
        DownloadError: The download failed, for example because of the network or a full disk.
        CancelledError: `progress` returned False.
    """
    # Importing huggingface_hub takes 0.1 s, so import it only when it is needed.
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    cached = cached_model(cache, repository, quantisation)
    if cached is None and quantisation is None:
        cached = cached_folder(cache, repository)
    if cached is not None:
        return cached
    if not allow_download:
        raise ModelNotFoundError(
            f"{repository}{_suffix(quantisation)} is not on this machine",
            "allow the download, or specify the path of a file",
        )
    with translate_errors(repository):
        listing = list_repository(repository)
        files = choose(repository, listing.files, quantisation)
        folder = repository_folder(cache, repository)
        _check_disk(cache, repository, _missing_files(folder, listing, files))
        report = _Report(progress, sum(file.size_bytes for file in files))
        paths = [_fetch_file(folder, repository, file, listing.commit, report) for file in files]
    return paths[0] if holds_gguf(files) else _check_complete(paths[0].parent, repository)


def choose(repository: str, files: list[HubFile], quantisation: str | None) -> list[HubFile]:
    """Return the files to download. GGUF models are preferred over MLX models."""
    if holds_gguf(files):
        return choose_files(repository, files, quantisation)
    chosen = choose_folder_files(repository, files)
    if quantisation is not None:
        raise ModelNotFoundError(
            f"{repository} is an MLX model with one quantisation, so {quantisation} is not available",
            f"use {repository}, or a repository of the same model that ends in -GGUF",
        )
    require_mlx(repository)
    return chosen


def _check_complete(folder: Path, repository: str) -> Path:
    missing = missing_files(folder)
    if missing:
        raise DownloadError(
            f"{repository} is incomplete: it lacks {', '.join(missing[:3])}",
            "choose another repository of the same model",
        )
    return folder


def _suffix(quantisation: str | None) -> str:
    return f":{quantisation}" if quantisation else ""


@dataclass(frozen=True)
class RepositoryListing:
    """Lists the files in a repository at one commit, so that all files have the same version."""

    commit: str
    files: list[HubFile]


def list_repository(repository: str) -> RepositoryListing:
    """Return the files in a repository at the latest commit."""
    from huggingface_hub import HfApi, constants

    info = HfApi(endpoint=constants.ENDPOINT).model_info(repository, files_metadata=True)
    return RepositoryListing(
        info.sha or "", [HubFile(file.rfilename, file.size or 0) for file in info.siblings or ()]
    )


def _missing_files(folder: Path, listing: RepositoryListing, files: list[HubFile]) -> list[HubFile]:
    """Return the files that are not yet in the Hugging Face cache."""
    snapshot = folder / "snapshots" / listing.commit
    return [file for file in files if not listing.commit or not (snapshot / file.name).exists()]


def _check_disk(cache: Path, repository: str, files: list[HubFile]) -> None:
    """Raise DownloadError if the disk has too little free space for the files."""
    blobs = repository_folder(cache, repository) / "blobs"
    partial_bytes = sum(path.stat().st_size for path in blobs.glob("*.edgespec")) if blobs.is_dir() else 0
    needed_bytes = sum(file.size_bytes for file in files) - partial_bytes
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        raise DownloadError(
            f"{repository} needs {format_bytes(needed_bytes)}"
            f" and {cache} has {format_bytes(free_bytes)} free",
            "free some space, choose a smaller quantisation, or set HF_HOME to a folder on a larger disk",
        )


class _Report:
    """Reports the overall download progress of all of a model's files."""

    def __init__(self, progress: Progress | None, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = max(total_bytes, 1)
        self.finished_bytes = 0

    def __call__(self, file: HubFile, done_bytes: int) -> None:
        """Report how many bytes of `file` are downloaded. Raises CancelledError if the caller cancels."""
        fraction = min((self.finished_bytes + done_bytes) / self._total_bytes, 1.0)
        name = file.name.rsplit("/", 1)[-1]
        if self._progress is not None and not self._progress(
            f"downloading {name} ({format_bytes(self._total_bytes)})", fraction
        ):
            raise CancelledError(
                f"the download of {name} was cancelled at {fraction:.0%}",
                "start it again to resume it",
            )


@dataclass(frozen=True)
class _Source:
    """The URL of a file, its size and its checksum."""

    url: str
    size_bytes: int
    etag: str

    def new_digest(self) -> Any:
        """Return a new hash object. ETags are git hashes for small files, and SHA-256 for large files."""
        if len(self.etag) == _GIT_ETAG_CHARACTERS:
            return hashlib.sha1(b"blob %d\0" % self.size_bytes, usedforsecurity=False)
        return hashlib.sha256()

    def matches(self, digest: Any) -> bool:
        """Return whether the checksum is correct, or True if the server sent no checksum."""
        return (
            len(self.etag) not in (_GIT_ETAG_CHARACTERS, _SHA256_ETAG_CHARACTERS)
            or digest.hexdigest() == self.etag
        )


def _fetch_file(folder: Path, repository: str, file: HubFile, revision: str, report: _Report) -> Path:
    """Download a file into the cache and return its path.

    The cache stores file contents as blobs named by checksum. Each commit's folder links to its blobs.
    """
    from filelock import FileLock
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, file.name, revision=revision or None, endpoint=constants.ENDPOINT)
    metadata: HfFileMetadata = get_hf_file_metadata(url, endpoint=constants.ENDPOINT)
    etag, commit = metadata.etag, metadata.commit_hash
    if not etag or not commit:
        raise DownloadError(
            f"{constants.ENDPOINT} did not answer like Hugging Face",
            "check HF_ENDPOINT and the proxy settings",
        )
    size_bytes = metadata.size or file.size_bytes
    source = _Source(url, size_bytes, etag)
    blob = folder / "blobs" / etag
    pointer = folder / "snapshots" / commit / file.name
    lock = folder.parent / ".locks" / folder.name / f"{etag}.lock"
    for parent in (blob.parent, pointer.parent, lock.parent, folder / "refs"):
        parent.mkdir(parents=True, exist_ok=True)
    # Other programs use the same lock. Without it, two downloads of the same file would overwrite each other.
    with FileLock(lock, timeout=_LOCK_SECONDS):
        if not blob.exists():
            partial = blob.with_name(f"{etag}.edgespec")
            _stream(source, partial, lambda done: report(file, done))
            partial.replace(blob)
        if not pointer.exists():
            _link(blob, pointer)
    with replace_when_written(folder / "refs" / "main") as ref:
        ref.write_text(commit, encoding="utf-8")
    report.finished_bytes += size_bytes
    return pointer


def _link(blob: Path, pointer: Path) -> None:
    pointer.unlink(missing_ok=True)
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        # Windows does not allow symbolic links outside developer mode, so store the file itself in the
        # snapshot.
        shutil.move(blob, pointer)


def _stream(source: _Source, partial: Path, report: Callable[[int], None]) -> None:
    """Download the rest of a partial file and verify it. If an error occurs, keep the partial file."""
    import httpx2

    failures = 0
    digest = source.new_digest()
    with partial.open("a+b") as file:
        done_bytes = _digest_start(file, source, digest, report)
        while done_bytes < source.size_bytes or source.size_bytes == 0:
            before = done_bytes
            try:
                for restarted, chunk in _chunks(source.url, done_bytes):
                    if restarted:
                        file.truncate(0)
                        digest, done_bytes = source.new_digest(), 0
                    file.write(chunk)
                    digest.update(chunk)
                    done_bytes += len(chunk)
                    report(done_bytes)
            except httpx2.TransportError as error:
                failures = 0 if done_bytes > before else failures + 1
                if failures > _MAX_RETRIES:
                    raise DownloadError(
                        f"the connection was lost {failures} times at {format_bytes(done_bytes)} of"
                        f" {format_bytes(source.size_bytes)}: {_network_reason(error)}",
                        "try again later to resume the download",
                    ) from error
                time.sleep(_RETRY_SECONDS)
                continue
            break
    if source.size_bytes and done_bytes != source.size_bytes:
        problem = f"it has {done_bytes} bytes instead of {source.size_bytes}"
    elif not source.matches(digest):
        problem = "its checksum is wrong"
    else:
        return
    partial.unlink()
    raise DownloadError(
        f"the downloaded file {source.url.rsplit('/', 1)[-1]} is damaged: {problem}", "download it again"
    )


def _digest_start(file: Any, source: _Source, digest: Any, report: Callable[[int], None]) -> int:
    """Hash the partial file left by an earlier run into `digest`, and return its size.

    If the file is longer than expected, truncate it and start again.
    """
    if file.tell() > source.size_bytes:
        file.truncate(0)
    file.seek(0)
    done_bytes = 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        done_bytes += len(chunk)
        report(done_bytes)
    return done_bytes


def _chunks(url: str, start: int) -> Iterator[tuple[bool, bytes]]:
    """Yield the content of a URL from byte `start` to the end.

    Each chunk has a flag. It is True for the first chunk if the server ignored `start` and sends the whole
    file.
    """
    from huggingface_hub import constants, get_session, get_token

    token = get_token()
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream(
        "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
    ) as response:
        response.raise_for_status()
        restarted = start > 0 and response.status_code != 206
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            yield restarted, chunk
            restarted = False


def _network_reason(error: Exception) -> str:
    """Return the reason of a network error without the error number."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


@contextmanager
def translate_errors(repository: str) -> Iterator[None]:
    """Translate exceptions from `huggingface_hub`, the network and the disk into one-line edgespec errors."""
    import httpx2
    from filelock import Timeout
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    sign_in = "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise DownloadError(
            f"{repository} is not on this machine and offline mode is on",
            "unset HF_HUB_OFFLINE, or specify the path of a file",
        ) from error
    except GatedRepoError as error:
        raise DownloadError(
            f"{repository} is gated: you have to accept its licence first",
            f"accept it at {constants.ENDPOINT}/{repository}, then {sign_in}",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{constants.ENDPOINT} has no model repository {repository}, or you have no access to it",
            f"check the spelling; if it is private, {sign_in}",
        ) from error
    except (HfHubHTTPError, httpx2.HTTPStatusError) as error:
        raise _http_error(repository, error.response.status_code, sign_in) from error
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{repository} is not a valid repository name",
            "write it as user/repo or hf:user/repo:Q4_K_M",
        ) from error
    except httpx2.HTTPError as error:
        raise DownloadError(
            f"{constants.ENDPOINT} cannot be reached for {repository}: {_network_reason(error)}",
            "check the network and try again, or specify the path of a file",
        ) from error
    except Timeout as error:
        raise DownloadError(
            f"another program is downloading {repository}", "wait until it is done, then try again"
        ) from error
    except NotImplementedError as error:
        raise DownloadError(
            f"the file system of {constants.HF_HUB_CACHE} cannot lock files",
            "set HF_HOME to a folder on a local disk",
        ) from error
    except OSError as error:
        raise _disk_error(repository, error) from error


def _disk_error(repository: str, error: OSError) -> DownloadError:
    from huggingface_hub import constants

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"the disk of {constants.HF_HUB_CACHE} is full",
            "free some space and try again to resume the download",
        )
    return DownloadError(
        f"{repository} cannot be stored in {constants.HF_HUB_CACHE}: {error.strerror or error}",
        "make the folder writable, or set HF_HOME to another folder",
    )


def _http_error(repository: str, status: int, sign_in: str) -> DownloadError:
    if status in (401, 403):
        return DownloadError(
            f"access to {repository} was denied (status {status})",
            f"{sign_in} with a token that has access",
        )
    if status == 404:
        return DownloadError(
            f"a file of {repository} does not exist any more (status 404)",
            "try again, or choose another quantisation",
        )
    if status == 429:
        return DownloadError(
            f"Hugging Face received too many requests (status {status})", "wait a few minutes and try again"
        )
    return DownloadError(f"Hugging Face could not serve {repository} (status {status})", "try again later")
