"""Models larger than memory, part of whose weights are read from disk in every pass."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.backends.llamacpp import devices, loading, native, weight_stream
from edgespec.backends.llamacpp.context_plan import MAX_WIDTH
from edgespec.backends.llamacpp.devices import Gpu
from edgespec.backends.llamacpp.loading import free_weights, load_all
from edgespec.backends.llamacpp.memory_estimate import GgufMemoryEstimator
from edgespec.backends.llamacpp.model import load, load_slots
from edgespec.backends.llamacpp.weight_stream import (
    LAYERS_IN_MEMORY,
    WeightStream,
    can_stream,
    saved_bytes,
    spread_evenly,
    streamable_layers,
)
from edgespec.cli.program import program
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, MemoryBudgetError, ModelFileError
from edgespec.loading import pair_estimate, planning, speed_prediction
from edgespec.loading.constants import STREAMED_ROWS
from edgespec.loading.prepare.gguf_parts import GgufParts, write_gguf
from edgespec.memory.budget import Limit
from edgespec.memory.constants import SHORT_CONTEXT_TOKENS
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.plan import Streaming
from edgespec.memory.pressure import MemoryPressure
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.machine_speed import MachineSpeed, TypeSpeed
from edgespec.model.base import LanguageModel, LoadOptions
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.formats.gguf_metadata import tensor_bytes
from tests.backends.contract import Rows, row_of, step, step_all, tokens_for
from tests.backends.tiny_gguf import finish
from tests.backends.tiny_models import write_deci, write_llama
from tests.backends.tiny_mtp_models import write_mtp_model
from tests.raising import raises

pytestmark = pytest.mark.skipif(not can_stream(), reason="weights are streamed only on a Linux CPU")

_OPTIONS = LoadOptions(context_tokens=512, repack=False)
_ALL = 100
_STREAMED = replace(_OPTIONS, streamed_layers=_ALL)


def _load(path: Path, layers: int = _ALL) -> LanguageModel:
    return load(str(path), "demo", replace(_OPTIONS, streamed_layers=layers))


@pytest.fixture
def copy(demo_target: Path, tmp_path: Path) -> Path:
    """A copy of the demo model that a test may damage."""
    return Path(shutil.copy(demo_target, tmp_path / "copy.gguf"))


@pytest.fixture
def model(copy: Path) -> Iterator[LanguageModel]:
    model = _load(copy)
    yield model
    model.close()


@pytest.fixture(scope="module")
def expected(demo_target: Path) -> list[Rows]:
    """Return the logits of a prompt, two steps and a wide pass, with all weights in memory."""
    return _rows_of(demo_target)


def _rows(model: LanguageModel) -> list[Rows]:
    model.truncate(0)
    tokens = tokens_for(model, 60)
    rows = [step_all(model, tokens[:40]), step(model, tokens[40])]
    logits = model.verify(TokenTree.chain(tokens[41], tokens[42:50]))
    rows += [row_of(model, logits, row) for row in range(9)]
    model.commit((1, 2))
    return [*rows, step(model, tokens[50])]


def _rows_of(path: Path, options: LoadOptions = _OPTIONS) -> list[Rows]:
    model = load(str(path), "model", options)
    rows = _rows(model)
    model.close()
    return rows


def _steps(model: LanguageModel, count: int = 8) -> None:
    for token in tokens_for(model, count):
        step(model, token)


def _same(found: list[Rows], expected: list[Rows]) -> bool:
    return np.array_equal(np.array(found), np.array(expected))


@pytest.mark.long
@pytest.mark.parametrize("layers", [1, 3, _ALL])
def test_logits_are_the_same_bits_as_with_all_weights_in_memory(
    demo_target: Path, expected: list[Rows], layers: int
) -> None:
    model = _load(demo_target, layers)
    for _ in range(2):
        assert _same(_rows(model), expected)
    model.close()


@pytest.mark.long
def test_replies_that_share_passes_share_the_stream(demo_target: Path, expected: list[Rows]) -> None:
    options = replace(_STREAMED, parallel=2)
    first, second = load_slots(str(demo_target), "demo", options)
    for model in (first, second, first):
        assert _same(_rows(model), expected)
    first.close()
    second.close()


def test_streamed_layers_are_spread_over_the_model(demo_target: Path) -> None:
    layers = streamable_layers(demo_target)
    assert 0 not in [layer.layer for layer in layers]
    for count in range(1, len(layers) + 1):
        chosen = [layer.layer for layer in spread_evenly(layers, count)]
        assert chosen == sorted(set(chosen))
        assert len(chosen) == count
        assert np.diff([0, *chosen]).max() <= len(layers) // count + 1
    assert saved_bytes(layers[:LAYERS_IN_MEMORY]) == 0
    assert saved_bytes(layers) == sum(layer.size_bytes for layer in layers[LAYERS_IN_MEMORY:])


def _memory_bytes() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))


@pytest.mark.real
def test_streamed_weights_take_up_no_memory(real_models: Path) -> None:
    path = real_models / "smollm2-f16.gguf"
    before = _memory_bytes()
    model = _load(path)
    step_all(model, tokens_for(model, 40))
    used = _memory_bytes() - before
    kept = path.stat().st_size - saved_bytes(streamable_layers(path))
    assert used < kept + model.facts.kv_bytes + (48 << 20)
    model.close()


def test_weights_can_be_larger_than_the_memory_of_this_machine() -> None:
    size_bytes = (
        2 * (psutil.virtual_memory().total + psutil.swap_memory().total) // mmap.PAGESIZE * mmap.PAGESIZE
    )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | weight_stream._MAP_NORESERVE
    libc = weight_stream._libc()
    begin = libc.mmap(None, size_bytes, mmap.PROT_READ, flags, -1, 0)
    try:
        weight_stream.replace_mapping(begin, begin + size_bytes)
        ctypes.memset(begin + size_bytes - 1, 1, 1)
    finally:
        libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(size_bytes))


def test_bytes_after_the_last_tensor_are_not_streamed(tmp_path: Path) -> None:
    """llama.cpp does not map them, so reading them would overwrite other memory."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    finish(writer, {f"blk.{layer}.ffn_up.weight": np.ones((64, 64), np.float32) for layer in (0, 1)})
    (layer,) = streamable_layers(path)
    with path.open("ab") as file:
        file.write(bytes(64 << 10))
    assert streamable_layers(path) == [layer]


