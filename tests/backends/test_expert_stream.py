"""Mixture-of-experts models that are larger than memory: only the experts that passes use are read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.backends.llamacpp import native, weight_stream
from edgespec.backends.llamacpp.expert_stream import ExpertStream, ExpertTable, expert_table, saved_uses
from edgespec.backends.llamacpp.memory_estimate import GgufMemoryEstimator
from edgespec.backends.llamacpp.model import load, load_slots
from edgespec.backends.llamacpp.weight_stream import WeightStream, can_stream, streamable_layers
from edgespec.cli.program import program
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.plan import Streaming
from edgespec.memory.pressure import MemoryPressure
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.contract import Rows, step, step_all, tokens_for
from tests.backends.test_weight_stream import _ALL, _OPTIONS, _STREAMED, _memory_bytes, _rows, _rows_of, _same
from tests.backends.tiny_models import write_moe
from tests.backends.tiny_mtp_models import write_mtp_model
from tests.raising import raises

pytestmark = pytest.mark.skipif(not can_stream(), reason="weights are streamed only on a Linux CPU")

_LAYERS, _EXPERTS, _USED = 6, 16, 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose experts have eight pages in each of their tensors."""
    folder = tmp_path_factory.mktemp("experts")
    return write_moe(folder / "moe.gguf", layers=_LAYERS, experts=_EXPERTS, feed_forward=256)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Rows]:
    """The logits of a prompt, of two steps and of a wide pass, with all weights in memory."""
    return _rows_of(path)


