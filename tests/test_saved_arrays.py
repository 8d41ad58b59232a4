"""Saved arrays are private, belong to their models, and are validated when loaded."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.store.saved_arrays import SavedArrays, delete_saved_arrays, models_fingerprint
from tests.tables import table

VALUES = {"steps": np.array(7), "weights": np.arange(6, dtype=np.float32).reshape(2, 3)}


def test_saved_arrays_are_loaded(tmp_path: Path) -> None:
    file = SavedArrays("online", "one", tmp_path)
    assert file.load() == {}
    file.save(VALUES)
    file.save(VALUES)
    loaded = SavedArrays("online", "one", tmp_path).load()
    assert set(loaded) == set(VALUES)
    assert all(np.array_equal(loaded[name], VALUES[name]) for name in VALUES)
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]
    size_bytes = file.path.stat().st_size
    assert [delete_saved_arrays(tmp_path), delete_saved_arrays(tmp_path)] == [size_bytes, 0]
    assert file.load() == {}
    assert file.notice == ""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such rights")
def test_files_are_private(tmp_path: Path) -> None:
    file = SavedArrays("online", "one", tmp_path / "learnt")
    file.save(VALUES)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700


def test_files_of_another_model_are_not_read(tmp_path: Path) -> None:
    one, other = SavedArrays("online", "one", tmp_path), SavedArrays("online", "other", tmp_path)
    one.save(VALUES)
    assert other.load() == {}
    one.path.rename(other.path)
    assert other.load() == {}
    assert "belongs to another model" in other.notice
    assert SavedArrays("costs", "one", tmp_path).path != one.path


def test_a_damaged_file_is_reported_and_replaced(tmp_path: Path) -> None:
    file = SavedArrays("online", "one", tmp_path)
    file.save(VALUES)
    whole = file.path.read_bytes()
    for length in range(0, len(whole), 37):
        file.path.write_bytes(whole[:length])
        assert file.load() == {}
        assert file.notice
    for at in range(0, len(whole), 11):
        file.path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        file.load()
    file.save(VALUES)
    assert set(file.load()) == set(VALUES)


def test_a_file_that_claims_to_be_encrypted_is_reported(tmp_path: Path) -> None:
    file = SavedArrays("online", "one", tmp_path)
    file.save(VALUES)
    whole = bytearray(file.path.read_bytes())
    whole[whole.index(b"PK\x01\x02") + 8] |= 1
    file.path.write_bytes(whole)
    assert file.load() == {}
    assert "damaged" in file.notice


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "learnt").write_text("a file where a folder should be")
    file = SavedArrays("online", "one", tmp_path / "learnt")
    file.save(VALUES)
    assert "cannot save data" in file.notice


def test_models_fingerprint(tmp_path: Path) -> None:
    def written(name: str, payload: bytes) -> str:
        path = tmp_path / name
        path.mkdir()
        (path / "model.safetensors").write_bytes(payload)
        return str(path)

    facts = table(1).facts
    one = replace(facts, path=written("one", b"abc" * 100_000))
    copy = replace(facts, path=written("copy", b"abc" * 100_000))
    end = replace(facts, path=written("end", b"abc" * 99_999 + b"abd"))
    assert models_fingerprint(one) == models_fingerprint(copy)
    others = [
        models_fingerprint(end),
        models_fingerprint(replace(one, quantisation="Q4")),
        models_fingerprint(one, one),
    ]
    assert len({models_fingerprint(one), *others}) == 4
    assert models_fingerprint(facts) == models_fingerprint(facts)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes in folders")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    file = SavedArrays("online", "one", tmp_path)
    os.mkfifo(file.path)
    assert file.load() == {}
    assert file.notice == f"saved data cannot be read from {file.path}: the path is not a regular file"
    file.save(VALUES)
    assert set(file.load()) == set(VALUES)
