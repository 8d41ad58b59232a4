"""Low-bit copies are made once, checked, and rejected if they would not help."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import edgespec
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp import quantise as quantise_module
from edgespec.backends.llamacpp.quantise import parse_quantisation_type, quantise, quantised_size
from edgespec.errors import BackendError, CancelledError, CapabilityError, ModelFileError, OptionError
from edgespec.loading.prepare.lowbit import prepare_lowbit, useful_copy_type
from edgespec.methods.lowbit.drafter import find_lowbit, find_useful_lowbit, lowbit_file
from edgespec.model.base import LoadOptions
from edgespec.store.prepared_files import check_prepared, store_folder
from tests.backends.tiny_models import write_jamba, write_lfm2, write_mamba
from tests.cases import first
from tests.raising import raises


@pytest.fixture
def source(tmp_path: Path, demo_target: Path) -> Path:
    return Path(shutil.copy(demo_target, tmp_path / "model.gguf"))


def in_store() -> list[str]:
    """Return the files that look like a copy."""
    return [path.name for path in store_folder().rglob("*.gguf")]


@pytest.mark.long
def test_a_copy_is_made_once_and_is_smaller(source: Path) -> None:
    made = prepare_lowbit(source, "q2_k")
    assert made.settings == {"type": "Q2_K"}
    assert made.facts["saved_bytes"] == made.facts["source_weight_bytes"] - made.facts["weight_bytes"] > 0
    assert find_lowbit(source) == find_lowbit(source, "Q2_K") == made
    assert find_lowbit(source, "Q4_0") is None
    check_prepared(made, source, full=True)
    loaded = llamacpp.load(str(lowbit_file(made)), "copy", LoadOptions(context_tokens=256))
    # llama.cpp reports sizes to a hundredth of a megabyte.
    assert abs(loaded.facts.weight_bytes - made.facts["weight_bytes"]) < 20_000
    assert loaded.facts.quantisation.startswith("Q2_K")
    loaded.close()
    written = lowbit_file(made).stat().st_mtime_ns
    assert prepare_lowbit(source, "Q2_K") == made
    assert lowbit_file(made).stat().st_mtime_ns == written
    # Of several copies, the newest is returned.
    other = prepare_lowbit(source, "Q4_0")
    assert find_lowbit(source) == other


@pytest.mark.long
def test_a_folder_outside_the_store(source: Path, tmp_path: Path) -> None:
    made = prepare_lowbit(source, "Q3_K", to=tmp_path / "mine")
    assert made.folder == tmp_path / "mine"
    assert made.facts["type"] == "Q3_K_M"
    assert find_lowbit(source, "Q3_K_M") == made


@pytest.mark.parametrize("name", first(["Q2_K_S", "IQ3_XXS", "IQ1_S", "IQ2_XXS"], 2))
def test_types_that_need_an_importance_matrix_are_an_error(source: Path, tmp_path: Path, name: str) -> None:
    with raises(CapabilityError, name):
        prepare_lowbit(source, name)
    if name != "IQ3_XXS":
        with raises(CapabilityError, "importance"):
            quantise(source, tmp_path / "copy.gguf", name)
    assert in_store() == []
    assert not (tmp_path / "copy.gguf").exists()


def test_unknown_types_and_types_that_are_not_smaller_are_an_error(source: Path, tmp_path: Path) -> None:
    with raises(OptionError, "Q8_0", "11.7 MiB"):
        prepare_lowbit(source, "Q8_0")
    small = tmp_path / "small.gguf"
    quantise(source, small, "Q2_K")
    with raises(OptionError, "few bits"):
        prepare_lowbit(small, "Q2_K")
    quantise(source, small, "Q4_1")
    with raises(OptionError, "Q4_0"):
        prepare_lowbit(small, "Q4_0")
    with raises(OptionError, "'Q9'", "IQ3_M"):
        prepare_lowbit(source, "Q9")
    assert parse_quantisation_type("q3_k") == "Q3_K_M"
    assert in_store() == []


@pytest.mark.parametrize("type_name", ["Q4_1", "Q2_K"])
def test_only_copies_that_can_be_made_are_advised(source: Path, tmp_path: Path, type_name: str) -> None:
    assert useful_copy_type(source) == "Q4_0"
    small = tmp_path / "small.gguf"
    quantise(source, small, type_name)
    advised = useful_copy_type(small)
    with raises(OptionError, code="method_unavailable") as caught:
        edgespec.load(str(small), "none", context=256, method="lowbit")
    if advised is None:
        assert "already uses few bits per weight" in caught.value.what
        assert "prepare" not in caught.value.next_step
    else:
        option = "" if advised == "Q4_0" else f" --type {advised}"
        assert f"`edgespec prepare lowbit {small}{option}`" in caught.value.next_step
        assert prepare_lowbit(small, advised).settings == {"type": advised}
    assert type_name != "Q2_K" or advised is None


@pytest.mark.long
def test_a_copy_that_cannot_save_time_is_not_used_automatically(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small.gguf"
    quantise(source, small, "Q4_1")
    with monkeypatch.context() as earlier:
        earlier.setattr("edgespec.methods.lowbit.drafter.MAX_COPY_SHARE", 1.0)
        made = prepare_lowbit(small, "Q4_0")
    assert find_lowbit(small) == made
    assert find_useful_lowbit(small) is None
    useful = prepare_lowbit(source, "Q4_0")
    assert find_useful_lowbit(source) == useful


@pytest.mark.parametrize("write", [write_mamba, write_jamba, write_lfm2])
def test_a_model_that_cannot_share_its_cache_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    def never(*_: object) -> NoReturn:
        raise AssertionError("the quantiser ran")

    monkeypatch.setattr(quantise_module, "_run", never)
    path = write(tmp_path / "model.gguf")
    with raises(CapabilityError, "recurrent", code="lowbit_not_supported"):
        prepare_lowbit(path)
    assert not store_folder().exists()


def test_files_that_are_not_models(tmp_path: Path) -> None:
    with raises(ModelFileError, code="model_file_unreadable"):
        prepare_lowbit(tmp_path / "none.gguf", "Q2_K")
    rubbish = tmp_path / "rubbish.gguf"
    rubbish.write_bytes(b"GGUF" + bytes(5000))
    with raises(BackendError, "Q2_K"):
        quantised_size(rubbish, "Q2_K")
    with raises(ModelFileError, "rubbish.gguf"):
        prepare_lowbit(rubbish, "Q2_K")


@pytest.mark.long
def test_a_damaged_copy_and_a_changed_source_are_errors(source: Path) -> None:
    made = prepare_lowbit(source, "Q4_0")
    with source.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"changed")
    with raises(ModelFileError, "since", code="prepared_outdated"):
        check_prepared(made, source)
    again = prepare_lowbit(source, "Q4_0")
    check_prepared(again, source)
    assert again.source_records != made.source_records
    os.truncate(lowbit_file(again), 100_000)
    with raises(ModelFileError, "is damaged", code="prepared_outdated"):
        check_prepared(again, source)
    check_prepared(prepare_lowbit(source, "Q4_0"), source, full=True)


@pytest.mark.long
def test_too_little_free_space(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(source)._replace(free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with raises(ModelFileError, "5.0 MiB", code="disk_full"):
        prepare_lowbit(source, "Q2_K")
    assert in_store() == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_the_disk_becomes_full(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full.gguf"

    def named(_: int) -> str:
        full.with_name("full.gguf.device.growing").symlink_to("/dev/full")
        return "device"

    monkeypatch.setattr(quantise_module, "token_hex", named)
    with pytest.raises(OSError, match="No space left on device"):
        quantise(source, full, "Q2_K")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_resumes_after_cancellation(source: Path) -> None:
    told: list[float] = []

    def stop(what: str, fraction: float) -> bool:
        if "making" in what:
            told.append(fraction)
        return not told or told[-1] < 0.5

    with raises(CancelledError, "making"):
        prepare_lowbit(source, "Q2_K", progress=stop)
    assert told == sorted(told)
    assert 0.5 <= told[-1] < 1.0
    assert in_store() == []
    assert list(store_folder().rglob("*.tmp")) == []
    assert find_lowbit(source) is None
    check_prepared(prepare_lowbit(source, "Q2_K"), source, full=True)


_PREPARES = """
import signal, sys
from pathlib import Path
from edgespec.loading.prepare.lowbit import prepare_lowbit

