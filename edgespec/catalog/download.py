"""Fetching a model from the hub into the cache that other tools share: resumed, checked, cancelled at will.

The hub's own library lists, signs and locates files; the bytes are streamed here, because it throws away
what came so far when a download is interrupted, and a model can be a day's worth of bytes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

Progress = Callable[[str, float], bool]
"""Called with what is going on and how far it is, 0 to 1; returning False cancels."""

_CHUNK_BYTES = 1 << 18
_GIT_ETAG, _SHA256_ETAG = 40, 64
_RETRIES = 5
_RETRY_SECONDS = 1.0
_LOCK_SECONDS = 2.0


def fetch(
    repository: str,
    quantisation: str | None,
    *,
    allow_download: bool = True,
    progress: Progress | None = None,
) -> Path:
    """A model of the hub, from the shared cache if it is there, downloaded if not.

    A GGUF model is its first file, one in MLX's form its folder. `quantisation` as in `choose_files`.
    An interrupted download is taken up where it stopped.
    Raises ModelNotFoundError (no such repository or quantisation), BackendMissingError (an MLX model that
    could not run here), DownloadError, CancelledError.
    """
    # Costs a tenth of a second, so only references to the hub pay for it.
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    found = cached_model(cache, repository, quantisation)
    if found is None and quantisation is None:
        found = cached_folder(cache, repository)
    if found is not None:
        return found
    if not allow_download:
        raise ModelNotFoundError(
            f"{repository}{_suffix(quantisation)} is not on this machine",
            "allow its download, or give the path of a file",
        )
    with translate_errors(repository):
        listing = list_repository(repository)
        files = choose(repository, listing.files, quantisation)
        folder = repository_folder(cache, repository)
        _check_disk(cache, repository, _absent(folder, listing, files))
        report = _Report(progress, sum(file.size_bytes for file in files))
        paths = [_fetch_file(folder, repository, file, listing.commit, report) for file in files]
    return paths[0] if holds_gguf(files) else _whole(paths[0].parent, repository)


def choose(repository: str, files: list[HubFile], quantisation: str | None) -> list[HubFile]:
    """The files to fetch: of the GGUF model, or where the repository holds none, of the MLX one."""
    if holds_gguf(files):
        return choose_files(repository, files, quantisation)
    chosen = choose_folder_files(repository, files)
    if quantisation is not None:
        raise ModelNotFoundError(
            f"{repository} is an MLX model of one quantisation, so there is no {quantisation} to choose",
            f"ask for {repository}, or for a repository of the same model that ends in -GGUF",
        )
    require_mlx(repository)
    return chosen


def _whole(folder: Path, repository: str) -> Path:
    missing = missing_files(folder)
    if missing:
        raise DownloadError(
            f"{repository} lacks {len(missing)} of its own files, such as {missing[0]}",
            "choose another repository of the same model",
        )
    return folder


def _suffix(quantisation: str | None) -> str:
    return f":{quantisation}" if quantisation else ""


@dataclass(frozen=True)
class RepositoryListing:
    """The files of a repository at one commit, so that all of a model is of one state."""

    commit: str
    files: list[HubFile]


def list_repository(repository: str) -> RepositoryListing:
    from huggingface_hub import HfApi, constants

    info = HfApi(endpoint=constants.ENDPOINT).model_info(repository, files_metadata=True)
    return RepositoryListing(
        info.sha or "", [HubFile(file.rfilename, file.size or 0) for file in info.siblings or ()]
    )


def _absent(folder: Path, listing: RepositoryListing, files: list[HubFile]) -> list[HubFile]:
    """Those of the files that an earlier download did not finish."""
    snapshot = folder / "snapshots" / listing.commit
    return [file for file in files if not listing.commit or not (snapshot / file.name).exists()]


def _check_disk(cache: Path, repository: str, files: list[HubFile]) -> None:
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
    """Turns bytes into calls of a Progress, over all parts of a model."""

    def __init__(self, progress: Progress | None, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = max(total_bytes, 1)
        self.finished_bytes = 0

    def __call__(self, file: HubFile, done_bytes: int) -> None:
        """Say how far `file` is. Raises CancelledError when the caller has had enough."""
        fraction = min((self.finished_bytes + done_bytes) / self._total_bytes, 1.0)
        name = file.name.rsplit("/", 1)[-1]
        if self._progress is not None and not self._progress(
            f"downloading {name} ({format_bytes(self._total_bytes)})", fraction
        ):
            raise CancelledError(
                f"the download of {name} was cancelled at {fraction:.0%}",
                "start it again and it goes on from there",
            )


@dataclass(frozen=True)
class _Source:
    """Where the bytes of one file come from and what they must add up to."""

    url: str
    size_bytes: int
    etag: str

    def new_digest(self) -> Any:
        """What the bytes go into: the hub names large files by their SHA-256, small ones as git does."""
        if len(self.etag) == _GIT_ETAG:
            return hashlib.sha1(b"blob %d\0" % self.size_bytes, usedforsecurity=False)
        return hashlib.sha256()

    def is_digest(self, digest: Any) -> bool:
        """Whether the checksum is right; so it is where the hub states none."""
        return len(self.etag) not in (_GIT_ETAG, _SHA256_ETAG) or digest.hexdigest() == self.etag


def _fetch_file(folder: Path, repository: str, file: HubFile, revision: str, report: _Report) -> Path:
    """Bring one file into the layout of the cache, blobs by checksum and snapshots of links; its path."""
    from filelock import FileLock
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, file.name, revision=revision or None, endpoint=constants.ENDPOINT)
    metadata: HfFileMetadata = get_hf_file_metadata(url, endpoint=constants.ENDPOINT)
    etag, commit = metadata.etag, metadata.commit_hash
    if not etag or not commit:
        raise DownloadError(
            f"{constants.ENDPOINT} does not answer as a model hub does",
            "check HF_ENDPOINT and the network's proxy",
        )
    size_bytes = metadata.size or file.size_bytes
    source = _Source(url, size_bytes, etag)
    blob = folder / "blobs" / etag
    pointer = folder / "snapshots" / commit / file.name
    lock = folder.parent / ".locks" / folder.name / f"{etag}.lock"
    for parent in (blob.parent, pointer.parent, lock.parent, folder / "refs"):
        parent.mkdir(parents=True, exist_ok=True)
    # The lock other users of the cache take: two downloads of one file would write over each other.
    with FileLock(lock, timeout=_LOCK_SECONDS):
        if not blob.exists():
            partial = blob.with_name(f"{etag}.edgespec")
            _stream(source, partial, lambda done: report(file, done))
            partial.replace(blob)
        if not pointer.exists():
            _link(blob, pointer)
    with replace_when_written(folder / "refs" / "main") as growing:
        growing.write_text(commit, encoding="utf-8")
    report.finished_bytes += size_bytes
    return pointer


def _link(blob: Path, pointer: Path) -> None:
    pointer.unlink(missing_ok=True)
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        # Where links are not allowed (Windows without developer mode) the snapshot holds the file itself.
        shutil.move(blob, pointer)


def _stream(source: _Source, partial: Path, report: Callable[[int], None]) -> None:
    """Append to `partial` until it is whole, then check it. Keeps what came when anything goes wrong."""
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
                if failures > _RETRIES:
                    raise DownloadError(
                        f"the connection was cut {failures} times at {format_bytes(done_bytes)} of"
                        f" {format_bytes(source.size_bytes)}: {error}",
                        "try again later; it goes on from there",
                    ) from error
                time.sleep(_RETRY_SECONDS)
                continue
            break
    if source.size_bytes and done_bytes != source.size_bytes:
        wrong = f"{done_bytes} bytes came where {source.size_bytes} were announced"
    elif not source.is_digest(digest):
        wrong = "its checksum is not the one the hub states"
    else:
        return
    partial.unlink()
    raise DownloadError(f"{source.url.rsplit('/', 1)[-1]} came damaged: {wrong}", "download it again")


def _digest_start(file: Any, source: _Source, digest: Any, report: Callable[[int], None]) -> int:
    """Take what an earlier run left in `file` into `digest`, nothing if it is too long; its size in bytes."""
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
    """The bytes of `url` from `start` on; True beside the first of them when the server began at 0 again."""
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


@contextmanager
def translate_errors(repository: str) -> Iterator[None]:
    """Turn what the hub's library, the network and the disk raise into one line each."""
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
            "unset HF_HUB_OFFLINE, or give the path of a file",
        ) from error
    except GatedRepoError as error:
        raise DownloadError(
            f"{repository} is gated: its owner wants its licence accepted first",
            f"accept it at {constants.ENDPOINT}/{repository}, then {sign_in}",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{constants.ENDPOINT} has no model repository {repository} that you may see",
            f"check the spelling; if it is private, {sign_in}",
        ) from error
    except (HfHubHTTPError, httpx2.HTTPStatusError) as error:
        raise _refused(repository, error.response.status_code, sign_in) from error
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{repository} is not a name a repository can have",
            "write it as user/repo or hf:user/repo:Q4_K_M",
        ) from error
    except httpx2.HTTPError as error:
        raise DownloadError(
            f"{constants.ENDPOINT} cannot be reached for {repository}: {str(error) or type(error).__name__}",
            "check the network and try again, or give the path of a file",
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
        raise _not_stored(repository, error) from error


def _not_stored(repository: str, error: OSError) -> DownloadError:
    from huggingface_hub import constants

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"the disk of {constants.HF_HUB_CACHE} is full",
            "free some space and try again; it goes on from where it stopped",
        )
    return DownloadError(
        f"{repository} cannot be stored in {constants.HF_HUB_CACHE}: {error.strerror or error}",
        "make the folder writable, or set HF_HOME to another",
    )


def _refused(repository: str, status: int, sign_in: str) -> DownloadError:
    if status in (401, 403):
        return DownloadError(
            f"access to {repository} was refused (status {status})",
            f"{sign_in} with a token that may read it",
        )
    if status == 404:
        return DownloadError(
            f"a file of {repository} is gone (status 404)", "try again, or choose another quantisation"
        )
    if status == 429:
        return DownloadError(
            f"the hub gets too many requests (status {status})", "wait a few minutes and try again"
        )
    return DownloadError(f"the hub failed on {repository} (status {status})", "try again later")
