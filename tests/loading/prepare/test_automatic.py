"""Prepared models that `auto` uses without a draft model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import edgespec
from edgespec.errors import ModelFileError
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.loading.prepare.lowbit import prepare_lowbit
from edgespec.methods.lowbit.drafter import lowbit_file
from edgespec.store.prepared_files import find_prepared
from tests.backends.tiny_models import write_llama
from tests.raising import raises


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model.gguf", layers=3)


@contextmanager
def loaded(model: Path) -> Iterator[edgespec.Runtime]:
    with edgespec.load(str(model), "none", context=256) as runtime:
        yield runtime


def test_a_split_model_is_used_for_its_source(model: Path) -> None:
    with loaded(model) as runtime:
        plain = runtime.generate("abc", raw=True, max_tokens=24, temperature=0.0, method="none")
    prepare_layerskip(model, 2)
    with loaded(model) as runtime:
        assert runtime.method.effective == "layerskip+suffix"
        for method in ("none", "auto"):
            reply = runtime.generate("abc", raw=True, max_tokens=24, temperature=0.0, method=method)
            assert reply.tokens == plain.tokens


@pytest.mark.long
def test_a_low_bit_copy_is_preferred(model: Path) -> None:
    prepare_layerskip(model, 2)
    prepare_lowbit(model, "Q8_0")
    with loaded(model) as runtime:
        assert runtime.method.effective == "lowbit+suffix"


@pytest.mark.long
def test_auto_ignores_a_damaged_split_model(model: Path) -> None:
    prepare_layerskip(model, 2)
    prepared = find_prepared("layerskip", model)
    assert prepared is not None
    next(prepared.folder.glob("upper*.gguf")).write_bytes(b"no model")
    with loaded(model) as runtime:
        assert runtime.method.effective == "suffix"
    with raises(edgespec.EdgespecError, "prepare", code="prepared_outdated"):
        edgespec.load(str(model), "none", context=256, method="layerskip")


@pytest.mark.long
def test_auto_ignores_a_truncated_copy(model: Path) -> None:
    prepare_layerskip(model, 2)
    copy = lowbit_file(prepare_lowbit(model, "Q8_0"))
    whole = copy.read_bytes()
    for size in (0, 3, 1000, len(whole) // 2, len(whole) - 1):
        copy.write_bytes(whole[:size])
        with loaded(model) as runtime:
            assert runtime.method.effective == "layerskip+suffix"
        for use in (edgespec.load, edgespec.plan):
            with raises(ModelFileError, "copy.gguf", "prepare`", code="prepared_outdated"):
                use(str(model), "none", context=256, method="lowbit")


@pytest.mark.long
def test_a_draft_model_is_preferred(demo_target: Path, tmp_path: Path) -> None:
    whole = tmp_path / "demo.gguf"
    whole.symlink_to(demo_target)
    prepare_layerskip(whole, 4)
    with edgespec.load(str(whole), "demo-draft", context=256) as runtime:
        assert runtime.method.effective == "model+suffix"
