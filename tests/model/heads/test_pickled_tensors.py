"""Pickled tensors are read exactly, and a hostile pickle is never executed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.errors import ModelFileError
from edgespec.model.heads.tensor_files import read_pickled_tensors
from tests.model.heads.torch_files import Call, Named, Storage, pickled, write_archive, write_torch_file
from tests.raising import raises


def test_tensors_of_all_types_and_strides_are_read(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "a.weight": random.normal(size=(3, 4)).astype(np.float32),
        "b.weight": random.normal(size=(5,)).astype(np.float16),
        "turned": random.normal(size=(3, 4)).astype(np.float32).T,
        "ids": np.arange(6),
        "empty": np.zeros((0, 4), np.float32),
    }
    path = write_torch_file(tmp_path / "head.bin", arrays, epoch=3, note=None)
    tensors = read_pickled_tensors(path)
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        np.testing.assert_array_equal(tensors[name].read(), array)
    assert tensors["b.weight"].dtype == "F16"
    assert tensors["b.weight"].size_bytes == 10


def test_bf16_is_widened(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3e38], np.float32)
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    tensor = read_pickled_tensors(write_torch_file(tmp_path / "head.pt", {"w": upper}))["w"]
    assert tensor.dtype == "BF16"
    np.testing.assert_array_equal(tensor.read(), (upper.astype(np.uint32) << 16).view(np.float32))


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def call(module: str, name: str, *arguments: Any) -> bytes:
    return pickled({"w": Call(Named(module, name), *arguments)})


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "a call": lambda marker: pickle.dumps({"w": Evil(marker)}, 2),
    "a call with a newer protocol": lambda marker: pickle.dumps({"w": Evil(marker)}, 5),
    "an old instance": lambda marker: b"(S'%s'\niposix\nmkdir\n." % str(marker).encode(),
    "a call to builtins": lambda marker: call("builtins", "exec", f"import os; os.mkdir({str(marker)!r})"),
    "a call below torch": lambda _: call("torch.serialization", "load", "x"),
    "a call to the result of a call": lambda _: b"\x80\x02ccollections\nOrderedDict\n)R)R.",
    "a class": lambda _: pickle.dumps(np.float64(1.0), 2),
    "an unknown storage": lambda _: b"\x80\x02(X\x07\x00\x00\x00storagecos\nsystem\nX\x01\x00\x00\x000NNtQ.",
    "a huge memo index": lambda _: b"\x80\x02}r\xff\xff\xff\x7fh\x01.",
    "no operands": lambda _: b"\x80\x02R.",
    "no mark": lambda _: b"\x80\x02}u.",
    "no end": lambda _: b"\x80\x02}",
    "only a list": lambda _: pickled([1, 2]),
    "nothing": lambda _: b"",
    "keys that take forever to hash": lambda _: b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 200 + b"K\x01s.",
    "a tensor without data": lambda _: call("torch._utils", "_rebuild_tensor_v2", None, 0, (9,), (1,)),
}  # fmt: skip


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_is_refused_and_not_executed(
    tmp_path: Path, program: Callable[[Path], bytes]
) -> None:
    marker = tmp_path / "executed"
    path = write_archive(tmp_path / "head.bin", program(marker), {"0": bytes(4)})
    with pytest.raises(ModelFileError):
        read_pickled_tensors(path)
    assert not marker.exists()


def test_the_message_names_the_call(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "head.bin", pickle.dumps({"w": Evil(tmp_path / "x")}, 2))
    with raises(ModelFileError, "posix.mkdir", code="model_file_not_supported"):
        read_pickled_tensors(path)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (5,), (1,)), (1, (4,), (1,)), (0, (2, 2), (1, 3)), (-1, (1,), (1,)), (0, (1,), (-1,)),
     (0, (1 << 40,), (0,)), (0, (2,), ()), (0, (1,) * 70, (1,) * 70), (0, (1.0,), (1,)), (0, "ab", (1, 1))],
)  # fmt: skip
def test_a_tensor_outside_its_data_is_refused(
    tmp_path: Path, offset: int, shape: Any, strides: tuple[int, ...]
) -> None:
    storage = Storage("0", np.zeros(4, np.float32))
    call = Call(Named("torch._utils", "_rebuild_tensor_v2"), storage, offset, shape, strides)
    path = write_archive(tmp_path / "head.bin", pickled({"w": call}), {"0": bytes(16)})
    with raises(ModelFileError, "damaged"):
        read_pickled_tensors(path)


def test_compressed_and_foreign_files_are_refused(tmp_path: Path) -> None:
    bomb = write_archive(tmp_path / "bomb.bin", bytes(1 << 20), compression=ZIP_DEFLATED)
    legacy = tmp_path / "legacy.bin"
    legacy.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2))
    for path in (bomb, legacy, tmp_path / "missing.bin", tmp_path):
        with pytest.raises(ModelFileError):
            read_pickled_tensors(path)


@pytest.mark.parametrize(
    "instructions", [b"h\x05.", b"s.", b"NN.", b"e."], ids=["memo", "setitem", "two", "mark"]
)
def test_malformed_pickles_are_described_in_words(instructions: bytes, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "head.bin", b"\x80\x02" + instructions)
    with raises(ModelFileError, "malformed"):
        read_pickled_tensors(path)


def rewritten(path: Path, extra: bytes = b"", claimed_bytes: int | None = None) -> Path:
    """Copy a head whose first tensor has a second, compressed entry or claims a different size."""
    changed = path.with_name(f"changed-{path.name}")
    with ZipFile(path) as old, ZipFile(changed, "w") as new:
        for entry in old.infolist():
            is_data = entry.filename.endswith("/data/0")
            new.writestr(entry, old.read(entry)[: 4 if is_data and claimed_bytes else None])
        (data,) = (entry for entry in new.infolist() if entry.filename.endswith("/data/0"))
        if claimed_bytes:
            data.file_size = claimed_bytes
        if extra:
            with pytest.warns(UserWarning, match="Duplicate name"):
                new.writestr(data.filename, extra, ZIP_DEFLATED)
    return changed


def test_two_entries_with_the_same_name_are_refused(tmp_path: Path) -> None:
    path = write_torch_file(tmp_path / "head.pt", {"w": np.ones(4, np.float32)})
    with raises(ModelFileError, "same name"):
        read_pickled_tensors(rewritten(path, extra=bytes(1 << 20)))


@pytest.mark.parametrize("elements", [16, 1 << 40])
def test_a_wrong_size_in_the_list_of_entries_is_refused(tmp_path: Path, elements: int) -> None:
    storage = Storage("0", np.zeros(4, np.float32), claimed_size=elements)
    call = Call(Named("torch._utils", "_rebuild_tensor_v2"), storage, 0, (elements,), (1,))
    path = write_archive(tmp_path / "head.pt", pickled({"w": call}), {"0": bytes(16)})
    with raises(ModelFileError, "damaged"):
        read_pickled_tensors(rewritten(path, claimed_bytes=4 * elements))["w"].read()


@pytest.mark.long
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_give_an_error_or_tensors(tmp_path: Path, data: st.DataObject) -> None:
    arrays: dict[str, Any] = {"a": np.ones((2, 3), np.float32), "b": np.arange(4)}
    path = write_torch_file(tmp_path / "head.bin", arrays)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        for tensor in read_pickled_tensors(path).values():
            assert tensor.read().shape == tensor.shape
    except ModelFileError:
        pass


@pytest.mark.parametrize("module", ["x" * 100_000, "torch"])
def test_long_names_are_cut_in_messages(tmp_path: Path, module: str) -> None:
    path = write_archive(tmp_path / "head.bin", call(module, "y" * 100_000))
    with raises(ModelFileError, "the pickle calls", code="model_file_not_supported") as caught:
        read_pickled_tensors(path)
    assert len(caught.value.what) < 400 + len(str(path))
