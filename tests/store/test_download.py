"""Downloads from a hub with all the faults of a real network."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock
from huggingface_hub import constants, try_to_load_from_cache

from edgespec.errors import CancelledError, DownloadError, EdgespecError, ModelNotFoundError
from edgespec.store import download
from edgespec.store.download import fetch
from edgespec.system.files import replace_when_written
from tests.raising import raises
from tests.store.stand_in_hub import REPOSITORY, StandInHub

Q4 = "tiny-Q4_K_M.gguf"


class Usage(NamedTuple):
    """What `shutil.disk_usage` returns."""

    total: int
    used: int
    free: int


class Seen:
    """Record progress without cancelling."""

    def __init__(self) -> None:
        self.fractions: list[float] = []

    def __call__(self, what: str, fraction: float) -> bool:
        assert what.startswith(("downloading tiny-", "downloading mmproj-tiny-"))
        self.fractions.append(fraction)
        return True


def partial_files(cache: Path) -> list[Path]:
    return list(cache.rglob("*.edgespec"))


@pytest.fixture
def without_projector(hub: StandInHub) -> None:
    """Remove the projector, which is downloaded first, so that the first faults affect the model."""
    del hub.files["mmproj-tiny-f16.gguf"]


def test_the_default_quantisation_is_stored_in_the_shared_cache(hub: StandInHub, cache: Path) -> None:
    seen = Seen()
    path = fetch(REPOSITORY, None, progress=seen)
    assert path.read_bytes() == hub.files[Q4]
    assert try_to_load_from_cache(REPOSITORY, Q4, cache_dir=cache) == str(path)
    assert seen.fractions == sorted(seen.fractions)
    assert seen.fractions[-1] == 1.0
    assert not partial_files(cache)


def test_a_cached_model_needs_no_network(hub: StandInHub) -> None:
    first = fetch(REPOSITORY, "q4_k_m")
    hub.stop()
    asked = len(hub.requests)
    assert fetch(REPOSITORY, "Q4_K_M") == first
    assert fetch(REPOSITORY, None) == first
    assert len(hub.requests) == asked


def test_a_split_model_is_downloaded_completely(hub: StandInHub) -> None:
    seen = Seen()
    path = fetch(REPOSITORY, "Q8_0", progress=seen)
    assert path.name == "tiny-Q8_0-00001-of-00002.gguf"
    assert (path.parent / "tiny-Q8_0-00002-of-00002.gguf").read_bytes().endswith(b"bbb")
    assert seen.fractions == sorted(seen.fractions)
    assert seen.fractions[-1] == 1.0


def test_an_incomplete_split_model_is_not_used_from_the_cache(hub: StandInHub) -> None:
    path = fetch(REPOSITORY, "Q8_0")
    (path.parent / "tiny-Q8_0-00002-of-00002.gguf").resolve().unlink()
    assert fetch(REPOSITORY, "Q8_0") == path
    assert (path.parent / "tiny-Q8_0-00002-of-00002.gguf").exists()


def test_an_interrupted_download_of_a_projector_is_resumed(hub: StandInHub) -> None:
    with raises(CancelledError, "mmproj"):
        fetch(REPOSITORY, None, progress=lambda what, _: "mmproj" not in what)
    projector = fetch(REPOSITORY, None).with_name("mmproj-tiny-f16.gguf")
    assert projector.read_bytes() == hub.files[projector.name]


@pytest.mark.usefixtures("without_projector")
def test_a_lost_connection_is_resumed(hub: StandInHub) -> None:
    hub.cut_after_bytes = [600_000, 300_000]
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]
    assert len(hub.ranges) == 2
    assert "bytes=0-" not in hub.ranges


@pytest.mark.usefixtures("without_projector")
def test_a_connection_that_is_lost_repeatedly_fails_and_resumes_later(hub: StandInHub, cache: Path) -> None:
    hub.cut_after_bytes = [600_000, *[0] * 6]
    with raises(DownloadError, "6 times", code="download_interrupted"):
        fetch(REPOSITORY, None)
    kept = partial_files(cache)[0].stat().st_size
    assert kept > 0
    hub.ranges.clear()
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]
    assert hub.ranges == [f"bytes={kept}-"]


@pytest.mark.usefixtures("without_projector")
def test_a_stalled_connection_is_resumed(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.stall_after_bytes = [600_000]
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]
    (taken_up,) = hub.ranges
    assert taken_up != "bytes=0-"


@pytest.mark.usefixtures("without_projector")
def test_a_redirect_does_not_forward_the_token(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub redirects to a server for large files, which must not receive the token."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.elsewhere = hub.url.replace("127.0.0.1", "localhost")
    hub.cut_after_bytes = [600_000]
    path = fetch(REPOSITORY, None)
    assert path.read_bytes() == hub.files[Q4]
    assert path.resolve().name == hashlib.sha256(hub.files[Q4]).hexdigest()
    assert "Bearer secret" in hub.tokens["127.0.0.1"]
    assert hub.tokens["localhost"] == {""}


def test_a_server_without_range_support_restarts_the_file(hub: StandInHub, cache: Path) -> None:
    with pytest.raises(CancelledError):
        fetch(REPOSITORY, None, progress=lambda _, fraction: fraction < 0.5)
    hub.takes_ranges = False
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]
    assert len(hub.ranges) == 1


def test_a_partial_file_with_wrong_bytes_is_deleted(hub: StandInHub, cache: Path) -> None:
    with pytest.raises(CancelledError):
        fetch(REPOSITORY, None, progress=lambda _, fraction: fraction < 0.5)
    (leftover,) = partial_files(cache)
    leftover.write_bytes(bytes(leftover.stat().st_size))
    with raises(DownloadError, "its checksum", code="download_damaged"):
        fetch(REPOSITORY, None)
    assert not partial_files(cache)
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]


def test_a_complete_partial_file_is_verified_and_used(hub: StandInHub, cache: Path) -> None:
    with pytest.raises(CancelledError):
        fetch(REPOSITORY, None, progress=lambda _, fraction: fraction < 0.5)
    partial_files(cache)[0].write_bytes(hub.files[Q4])
    hub.requests.clear()
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]
    fetched = [request for request in hub.requests if request.startswith("GET") and "resolve" in request]
    assert not any(Q4 in request for request in fetched)


@pytest.mark.usefixtures("without_projector")
def test_a_killed_download_is_resumed_later(hub: StandInHub, cache: Path) -> None:
    hub.stall_after_bytes = [600_000]
    code = f"from edgespec.store.download import fetch; fetch({REPOSITORY!r}, None)"
    settings = {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | settings) as process:
        deadline = time.monotonic() + 30
        while not any(path.stat().st_size for path in partial_files(cache)) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    kept = partial_files(cache)[0].stat().st_size
    assert 0 < kept < len(hub.files[Q4])
    with raises(ModelNotFoundError, code="model_not_downloaded"):
        fetch(REPOSITORY, None, allow_download=False)
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]
    assert hub.ranges == [f"bytes={kept}-"]


def test_cancelling_keeps_the_partial_file(hub: StandInHub, cache: Path) -> None:
    with raises(CancelledError, "cancelled at"):
        fetch(REPOSITORY, None, progress=lambda _, fraction: fraction < 0.5)
    assert 0 < partial_files(cache)[0].stat().st_size < len(hub.files[Q4])
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]


def test_a_partial_file_that_is_too_long_is_deleted(hub: StandInHub, cache: Path) -> None:
    with pytest.raises(CancelledError):
        fetch(REPOSITORY, None, progress=lambda _, fraction: fraction < 0.5)
    partial_files(cache)[0].write_bytes(bytes(len(hub.files[Q4]) + 1))
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]


def test_damaged_files_are_deleted(hub: StandInHub, cache: Path) -> None:
    hub.damaged = True
    with raises(DownloadError, code="download_damaged"):
        fetch(REPOSITORY, None)
    assert not partial_files(cache)
    hub.damaged = False
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]


def test_an_unknown_quantisation_lists_the_available_ones(hub: StandInHub) -> None:
    with raises(ModelNotFoundError, "Q5_K_M", "Q4_K_M, Q8_0", code="quantisation_unavailable"):
        fetch(REPOSITORY, "Q5_K_M")


@pytest.mark.parametrize(
    ("status", "code", "kind", "line"),
    [
        (401, "GatedRepo", DownloadError, "is gated.*accept it at .*hf auth login"),
        (403, "GatedRepo", DownloadError, "is gated"),
        (401, "RepoNotFound", ModelNotFoundError, "no model repository someone/tiny-GGUF.*hf auth login"),
        (401, "", DownloadError, "denied .status 401.*hf auth login"),
        (403, "", DownloadError, "denied .status 403"),
        (404, "RepoNotFound", ModelNotFoundError, "no model repository .*check the spelling"),
        (429, "", DownloadError, "too many requests.*wait"),
        (400, "", DownloadError, "could not provide .*status 400"),
    ],
)
def test_http_errors_are_one_line(
    hub: StandInHub, status: int, code: str, kind: type[EdgespecError], line: str
) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(kind, match=line) as caught:
        fetch(REPOSITORY, None)
    assert "\n" not in str(caught.value)
    assert caught.value.next_step


def test_a_misspelt_repository_of_the_catalogue_is_named(hub: StandInHub) -> None:
    hub.status, hub.error_code = 404, "RepoNotFound"
    with raises(ModelNotFoundError, "bartowski/SmolLM2-360M-Instruct-GGUF"):
        fetch("bartowsky/smollm2-360m-instruct-gguf", None)


def test_the_token_is_sent(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with raises(DownloadError, "gated", code="access_denied"):
        fetch(REPOSITORY, None)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetch(REPOSITORY, None).name == Q4


def test_unreachable_hub() -> None:
    with raises(DownloadError, code="network_unreachable"):
        fetch(REPOSITORY, None)


def test_offline_mode(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with raises(DownloadError, code="offline"):
        fetch(REPOSITORY, None)
    assert not hub.requests


def test_no_download_unless_allowed(hub: StandInHub) -> None:
    with raises(ModelNotFoundError, code="model_not_downloaded"):
        fetch(REPOSITORY, "Q4_K_M", allow_download=False)
    assert not hub.requests


def test_disk_space_is_checked_before_the_download(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000, 0, 1000))
    with raises(DownloadError, "1.0 MiB", "1.0 KiB", code="disk_full"):
        fetch(REPOSITORY, None)
    assert not any("resolve" in request for request in hub.requests)


@pytest.mark.usefixtures("without_projector")
def test_a_partial_file_of_another_quantisation_saves_no_disk_space(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CancelledError):
        fetch(REPOSITORY, None, progress=lambda _, fraction: fraction < 0.9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 100_000))
    with raises(DownloadError, "781 KiB", code="disk_full"):
        fetch(REPOSITORY, "Q8_0")
    # The rest of the first file fits.
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]


def test_a_file_size_limit_keeps_the_partial_file(hub: StandInHub, cache: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, before[1]))
    try:
        with pytest.raises(
            DownloadError, match="the file size limit was reached; raise the limit .* or set HF_HUB_CACHE"
        ):
            fetch(REPOSITORY, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert 0 < partial_files(cache)[0].stat().st_size <= 600_000
    assert fetch(REPOSITORY, None).read_bytes() == hub.files[Q4]


def test_another_program_downloading_the_same_file(hub: StandInHub, cache: Path) -> None:
    fetch(REPOSITORY, None)
    lock = next(cache.rglob("*.lock"))
    shutil.rmtree(next(cache.glob("models--*")))
    with FileLock(lock), raises(DownloadError, code="file_in_use"):
        fetch(REPOSITORY, None)


def test_a_download_waits_for_another_program_that_makes_progress(
    hub: StandInHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_POLL_SECONDS", 0.01, raising=False)
    with pytest.raises(CancelledError):
        fetch(REPOSITORY, None, progress=lambda *_: False)
    (started,) = partial_files(cache)  # The projector.
    lock = FileLock(next(cache.rglob(f"{started.stem}.lock")))
    lock.acquire()
    waited = 0

    def progress(_what: str, _fraction: float) -> bool:
        nonlocal waited
        if lock.is_locked:
            # The waits together take longer than `_LOCK_SECONDS`.
            waited += 1
            with started.open("ab") as file:
                file.write(b"GGUF projector")
            if waited == 20:
                lock.release()
        return True

    assert fetch(REPOSITORY, None, progress=progress).read_bytes() == hub.files[Q4]
    assert waited == 20


@pytest.mark.usefixtures("without_projector")
def test_downloads_from_one_repository_take_turns_to_write_its_ref(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[Path] = []
    together = threading.Event()

    @contextmanager
    def slow(path: Path) -> Iterator[Path]:
        inside.append(path)
        if len(inside) > 1:
            together.set()
        together.wait(0.2)  # Gives the other download time to arrive.
        try:
            with replace_when_written(path) as temporary:
                yield temporary
        finally:
            inside.remove(path)

    monkeypatch.setattr(download, "replace_when_written", slow)
    monkeypatch.setattr(download, "_LOCK_SECONDS", 60)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(partial(fetch, REPOSITORY), ["Q4_K_M", "Q8_0"]))
    assert not together.is_set()
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("name", ["../../../../out", "{folder}/out", r"..\out", "C:out", r"C:\out"])
def test_file_names_that_lead_out_of_the_cache_are_ignored(
    hub: StandInHub, tmp_path: Path, cache: Path, name: str
) -> None:
    hub.files = {f"{name.format(folder=tmp_path)}-Q4_K_M.gguf": b"GGUF"}
    with raises(ModelNotFoundError, code="repository_unusable"):
        fetch(REPOSITORY, None)
    assert not cache.exists()


@pytest.mark.parametrize("etag", ["../../../out", "..", r"..\out", "C:out"])
def test_checksums_that_lead_out_of_the_cache_are_refused(
    hub: StandInHub, cache: Path, monkeypatch: pytest.MonkeyPatch, etag: str
) -> None:
    monkeypatch.setattr("tests.store.stand_in_hub._etag", lambda _: etag)
    with raises(DownloadError):
        fetch(REPOSITORY, None)
    assert not cache.exists()


def test_a_server_that_is_not_a_hub(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.store.stand_in_hub.COMMIT", "")
    with raises(DownloadError, "not seem to be"):
        fetch(REPOSITORY, None)