def told(what, fraction):
    print(what, flush=True)
    return True

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
prepare_lowbit(Path(sys.argv[1]), "Q3_K_M", progress=told)
"""


@pytest.mark.parametrize("kind", first([signal.SIGKILL, signal.SIGINT]))
def test_a_killed_run_leaves_no_copy_and_no_process(source: Path, kind: signal.Signals) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", _PREPARES, str(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    for line in run.stdout:
        if "making" in line:
            break
    os.kill(run.pid, kind)
    run.wait(timeout=20)
    run.stdout.close()
    assert in_store() == []
    # The quantiser process ends when its parent is gone.
    deadline = time.monotonic() + 20
    while _group_lives(run.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_lives(run.pid)
    check_prepared(prepare_lowbit(source, "Q3_K_M"), source, full=True)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_surviving_quantiser_of_a_killed_run_does_not_change_the_copy(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    with copy.open("wb") as elsewhere:
        quantise(source, copy, "Q4_0")
        whole = copy.read_bytes()
        elsewhere.write(b"late")
    assert whole[:4] == b"GGUF"
    assert copy.read_bytes() == whole


def test_leftovers_of_a_killed_run_are_deleted(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy[1].gguf"
    copy.with_name("copy[1].gguf.1.growing").write_bytes(b"half")
    quantise(source, copy, "Q4_0")
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "copy[1].gguf"}
