"""A worker's weight cache never gives llama.cpp an incomplete or modified file."""

from __future__ import annotations

import ctypes
import io
import os
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from edgespec.backends.llamacpp.native import ContextParams, ggml, library
from edgespec.backends.llamacpp.rpc import add_devices, guard_against_aborts
from edgespec.cluster import weight_cache
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.machines import LLAMA_CPP, Library, parse_machines
from edgespec.cluster.weight_cache import WeightCache, fnv1a
from edgespec.system.files import cache_folder
from tests.cluster.conftest import Worker

# llama.cpp caches only weights of more than 10 MiB.
_BYTES = 12 << 20


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)],
)
def test_published_values_of_the_hash(data: bytes, value: int) -> None:
    assert fnv1a(io.BytesIO(data), lambda: True) == value


def test_the_hash_of_several_blocks() -> None:
    data = np.random.default_rng(1).bytes(1_100_000)
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    assert fnv1a(io.BytesIO(data), lambda: True) == value


def put(folder: Path, data: bytes) -> Path:
    value = fnv1a(io.BytesIO(data), lambda: True)
    path = folder / f"{value:016x}"
    path.write_bytes(data)
    return path


def test_only_complete_files_are_shown(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 1 << 30)
    cache.prepare()
    whole, part = put(tmp_path, b"whole"), put(tmp_path, b"part")
    part.write_bytes(b"par")
    cache.prepare()
    assert not whole.exists()
    cache.verify(lambda: False)
    assert not whole.exists()
    cache.verify(lambda: True)
    assert whole.exists()
    assert not part.exists()
    cache.prepare()
    assert whole.read_bytes() == b"whole"
    state = whole.stat()
    whole.write_bytes(b"wholE")
    os.utime(whole, ns=(state.st_atime_ns, state.st_mtime_ns))
    cache.prepare()
    cache.verify(lambda: True)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".verified.json"]


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000, '{"a": 1}'], ids=list("abcd"))
def test_damaged_states_hide_all_files(text: str, tmp_path: Path) -> None:
    whole = put(tmp_path, b"whole")
    (tmp_path / ".verified.json").write_text(text)
    cache = WeightCache(tmp_path, 1 << 30)
    cache.prepare()
    assert not whole.exists()
    cache.verify(lambda: True)
    cache.prepare()
    assert whole.exists()


def test_hidden_files_count_for_the_size(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 10)
    cache.prepare()
    for age, data in enumerate([b"newest", b"middle", b"oldest"]):
        os.utime(put(tmp_path, data), (1e9 - age, 1e9 - age))
    cache.prepare()
    cache.verify(lambda: True)
    assert [path.read_bytes() for path in tmp_path.glob("[0-9a-f]*")] == [b"newest"]


def test_little_disk_space_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WeightCache(tmp_path, 10)
    monkeypatch.setattr(weight_cache, "_LOW_DISK_BYTES", 1)
    assert not cache.disk_warning()
    monkeypatch.setattr(weight_cache, "_LOW_DISK_BYTES", 1 << 62)
    assert f"the disk with the weight cache {tmp_path} has only " in cache.disk_warning()


def sent_weight(worker: Worker, data: bytes) -> bytes:
    """Send a weight to a worker as llama.cpp does, and return the data that the worker then has."""
    backend: Any = ggml()
    pointer = ctypes.c_void_p
    backend.ggml_backend_dev_init.restype, backend.ggml_backend_dev_init.argtypes = (
        pointer,
        [pointer, pointer],
    )
    backend.ggml_backend_buffer_set_usage.argtypes = [pointer, ctypes.c_int]
    workers = ConnectedWorkers(
        parse_machines("workers", worker.address), Library(LLAMA_CPP, library().__version__)
    )
    guard_against_aborts(workers)

    def send() -> bytes:
        ((device,),) = add_devices(workers)
        remote = backend.ggml_backend_dev_init(device, None)
        context = backend.ggml_init(ContextParams(1 << 16, None, True))
        tensor = backend.ggml_new_tensor_2d(context, 0, 1024, len(data) // 4096)
        buffer = backend.ggml_backend_alloc_ctx_tensors(context, remote)
        backend.ggml_backend_buffer_set_usage(buffer, 1)
        received = ctypes.create_string_buffer(len(data))
        backend.ggml_backend_tensor_set(tensor, data, 0, len(data))
        backend.ggml_backend_tensor_get(tensor, received, 0, len(data))
        backend.ggml_backend_buffer_free(buffer)
        backend.ggml_backend_free(remote)
        backend.ggml_free(context)
        return received.raw

    with closing(workers):
        return workers.call(send)


def shown(count: int) -> list[Path]:
    """Wait until the given number of files has been verified, and return them."""
    deadline, paths = monotonic() + 20, list[Path]()
    while len(paths) != count:
        assert monotonic() < deadline
        sleep(0.05)
        with suppress(OSError):
            paths = list((cache_folder() / "workers").glob("[0-9a-f]*[0-9a-f]"))
    return paths


@pytest.mark.long
def test_a_damaged_weight_is_sent_again(
    start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    worker = start_worker("--cache", "1GiB")
    data = np.random.default_rng(2).bytes(_BYTES)
    assert sent_weight(worker, data) == data
    (file,) = shown(1)
    assert file.read_bytes() == data
    os.truncate(file, _BYTES // 2)
    assert sent_weight(worker, data) == data
    (file,) = shown(1)
    assert file.read_bytes() == data