@pytest.mark.parametrize("layers", [0, _ALL])
def test_layers_that_only_draft_need_no_memory_unless_they_are_loaded(tmp_path: Path, layers: int) -> None:
    path = write_mtp_model(tmp_path / "mtp.gguf", "glm4moe")
    options = replace(_OPTIONS, streamed_layers=layers)
    estimator = GgufMemoryEstimator(str(path), "mtp")
    estimate = estimator.estimate(options)
    estimator.close()
    # llama.cpp rounds the size of the cache in its log.
    limit_bytes = estimate.bytes_of("weights") + estimate.bytes_of("cache") + (8 << 10)
    assert limit_bytes < path.stat().st_size
    model = load(str(path), "mtp", replace(options, memory_bytes=limit_bytes))
    step(model, 5)
    model.close()


@pytest.mark.parametrize("own_head", [False, True])
def test_layers_that_only_draft_are_not_read_unless_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_head: bool
) -> None:
    source = GgufParts([write_mtp_model(tmp_path / "source.gguf", "glm4moe")])
    # Converters write them before the last norm, so llama.cpp maps them.
    tensors = dict(sorted(source.tensors.items(), key=lambda item: item[0] == "output_norm.weight"))
    path = tmp_path / "mtp.gguf"
    write_gguf(path, source.architecture, source.metadata(0, source.layer_count), tensors)
    read_bytes, read = 0, WeightStream._load

    def count(self: WeightStream, part: Any) -> None:
        nonlocal read_bytes
        read_bytes += part.size_bytes
        read(self, part)

    with monkeypatch.context() as counting:
        counting.setattr(WeightStream, "_load", count)
        counting.setattr(WeightStream, "_run", lambda self: None)
        model = load_all(str(path), "mtp", replace(_OPTIONS, streamed_layers=_ALL, own_head=own_head), None)
    free_weights(*model)
    drafting_bytes = sum(
        size for name, size in tensor_bytes(path, read_header(path)) if name.startswith("blk.2.")
    )
    without = (
        path.stat().st_size - sum(layer.size_bytes for layer in streamable_layers(path)) - drafting_bytes
    )
    assert (read_bytes > without + drafting_bytes // 2) == own_head


def _slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    read = WeightStream._load

    def slowly(self: WeightStream, part: Any) -> None:
        time.sleep(seconds)
        read(self, part)

    monkeypatch.setattr(WeightStream, "_load", slowly)


def test_a_pass_that_waits_for_the_disk_can_be_interrupted(
    copy: Path, expected: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as slow:
        model = _load(copy)
        _slow(slow, 0.5)
        for _ in range(2):
            threading.Timer(0.3, model.interrupt, [True]).start()
            with pytest.raises(CancelledError):
                _steps(model)
            model.interrupt(False)
    assert _same(_rows(model), expected)
    model.close()


@pytest.mark.parametrize("method", ["is_stop", "on_layer", "_release"])
def test_ctrl_c_cancels_a_pass(
    model: LanguageModel, expected: list[Rows], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    native._resend_interrupts_in_callbacks()

    called = getattr(WeightStream, method)

    def interrupted(*arguments: object) -> bool:
        interrupting.undo()
        called(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupting:
        interrupting.setattr(WeightStream, method, interrupted)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            try:
                step_all(model, tokens_for(model, 40))
            except CancelledError:
                time.sleep(10)
    assert _same(_rows(model), expected)


@pytest.mark.parametrize("place", ["starting to read", "reading"])
def test_a_lack_of_memory_ends_one_reply(
    model: LanguageModel, expected: list[Rows], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*_: object) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory") if place == "reading" else MemoryError

    with monkeypatch.context() as short:
        if place == "reading":
            short.setattr(os, "preadv", fail)
        else:
            short.setattr(model._stream._pool, "submit", fail)  # type: ignore[attr-defined]
        with raises(BackendError, "not enough memory", code="out_of_memory"):
            _steps(model)
    assert _same(_rows(model), expected)


def test_less_is_read_ahead_while_memory_is_low(
    model: LanguageModel, copy: Path, expected: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_stream, "_CHECK_SECONDS", 0.01)
    read_layer, free, keep = WeightStream._read_layer, WeightStream._free, WeightStream._release
    stream, limit_bytes = model._stream, 1 << 40  # type: ignore[attr-defined]
    with stream._state:
        assert stream._state.wait_for(lambda: not stream._has_room, 20)
    held = {layer.layer for layer in streamable_layers(copy)[:LAYERS_IN_MEMORY]}
    most, shrunk, grown = 0, threading.Event(), threading.Event()

    def read(self: WeightStream, layer: Any, *arguments: Any) -> BackendError | None:
        nonlocal most
        held.add(layer.layer)
        most = max(most, len(held))
        if len(held) == LAYERS_IN_MEMORY:
            grown.set()
        return read_layer(self, layer, *arguments)

    def release(self: WeightStream, layer: Any) -> None:
        held.discard(layer.layer)
        if not held:
            shrunk.set()
        free(self, layer)

    def keep_memory(self: WeightStream, layer: Any) -> None:
        held.discard(layer.layer)
        keep(self, layer)

    monkeypatch.setattr(WeightStream, "_read_layer", read)
    monkeypatch.setattr(WeightStream, "_free", release)
    monkeypatch.setattr(WeightStream, "_release", keep_memory)
    MemoryPressure(ResizableContext(model), available=lambda: limit_bytes)
    limit_bytes = 0
    assert shrunk.wait(20)
    most = 0
    assert _same(_rows(model), expected)
    assert most == 1
    limit_bytes = 1 << 40
    assert grown.wait(20)
    assert _same(_rows(model), expected)
    assert most == LAYERS_IN_MEMORY


@pytest.mark.parametrize("flags", [weight_stream._MREMAP_FLAGS, 1 << 30])
def test_memory_of_a_computed_layer_is_used_for_the_next_one(
    copy: Path, expected: list[Rows], monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    """A kernel that cannot move pages to another address gives new ones."""
    moved, move_pages = [], weight_stream.move_pages

    def record(begin: int, end: int, size_bytes: int) -> None:
        moved.append((begin, end))
        move_pages(begin, end, size_bytes)

    monkeypatch.setattr(weight_stream, "_MREMAP_FLAGS", flags)
    monkeypatch.setattr(weight_stream, "move_pages", record)
    model = _load(copy)
    for _ in range(2):
        assert _same(_rows(model), expected)
    model.close()
    assert moved
    assert all(begin != end for begin, end in moved)


def test_a_failure_to_find_out_the_free_memory_does_not_end_the_reader(
    model: LanguageModel, expected: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def fail() -> int:
        asked.set()
        raise OSError("/proc is gone")

    monkeypatch.setattr(weight_stream, "_CHECK_SECONDS", 0.01)
    model.watch_memory(fail)
    assert asked.wait(20)
    assert _same(_rows(model), expected)


def test_weights_are_awaited_after_a_layer_without_feed_forward_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_deci(tmp_path / "deci.gguf", layers=8, without_feed_forward=3)
    assert (4, 2) in [(layer.layer, layer.before) for layer in streamable_layers(path)]
    expected = _rows_of(path)
    with monkeypatch.context() as slow:
        model = _load(path)
        _slow(slow, 0.02)
        assert _same(_rows(model), expected)
        model.close()


@pytest.mark.long
@pytest.mark.parametrize("missed", [1, 5])
def test_a_pass_that_does_not_wait_for_a_layer_fails(
    demo_target: Path, expected: list[Rows], monkeypatch: pytest.MonkeyPatch, missed: int
) -> None:
    model = _load(demo_target, 3)
    with monkeypatch.context() as broken:
        is_stop = WeightStream.is_stop
        broken.setattr(
            WeightStream, "is_stop", lambda self, name: name != b"l_out-%d" % missed and is_stop(self, name)
        )
        for _ in range(2):
            with pytest.raises(CapabilityError):
                _steps(model)
    assert _same(_rows(model), expected)
    model.close()


def test_the_first_layers_do_not_run_alone_if_the_last_of_them_has_no_name(tmp_path: Path) -> None:
    path = write_deci(tmp_path / "deci.gguf", layers=16, without_feed_forward=3)
    expected = _rows_of(path)
    model = _load(path)
    assert not model.run_first_layers(True)
    assert _same(_rows(model), expected)
    model.close()


def test_passes_over_the_first_layers_read_only_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of exactness runs dozens of them."""
    path = write_llama(tmp_path / "deep.gguf", layers=16)
    expected = _rows_of(path)
    model = _load(path)
    assert model.run_first_layers(True)
    read, read_layer = set(), WeightStream._read_layer

    def record(self: WeightStream, layer: Any, *arguments: Any) -> BackendError | None:
        read.add(layer.layer)
        return read_layer(self, layer, *arguments)

    with monkeypatch.context() as recording:
        recording.setattr(WeightStream, "_read_layer", record)
        for token in range(5, 8):
            model.verify(TokenTree.chain(token))
            model.commit(())
    assert read == {1, 2, 3}
    model.run_first_layers(False)
    assert _same(_rows(model), expected)
    model.close()


def test_layers_that_only_draft_are_not_streamed(tmp_path: Path) -> None:
    """In a model with two files, only the first one specifies the number of layers."""
    for number, layers in enumerate(((0, 1), (2, 3))):
        writer = gguf.GGUFWriter(tmp_path / f"model-0000{number + 1}-of-00002.gguf", "glm4moe")
        if number == 0:
            writer.add_block_count(4)
            writer.add_nextn_predict_layers(1)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        finish(writer, {f"blk.{layer}.ffn_up.weight": np.ones((64, 64), np.float32) for layer in layers})
    found = streamable_layers(tmp_path / "model-00001-of-00002.gguf")
    assert [layer.layer for layer in found] == [1, 2]


@pytest.mark.parametrize("fused", [False, True])
def test_all_experts_are_streamed(tmp_path: Path, fused: bool) -> None:
    """This includes shared experts, and experts whose gate and up projections are one tensor."""
    path = write_mtp_model(tmp_path / "moe.gguf", "cohere2moe", mtp_layers=0, fuse_experts=fused)
    tensors = [each for each in read_header(path).tensors if re.search(r"1\.ffn_.*_(exps|shexp)", each.name)]
    assert len(tensors) == (5 if fused else 6)
    (layer,) = streamable_layers(path)
    tensor_bytes = sum(4 * int(np.prod(each.shape)) for each in tensors)
    # Pages at the ends of a tensor that also contain other weights are not streamed.
    assert 0 <= tensor_bytes - layer.size_bytes < 2 * mmap.PAGESIZE * len(tensors)
    expected = _rows_of(path)
    assert _same(_rows_of(path, _STREAMED), expected)


def test_a_model_is_closed_while_it_reads(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _load(copy)
    _slow(monkeypatch, 0.2)
    step(model, 5)
    model.close()


_NOT_CLOSED = """
import sys
from edgespec.backends.llamacpp.model import load
from edgespec.model.base import LoadOptions
from tests.backends.contract import step
model = load(sys.argv[1], "demo", LoadOptions(context_tokens=512, repack=False, streamed_layers=100))
for token in range(5, 25):
    step(model, token)
"""


def test_a_program_can_end_without_closing_the_model(demo_target: Path) -> None:
    command = [sys.executable, "-c", _NOT_CLOSED, str(demo_target)]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_paths_can_contain_separators_of_lines(
    demo_target: Path, expected: list[Rows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a\f \r\u2028b"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    assert _same(_rows_of(demo_target, _STREAMED), expected)


def test_a_cache_folder_in_memory_does_not_hold_the_model(
    demo_target: Path, expected: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "stores_holes", lambda path: True)
    mapped, load_files = [], loading.load_files

    def record(paths: Any, *arguments: Any, **options: Any) -> Any:
        mapped.extend(paths)
        return load_files(paths, *arguments, **options)

    monkeypatch.setattr(loading, "load_files", record)
    model = _load(demo_target)
    assert mapped == [str(demo_target)]
    assert _same(_rows(model), expected)
    model.close()


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_file_that_changes_while_it_is_loaded_is_refused(copy: Path, change: str) -> None:
    other = Path(shutil.copy(copy, copy.with_name("other.gguf")))

    def replace_file(what: str, fraction: float) -> bool:
        if change == "deleted" and "stay in memory" in what:
            copy.unlink(missing_ok=True)
        elif change == "replaced" and other.exists():
            other.replace(copy)
        return True

    with raises(ModelFileError, "was replaced or changed"):
        load(str(copy), "demo", _STREAMED, replace_file)


def test_errors_name_the_file_of_the_model(copy: Path) -> None:
    copy.write_bytes(copy.read_bytes().replace(b"blk.3.attn_norm.weight", b"blk.3.attn_form.weight"))
    with raises(ModelFileError, f"{copy} lacks the tensor", code="model_file_not_supported"):
        _load(copy)


_LIMITED = """
import resource, sys
import psutil
from edgespec.backends.llamacpp.model import load
from edgespec.backends.llamacpp.native import library
from edgespec.errors import MemoryBudgetError
from edgespec.model.base import LoadOptions
library()
limit = psutil.Process().memory_info().vms + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    load(sys.argv[1], "big", LoadOptions(repack=False, streamed_layers=int(sys.argv[2]), threads=1))
except MemoryBudgetError as error:
    print(error.code)
"""


@pytest.mark.parametrize("layers", [0, _ALL])
def test_a_limit_of_the_address_space_is_a_lack_of_memory(tmp_path: Path, layers: int) -> None:
    path = write_llama(tmp_path / "big.gguf", layers=8, feed_forward=1 << 14)
    assert path.stat().st_size > 32 << 20
    command = [sys.executable, "-c", _LIMITED, str(path), str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "out_of_memory\n", done.stderr


def test_a_disk_whose_cache_cannot_be_bypassed_leaves_nothing_in_it(
    demo_target: Path, expected: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped, advise = set(), os.posix_fadvise

    def record(file: int, offset: int, size_bytes: int, advice: int) -> None:
        dropped.add((offset, size_bytes))
        advise(file, offset, size_bytes, advice)

    monkeypatch.setattr(os, "O_DIRECT", 0)
    monkeypatch.setattr(os, "posix_fadvise", record)
    assert _same(_rows_of(demo_target, _STREAMED), expected)
    for layer in streamable_layers(demo_target):
        assert all((each.offset, each.size_bytes) in dropped for each in layer.ranges)


def test_the_draft_model_of_a_streamed_target_is_not_mapped(demo_draft: Path) -> None:
    """The kernel evicts mapped weights when memory is low, so the draft model would wait for the disk."""
    for layers in (0, 5):
        options = replace(_OPTIONS, streamed_layers=layers).for_draft()
        model = load(str(demo_draft), "draft", options)
        assert bool(weight_stream.file_mappings([demo_draft])) == (layers == 0)
        model.close()


def test_loading_can_be_cancelled(copy: Path) -> None:
    options = LoadOptions(context_tokens=512, streamed_layers=_ALL)
    with pytest.raises(CancelledError):
        load(str(copy), "demo", options, lambda what, fraction: "stay in memory" not in what)


@pytest.mark.long
@pytest.mark.parametrize("change", ["truncated", "overwritten"])
def test_a_file_that_changes_ends_the_reply_but_not_the_process(
    model: LanguageModel, copy: Path, change: str
) -> None:
    step_all(model, tokens_for(model, 10))
    if change == "truncated":
        os.truncate(copy, 5000)
    else:
        with copy.open("r+b") as file:
            file.seek(1 << 20)
            file.write(b"damaged")
    for _ in range(2):
        with raises(BackendError, code="model_file_unreadable"):
            _steps(model)


@pytest.mark.long
@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_file_that_was_deleted_or_replaced_stays_readable(
    model: LanguageModel, copy: Path, expected: list[Rows], change: str
) -> None:
    copy.unlink()
    if change == "replaced":
        copy.write_bytes(b"another model")
    assert _same(_rows(model), expected)


def test_a_program_that_can_start_no_thread_closes_the_files(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    options = replace(_STREAMED, threads=1)
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", fail)
        with raises(BackendError, "can't start new thread", code="out_of_memory"):
            load(str(copy), "demo", options)
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert str(copy) not in opened


@pytest.mark.parametrize("started", [0, 2, 4])
def test_a_program_that_can_start_few_threads_stops_them(
    copy: Path, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    before = threading.enumerate()
    start, attempts = threading.Thread.start, iter(range(100))

    def limited(self: threading.Thread) -> None:
        if next(attempts) >= started:
            raise RuntimeError("can't start new thread")
        start(self)

    options = replace(_STREAMED, threads=1)
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", limited)
        with raises(BackendError, "can't start new thread", code="out_of_memory"):
            load(str(copy), "demo", options)
    assert not set(threading.enumerate()) - set(before)


def test_a_pass_that_is_complete_ends_before_a_failure_of_the_next_one_is_reported(
    model: LanguageModel, copy: Path, expected: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is already reading the first layers for the next pass while the last ones are computed."""
    read_layer, on_layer, layers = WeightStream._read_layer, WeightStream.on_layer, streamable_layers(copy)

    def fail(self: WeightStream, layer: Any, *arguments: Any) -> BackendError | None:
        error = read_layer(self, layer, *arguments)
        return BackendError("the disk failed", "") if layer == layers[0] else error

    def wait_for_failure(self: WeightStream, name: bytes) -> bool:
        if name == b"l_out-%d" % layers[-1].layer:
            with self._state:
                assert self._state.wait_for(lambda: self._error is not None, 20)
        return on_layer(self, name)

    stream = model._stream  # type: ignore[attr-defined]
    with stream._state:
        # The first layers for the next pass are in memory.
        assert stream._state.wait_for(lambda: not stream._has_room, 20)
    with monkeypatch.context() as broken:
        broken.setattr(WeightStream, "_read_layer", fail)
        broken.setattr(WeightStream, "on_layer", wait_for_failure)
        step(model, 5)
    assert _same(_rows(model), expected)


@pytest.mark.parametrize(
    ("error", "says", "code"),
    [
        (OSError(5, "Input/output error"), "Input/output error", "model_file_unreadable"),
        (ValueError("odd"), "ValueError('odd')", "model_file_unreadable"),
        (MemoryError(), "not enough memory", "out_of_memory"),
    ],
)
def test_a_disk_that_fails_for_a_moment_ends_one_reply(
    model: LanguageModel,
    expected: list[Rows],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    says: str,
    code: str,
) -> None:
    def fail(*_: object) -> int:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail)
        with raises(BackendError, says, code=code):
            _steps(model)
    assert _same(_rows(model), expected)


_CARD = Gpu("GPU0", "card", 2**20, 2**20, has_own_memory=True)


@pytest.mark.parametrize(
    ("gpu_layers", "cards", "expected"),
    [(None, [], True), (0, [], True), (9, [], False), (None, [_CARD], False), (0, [_CARD], True)],
)
def test_a_model_that_uses_a_gpu_is_not_streamed(
    monkeypatch: pytest.MonkeyPatch, gpu_layers: int | None, cards: list[Gpu], expected: bool
) -> None:
    """A GPU without dedicated memory shares main memory, so a streamed model does not need it."""
    monkeypatch.setattr(native.library(), "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(devices, "cards", lambda: cards)
    assert can_stream(gpu_layers) == expected


class TestPlanning:
    @pytest.fixture(scope="class")
    def short_bytes(self, smollm2: Path) -> int:
        """A budget that lacks a few of SmolLM2's layers, although logits for fewer tokens save 72 MiB."""
        plan = edgespec.plan(str(smollm2), "none", memory=1 << 40, context=1024).plan
        return plan.total_bytes - (92 << 20)

    def test_a_model_that_does_not_fit_is_streamed(self, smollm2: Path, short_bytes: int) -> None:
        preview = edgespec.plan(str(smollm2), "none", memory=short_bytes, context=1024)
        plan = preview.plan
        assert plan.fits
        assert plan.streaming is not None
        assert 0 < plan.streaming.layers < plan.streaming.all_layers
        assert plan.streaming.bytes_per_pass > 20 << 20
        shown = plan.to_json()["streaming"]
        assert shown["seconds_per_pass"] > 0
        # SmolLM2 has 30 layers.
        assert shown["layers"] + shown["kept_layers"] == 30
        assert preview.advice

    def test_memory_for_logits_covers_only_the_widest_pass(self, smollm2: Path, short_bytes: int) -> None:
        whole, streamed = (
            edgespec.plan(str(smollm2), "none", memory=memory, context=1024).plan
            for memory in (1 << 40, short_bytes)
        )
        sizes = [
            sum(item.bytes for item in plan.items if item.kind == "output") for plan in (whole, streamed)
        ]
        assert sizes[1] * MAX_WIDTH == sizes[0] * STREAMED_ROWS

    @pytest.mark.parametrize("draft", ["none", "demo-draft"])
    def test_the_expected_speed_is_limited_by_the_disk(
        self, smollm2: Path, short_bytes: int, monkeypatch: pytest.MonkeyPatch, draft: str
    ) -> None:
        fast = CostCurve((1, 2, 4, 8), (1e-12, 1e-12, 1e-12, 1e-12))
        machine = MachineSpeed({"Q4_K": TypeSpeed(fast, 1e-15)}, 1e-9)
        monkeypatch.setattr(speed_prediction, "saved_machine_speed", lambda form: machine)
        monkeypatch.setattr(pair_estimate, "read_bytes_per_second", lambda path: 1e9)
        preview = edgespec.plan(str(smollm2), draft, memory=short_bytes, context=1024)
        assert preview.plan.streaming is not None
        assert preview.prediction is not None
        seconds = preview.plan.streaming.seconds_per_pass
        assert preview.prediction.tokens_per_second == pytest.approx(1 / seconds)
        # A prompt of 1,000 tokens is read in two passes.
        assert preview.prediction.prompt_seconds == pytest.approx(2 * seconds)
        assert (preview.prediction.speedup > 1.2) == (draft != "none")

    def test_a_context_extended_into_free_memory_is_planned_with_the_stream(
        self, smollm2: Path, short_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(planning, "stream_least", lambda choice, plan: choice)
        memory = short_bytes - (2 << 20)
        preview = edgespec.plan(str(smollm2), "none", memory=memory, kv_type="q4_0", prefix_cache="none")
        plan = preview.plan
        assert plan.context_tokens > SHORT_CONTEXT_TOKENS
        assert plan.streaming is not None

    @pytest.mark.parametrize("draft", ["none", "demo-draft"])
    def test_the_plan_shows_the_speed_and_the_layers(
        self, smollm2: Path, short_bytes: int, monkeypatch: pytest.MonkeyPatch, draft: str
    ) -> None:
        fast = CostCurve((1, 2, 4, 8), (1e-12, 1e-12, 1e-12, 1e-12))
        machine = MachineSpeed({"Q4_K": TypeSpeed(fast, 1e-15)}, 1e-9)
        monkeypatch.setattr(speed_prediction, "saved_machine_speed", lambda form: machine)
        # A rate at which the whole model takes minutes.
        monkeypatch.setattr(pair_estimate, "read_bytes_per_second", lambda path: 1e6)
        options = ["--memory", str(short_bytes), "--context", "1024", "--draft", draft]
        command = ["plan", "--target", str(smollm2), *options]
        shown = " ".join(CliRunner().invoke(program, command).stdout.split())
        said = json.loads(CliRunner().invoke(program, [*command, "--json"]).stdout)
        speed = said["prediction"]["tokens_per_second_with_draft"]
        assert 0 < said["prediction"]["tokens_per_second"] <= speed < 0.5
        assert ("with the draft model" in shown) == (draft != "none")
        assert f"{speed:.2g}" in shown
        assert f"weights of {said['streaming']['layers']} layers are read from disk" in shown
        assert f"of {said['streaming']['kept_layers']} stay in memory" in shown
        assert said["streaming"]["warning"] in shown

    @pytest.mark.parametrize(
        ("speed", "kind", "is_slow"), [(1e9, "", False), (0.1e9, "", True), (1e9, "nfs4", True)]
    )
    def test_slow_disks_and_network_drives_are_named(self, speed: float, kind: str, is_slow: bool) -> None:
        streaming = Streaming(4, 29, 1 << 30, speed, network_drive=kind)
        assert bool(streaming.warning) == is_slow
        assert kind in streaming.warning
        assert ("warning" in streaming.to_json()) == is_slow

    def test_the_disk_is_measured_although_the_model_is_not_on_this_machine(
        self, smollm2: Path, short_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        header = loading._without_data(smollm2, tmp_path / "header.gguf")
        monkeypatch.setattr(pair_estimate, "hub_cache_folder", lambda: tmp_path / "hub")
        monkeypatch.setattr(
            pair_estimate, "folder_bytes_per_second", lambda folder: float(folder.name == "hub")
        )
        streaming = edgespec.plan(str(header), "none", memory=short_bytes, context=1024).plan.streaming
        assert streaming is not None
        assert streaming.disk_bytes_per_second == 1

    def test_a_model_is_not_streamed_if_its_addresses_are_limited(
        self, smollm2: Path, short_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for free_bytes, fits in ((0, False), (1 << 40, True)):
            monkeypatch.setattr(planning, "address_limit", lambda free=free_bytes: Limit(free, "ulimit -v"))
            assert edgespec.plan(str(smollm2), "none", memory=short_bytes, context=1024).plan.fits == fits

    @pytest.mark.long
    def test_it_is_refused_if_the_user_wants_that(self, smollm2: Path, short_bytes: int) -> None:
        with pytest.raises(MemoryBudgetError):
            edgespec.load(str(smollm2), "none", memory=short_bytes, context=1024, larger_than_memory="no")

    @pytest.mark.parametrize(
        ("gpu_layers", "cards", "fits"),
        [(None, [], True), (0, [], True), (None, [_CARD], False), (0, [_CARD], True)],
    )
    def test_a_model_is_streamed_on_a_machine_with_a_gpu(
        self,
        smollm2: Path,
        short_bytes: int,
        monkeypatch: pytest.MonkeyPatch,
        gpu_layers: int | None,
        cards: list[Gpu],
        fits: bool,
    ) -> None:
        monkeypatch.setattr(native.library(), "llama_supports_gpu_offload", lambda: True)
        monkeypatch.setattr(devices, "cards", lambda: cards)
        chosen = []
        load_options = pair_estimate.PairEstimator.load_options

        def spied(self: pair_estimate.PairEstimator, choice: Any) -> LoadOptions:
            chosen.append(load_options(self, choice))
            return chosen[-1]

        monkeypatch.setattr(pair_estimate.PairEstimator, "load_options", spied)
        plan = edgespec.plan(
            str(smollm2), "none", memory=short_bytes, context=1024, gpu_layers=gpu_layers, reserve=0
        ).plan
        assert plan.fits == fits
        assert (plan.streaming is not None) == fits
        assert all(options.gpu_layers == 0 for options in chosen if options.streamed_layers)

    def test_replies_are_those_of_plain_decoding(self, smollm2: Path, short_bytes: int) -> None:
        prompt = "Repeat this three times: the quick brown fox jumps over the lazy dog."
        # With one thread per core, the threads would wait for each other while other tests are running.
        options: dict[str, Any] = {"memory": short_bytes, "context": 1024, "threads": 1}
        with edgespec.load(str(smollm2), "none", **options) as runtime:
            assert "read from disk" in runtime.target.notice
            plain, drafted = (
                runtime.generate(prompt, method=method, max_tokens=20, temperature=0)
                for method in ("none", "suffix")
            )
        assert drafted.stats.drafted_tokens
        assert drafted.tokens == plain.tokens