@pytest.fixture
def copy(path: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage, and whose experts have never been used."""
    return Path(shutil.copy(path, tmp_path / "copy.gguf"))


@pytest.fixture
def model(copy: Path) -> Iterator[LanguageModel]:
    model = load(str(copy), "moe", _STREAMED)
    yield model
    model.close()


def _stream(model: LanguageModel) -> ExpertStream:
    stream = model._stream  # type: ignore[attr-defined]
    assert isinstance(stream, ExpertStream)
    return stream


def _table(path: Path) -> ExpertTable:
    table = expert_table(path, _STREAMED)
    assert table is not None
    return table


@pytest.mark.parametrize("layers", [1, 3, _ALL])
def test_logits_are_the_same_bits_as_with_all_weights_in_memory(
    copy: Path, expected: list[Rows], layers: int
) -> None:
    model = load(str(copy), "moe", replace(_OPTIONS, streamed_layers=layers))
    for _ in range(2):
        assert _same(_rows(model), expected)
    assert _stream(model).read_bytes
    model.close()


def test_replies_that_share_passes_share_the_experts(copy: Path) -> None:
    def replies(options: LoadOptions) -> list[list[Rows]]:
        first, second = load_slots(str(copy), "moe", replace(options, parallel=2))
        rows = [_rows(model) for model in (first, second, first)]
        first.close()
        second.close()
        return rows

    for found, expected in zip(replies(_STREAMED), replies(_OPTIONS), strict=True):
        assert _same(found, expected)


@pytest.mark.long
def test_experts_stay_within_the_memory_that_is_planned_for_them(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "large.gguf", layers=_LAYERS, experts=_EXPERTS, feed_forward=4096)
    table = _table(path)
    before = _memory_bytes()
    model = load(str(path), "moe", _STREAMED)
    for token in tokens_for(model, 40):
        step(model, token)
    step_all(model, tokens_for(model, 40))
    used = _memory_bytes() - before
    assert _stream(model).saved_bytes == table.all_bytes - table.largest_layer_bytes
    kept = path.stat().st_size - _stream(model).saved_bytes
    assert kept < used < kept + model.facts.kv_bytes + (16 << 20)
    model.close()


def test_a_pass_reads_at_most_the_experts_that_its_tokens_use(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, stream = _table(Path(model.facts.path)), _stream(model)
    largest = int(table.sizes.max())
    # Read nothing ahead, and let the reader finish what earlier passes asked for.
    monkeypatch.setattr(ExpertStream, "_predict", lambda self, position, tensor: self._ahead[:0])
    step(model, 4)
    for width in (1, 3):
        before = stream.read_bytes
        model.verify(TokenTree.chain(5, range(6, 5 + width)))
        assert stream.read_bytes - before <= width * _USED * _LAYERS * largest
        model.commit(())
    assert stream.read_bytes


def test_experts_in_use_are_not_read_again(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _stream(model)
    monkeypatch.setattr(ExpertStream, "_predict", lambda self, position, tensor: self._ahead[:0])
    read = []
    # At first, experts that were used while the model was loaded have higher counts.
    for _ in range(20):
        model.truncate(0)
        step(model, 5)
        read.append(stream.read_bytes)
    assert read[-1] == read[-5]


def test_the_experts_used_most_are_kept_and_remembered(copy: Path) -> None:
    model = load(str(copy), "moe", _STREAMED)
    table = _table(copy)
    assert not saved_uses(table).any()
    for _ in range(20):
        model.truncate(0)
        step(model, 5)
    used = _stream(model)._uses >= 20
    assert used.sum() == _USED * _LAYERS
    before = table.reads(_STREAMED)
    model.close()
    assert np.array_equal(saved_uses(table) >= 20, used)
    # The plan counts on them.
    assert sum(table.reads(_STREAMED).layer_bytes.values()) < sum(before.layer_bytes.values())
    model = load(str(copy), "moe", _STREAMED)
    assert _stream(model)._present[used].all()
    read_bytes = _stream(model).read_bytes - _stream(model).ahead_bytes
    step(model, 5)
    assert _stream(model).read_bytes - _stream(model).ahead_bytes == read_bytes
    model.close()


@pytest.mark.parametrize("is_right", [True, False])
def test_experts_are_read_ahead_while_predictions_are_right(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    options, choices = replace(_OPTIONS, streamed_layers=3), []
    check, on_node = ExpertStream._check_prediction, ExpertStream.on_node

    def record(self: ExpertStream, position: int, needed: Any) -> None:
        choices.append((position, needed))
        check(self, position, needed)

    def predict(self: ExpertStream, position: int, tensor: int) -> Any:
        needed = next(needed for each, needed in recorded if each == position)
        every = np.arange(position * _EXPERTS, (position + 1) * _EXPERTS)
        return needed if is_right else np.setdiff1d(every, needed)[:_USED]

    def read_ahead(self: ExpertStream, name: bytes, tensor: int) -> bool:
        continues = on_node(self, name, tensor)
        with self._state:
            # These layers are so small that the next one would otherwise need its experts first.
            assert self._state.wait_for(lambda: not self._ahead.size, 20)
        return continues

    with monkeypatch.context() as recording:
        recording.setattr(ExpertStream, "_check_prediction", record)
        model = load(str(copy), "moe", options)
        tokens = tokens_for(model, 12)
        rows = [step(model, token) for token in tokens]
        model.close()
    recorded = iter(choices)
    with monkeypatch.context() as predicting:
        predicting.setattr(ExpertStream, "_predict", predict)
        predicting.setattr(ExpertStream, "on_node", read_ahead)
        model = load(str(shutil.copy(copy, tmp_path / "unused.gguf")), "moe", options)
        assert _same([step(model, token) for token in tokens], rows)
        model.close()
    stream, two_experts = _stream(model), _USED * int(_table(copy).sizes.max())
    assert (stream._right_guesses == stream._guesses) == is_right
    # After the first wrong prediction, nothing is read ahead.
    assert (stream.ahead_bytes > two_experts) == is_right


def test_a_pass_that_waits_for_experts_can_be_interrupted(
    model: LanguageModel, expected: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, go_on, read = threading.Event(), threading.Event(), WeightStream._load

    def wait(self: WeightStream, part: Any) -> None:
        waiting.set()
        assert go_on.wait(20)
        read(self, part)

    with monkeypatch.context() as slow:
        slow.setattr(WeightStream, "_load", wait)

        def interrupt() -> None:
            waiting.wait(20)
            model.interrupt(True)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(CancelledError):
            step_all(model, tokens_for(model, 40))
        thread.join()
        go_on.set()
        model.interrupt(False)
    assert _same(_rows(model), expected)


@pytest.mark.parametrize("method", ["is_stop", "on_node"])
def test_ctrl_c_cancels_a_pass(
    model: LanguageModel, expected: list[Rows], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    native._resend_interrupts_in_callbacks()
    called, resent = getattr(ExpertStream, method), threading.Event()

    def interrupted(*arguments: object) -> bool:
        interrupting.undo()
        called(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupting:
        interrupting.setattr(ExpertStream, method, interrupted)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            try:
                step_all(model, tokens_for(model, 40))
            except CancelledError:
                resent.wait(10)
    assert _same(_rows(model), expected)


def test_a_disk_that_fails_for_a_moment_ends_one_reply(
    model: LanguageModel, expected: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail)
        with raises(BackendError, "Input/output error", code="model_file_unreadable"):
            step_all(model, tokens_for(model, 40))
    assert _same(_rows(model), expected)


@pytest.mark.parametrize("place", ["choosing", "starting to read", "reading"])
def test_a_lack_of_memory_ends_one_reply(
    model: LanguageModel, expected: list[Rows], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*_: object) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory") if place == "reading" else MemoryError

    with monkeypatch.context() as short:
        if place == "reading":
            short.setattr(os, "preadv", fail)
        elif place == "choosing":
            short.setattr(_stream(model), "_make_room", fail)
        else:
            short.setattr(_stream(model)._pool, "submit", fail)
        with raises(BackendError, "not enough memory", code="out_of_memory"):
            step_all(model, tokens_for(model, 40))
    assert _same(_rows(model), expected)


def test_fewer_experts_are_kept_while_memory_is_low(
    copy: Path, expected: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_stream, "_CHECK_SECONDS", 0.01)
    model = load(str(copy), "moe", replace(_OPTIONS, streamed_layers=1))
    stream, table, available = _stream(model), _table(copy), 1 << 40
    freed_bytes, free = 0, WeightStream._free

    def count(self: WeightStream, part: Any) -> None:
        nonlocal freed_bytes
        freed_bytes += part.size_bytes
        free(self, part)

    monkeypatch.setattr(WeightStream, "_free", count)
    pressure = MemoryPressure(ResizableContext(model), available=lambda: available)
    assert _same(_rows(model), expected)
    kept_bytes, freed_bytes = stream._held_bytes, 0
    assert kept_bytes > 2 * table.largest_layer_bytes
    available = 0
    assert pressure.is_low
    _wait_until(lambda: freed_bytes >= kept_bytes - table.largest_layer_bytes)
    assert _same(_rows(model), expected)
    assert stream._held_bytes <= table.largest_layer_bytes
    available = 1 << 40
    _wait_until(lambda: stream._limit_bytes > kept_bytes - 1)
    assert _same(_rows(model), expected)
    assert stream._held_bytes > table.largest_layer_bytes
    model.close()


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_pass_whose_choices_are_not_reported_fails(
    model: LanguageModel, expected: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        is_stop = ExpertStream.is_stop
        broken.setattr(
            ExpertStream, "is_stop", lambda self, name: name != b"ffn_moe_topk-2" and is_stop(self, name)
        )
        with pytest.raises(CapabilityError):
            step(model, 5)
    assert _same(_rows(model), expected)


def test_passes_over_the_first_layers_use_only_their_experts(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "deep.gguf", layers=16, feed_forward=256)
    expected = _rows_of(path)
    model = load(str(path), "deep", _STREAMED)
    assert model.run_first_layers(True)
    before = _stream(model)._uses.copy()
    model.verify(TokenTree.chain(5))
    model.commit(())
    assert {*np.flatnonzero(_stream(model)._uses - before) // 4} == {0, 1, 2, 3}
    model.run_first_layers(False)
    assert _same(_rows(model), expected)
    model.close()


def test_models_without_experts_that_can_be_read_alone_stream_whole_layers(
    tmp_path: Path, demo_target: Path
) -> None:
    small = write_moe(tmp_path / "small.gguf", layers=8)
    single = write_mtp_model(tmp_path / "moe.gguf", "cohere2moe", mtp_layers=0)
    for path in (small, single, demo_target):
        assert expert_table(path, _STREAMED) is None


def test_low_bit_copies_replace_whole_layers(path: Path) -> None:
    assert expert_table(path, replace(_STREAMED, streamable=(1, 2))) is None
    assert expert_table(path, _OPTIONS) is None


def test_the_estimate_counts_experts_that_are_not_in_memory(path: Path) -> None:
    table = _table(path)
    estimator = GgufMemoryEstimator(str(path), "moe")
    whole = estimator.estimate(_OPTIONS).bytes_of("weights")
    steps = len(streamable_layers(path))
    assert estimator.streamable_layers == steps
    for layers in (1, steps, _ALL):
        options = replace(_OPTIONS, streamed_layers=layers)
        saved = table.saved_bytes(options)
        assert whole - estimator.estimate(options).bytes_of("weights") == saved
        assert table.pool_bytes(options) == table.all_bytes - saved >= table.largest_layer_bytes
    reads = estimator.expert_reads(_STREAMED)
    estimator.close()
    assert reads is not None
    # Two of sixteen experts are used in each layer, and most of them are not in memory.
    used = table.all_bytes * _USED / _EXPERTS
    assert 0.7 * used < sum(reads.layer_bytes.values()) < used


def test_wide_passes_are_expected_to_read_more_experts() -> None:
    streaming = Streaming(4, 29, 100 << 20, 1e9, expert_bytes=1200 << 20, kept_expert_bytes=200 << 20)
    seconds = [streaming.seconds_of_pass(width) for width in (1, 2, 512)]
    assert seconds[0] == pytest.approx(streaming.seconds_per_pass)
    assert seconds[1] == pytest.approx(1.9 * seconds[0])
    assert seconds[2] == pytest.approx(10 * seconds[0])
    layers = Streaming(4, 29, 100 << 20, 1e9)
    assert layers.seconds_of_pass(8) == layers.seconds_per_pass


@pytest.mark.long
def test_the_plan_says_that_the_bytes_are_an_estimate(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "large.gguf", layers=_LAYERS, experts=_EXPERTS, feed_forward=4096)
    options: dict[str, Any] = {"context": 512, "headroom": "1MiB", "exactness": "off"}
    whole = edgespec.plan(str(path), "none", memory=1 << 40, **options).plan
    memory = whole.total_bytes - (60 << 20)
    command = ["plan", "--target", str(path), "--draft", "none", "--memory", str(memory), "--context", "512"]
    command += ["--headroom", "1MiB", "--exactness", "off"]
    said = json.loads(CliRunner().invoke(program, [*command, "--json"]).stdout)["streaming"]
    shown = " ".join(CliRunner().invoke(program, command).stdout.split())
    assert said["is_estimate"]
    assert 0 < said["kept_expert_bytes"] < said["expert_bytes"] - (60 << 20)
    assert "by estimate" in shown
    assert "experts used most stay in memory" in shown
    with edgespec.load(str(path), "none", memory=memory, **options) as runtime:
        reply = runtime.generate("a list", max_tokens=8, temperature=0)
        assert "experts" in runtime.target.notice
    with edgespec.load(str(path), "none", context=512, exactness="off") as runtime:
        assert runtime.generate("a list", max_tokens=8, temperature=0).tokens == reply.tokens
