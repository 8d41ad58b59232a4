"""A streamed target drafts with its own weights and with low-bit copies of the streamed ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends.llamacpp import substitutes
from edgespec.backends.llamacpp.gguf_model import GgufModel
from edgespec.backends.llamacpp.model import load
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.backends.llamacpp.weight_stream import (
    FEED_FORWARD,
    can_stream,
    choose_streamed,
    saved_bytes,
    streamable_layers,
)
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError, MemoryBudgetError
from edgespec.loading.prepare.gguf_parts import GgufParts, write_gguf
from edgespec.model.base import LanguageModel, LoadOptions, LowBit
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import read_header
from tests.backends.contract import TREES, Rows, row_of, step, step_all, tokens_for, tree_of
from tests.backends.low_bit_pairs import draft_logits
from tests.backends.split_gguf import write_parts
from tests.backends.test_weight_stream import _memory_bytes
from tests.backends.tiny_models import write_llama, write_moe
from tests.backends.tiny_mtp_models import write_mtp_model
from tests.cases import first
from tests.raising import raises

pytestmark = pytest.mark.skipif(not can_stream(), reason="weights are streamed only on a Linux CPU")

_ALL = 100


def options(layers: int = _ALL, **more: Any) -> LoadOptions:
    return LoadOptions(context_tokens=512, repack=False, streamed_layers=layers, **more)


def write_substitutes(source: Path, file: Path, layers: Sequence[int], kind: str = "Q4_0") -> Path:
    """Write low-bit copies of the feed-forward weights of some layers."""
    model = GgufParts(gguf_files(source))
    blocks = {
        name: tensor
        for name, tensor in model.tensors.items()
        if (match := FEED_FORWARD.fullmatch(name)) and int(match[1]) in layers
    }
    whole = file.with_suffix(".blocks")
    write_gguf(whole, model.architecture, model.metadata(0, model.layer_count), blocks)
    quantise(whole, file, kind)
    whole.unlink()
    return file


def write_whole(source: Path, copies: Path, file: Path) -> Path:
    """Write the model that is expected to draft, with the source's weights and the low-bit copies."""
    model = GgufParts(gguf_files(source))
    tensors = model.tensors | GgufParts([copies]).tensors
    write_gguf(file, model.architecture, model.metadata(0, model.layer_count), tensors)
    return file


def streamed(path: Path, layers: int = _ALL) -> list[int]:
    return [layer.layer for layer in choose_streamed(streamable_layers(path), options(layers))]


def _demo(path: Path) -> Path:
    return Path(shutil.copy(Path(os.environ["DEMO_TARGET"]), path))


def _parts(path: Path) -> Path:
    return write_parts(path.parent / "parts", layers=6)[0]


_KINDS: dict[str, Callable[[Path], Path]] = {
    "demo": _demo,
    "float": partial(write_llama, layers=6),
    "experts": partial(write_moe, layers=6),
    "fused experts": partial(write_mtp_model, architecture="cohere2moe", mtp_layers=0, fuse_experts=True),
    "MTP layers": partial(write_mtp_model, architecture="glm4moe"),
    "several files": _parts,
}


@pytest.fixture(params=_KINDS)
def source(
    request: pytest.FixtureRequest, tmp_path: Path, demo_target: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.setenv("DEMO_TARGET", str(demo_target))
    return _KINDS[request.param](tmp_path / "model.gguf")


@pytest.fixture
def demo(demo_target: Path) -> Iterator[LanguageModel]:
    model = load(str(demo_target), "demo", options())
    yield model
    model.close()


@pytest.fixture(scope="module")
def copies(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Low-bit copies of all blocks of the demo model that can be streamed."""
    return write_substitutes(demo_target, tmp_path_factory.mktemp("copies") / "c.gguf", streamed(demo_target))


def _view(target: LanguageModel, file: Path) -> LanguageModel:
    return target.self_draft(LowBit(str(file), is_partial=True))


def test_drafts_are_those_of_a_model_with_these_weights(source: Path, tmp_path: Path) -> None:
    layers = streamed(source)
    copies = write_substitutes(source, tmp_path / "copies.gguf", layers)
    whole = write_whole(source, copies, tmp_path / "whole.gguf")
    target = load(str(source), "target", options())
    assert isinstance(target, GgufModel)
    assert list(target.streamed_layers) == layers
    tokens = tokens_for(target, 40)
    target.prefill(tokens)
    rows = []
    for method in (LowBit(str(copies), is_partial=True), LowBit(str(whole))):
        view = target.self_draft(method)
        rows.append([draft_logits(view, tree_of(target, TREES["deep and wide"]))])
        rows[-1].append(draft_logits(view, TokenTree.chain(tokens[0], tokens[1:9])))
        if method.is_partial:
            sizes = substitutes.substitute_bytes(copies)
            assert view.facts.weight_bytes == sum(sizes.values())
            assert sorted(sizes) == layers
        view.close()
    for found, expected in zip(*rows, strict=True):
        assert np.array_equal(found, expected)
    target.close()


@pytest.mark.parametrize("layers", first([4, 7]))
def test_layers_that_are_not_streamed_are_shared(
    demo_target: Path, copies: Path, tmp_path: Path, layers: int
) -> None:
    """The file can contain copies of more layers than are streamed."""
    chosen = streamed(demo_target, layers)
    some = write_substitutes(demo_target, tmp_path / "some.gguf", chosen)
    whole = write_whole(demo_target, some, tmp_path / "whole.gguf")
    target = load(str(demo_target), "target", options(layers))
    target.prefill(tokens_for(target, 30))
    rows = []
    for method in (LowBit(str(copies), is_partial=True), LowBit(str(whole))):
        view = target.self_draft(method)
        rows.append(draft_logits(view, TokenTree.chain(5, [6, 7])))
        weight_bytes = view.facts.weight_bytes
        view.close()
    assert np.array_equal(rows[0], rows[1])
    assert substitutes.loaded_bytes(copies, chosen) < weight_bytes
    target.close()


def test_the_target_is_unchanged_while_and_after_it_drafts(demo_target: Path, copies: Path) -> None:
    def rows(model: LanguageModel, draft: Callable[[], object]) -> list[Rows]:
        tokens = tokens_for(model, 40)
        found = [step_all(model, tokens[:30])]
        for token in tokens[30:]:
            draft()
            found.append(step(model, token))
        return found

    plain = load(str(demo_target), "plain", LoadOptions(context_tokens=512, repack=False))
    expected = rows(plain, lambda: None)
    plain.close()
    target = load(str(demo_target), "target", options())
    view = _view(target, copies)
    drafted: list[Rows] = []
    found = rows(target, lambda: drafted.append(row_of(view, view.verify(TokenTree.chain(9, [8, 7])), 2)))
    assert np.array_equal(found, expected)
    assert not np.array_equal(drafted[0], expected[0])
    view.close()
    target.truncate(0)
    assert np.array_equal(rows(target, lambda: None), expected)
    target.close()


def test_only_the_layers_to_choose_from_are_streamed(demo_target: Path, copies: Path) -> None:
    allowed = streamed(demo_target, 5)
    target = load(str(demo_target), "target", options(streamable=tuple(allowed)))
    assert isinstance(target, GgufModel)
    assert list(target.streamed_layers) == allowed
    step(target, 5)
    target.close()


@pytest.mark.real
def test_kept_weights_are_in_memory_once(real_models: Path, tmp_path: Path) -> None:
    path = real_models / "smollm2-f16.gguf"
    copies = write_substitutes(path, tmp_path / "copies.gguf", streamed(path))
    before = _memory_bytes()
    target = load(str(path), "target", options())
    step_all(target, tokens_for(target, 40))
    alone = _memory_bytes() - before
    view = _view(target, copies)
    draft_logits(view, TokenTree.chain(5, [6, 7, 8]))
    together = _memory_bytes() - before
    kept = path.stat().st_size - saved_bytes(streamable_layers(path))
    # The rest is the draft model's vocabulary, KV cache and working buffers.
    extra = view.facts.weight_bytes + view.facts.kv_bytes + view.facts.vocab_size * 300 + (24 << 20)
    assert together - alone < extra
    assert extra < kept
    view.close()
    step(target, 5)
    assert _memory_bytes() - before < alone + (16 << 20)
    target.close()


def test_the_temporary_file_and_the_mapping_are_gone(
    demo: LanguageModel, copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(folder))
    demo.prefill([5, 6])
    view = _view(demo, copies)
    assert not list(folder.rglob("*.gguf"))
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert draft_logits(view, TokenTree.chain(7)).size
    view.close()


class TestFailures:
    """The target keeps working if its draft model cannot be loaded."""

    @pytest.fixture(autouse=True)
    def still_works(self, demo: LanguageModel) -> Iterator[None]:
        yield
        demo.truncate(0)
        assert np.isfinite(step_all(demo, tokens_for(demo, 20))).all()

    def test_a_truncated_file(self, demo: LanguageModel, copies: Path, tmp_path: Path) -> None:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(copies.read_bytes()[: read_header(copies).size_bytes + 5000])
        with raises(BackendError, "too short", code="model_file_unreadable"):
            _view(demo, cut)

    def test_a_layer_without_a_copy(self, demo: LanguageModel, demo_target: Path, tmp_path: Path) -> None:
        some = write_substitutes(demo_target, tmp_path / "some.gguf", streamed(demo_target)[:3])
        with raises(CapabilityError, "does not contain a low-bit copy of blk.", code="lowbit_not_supported"):
            _view(demo, some)

    def test_copies_of_another_model(self, demo: LanguageModel, tmp_path: Path) -> None:
        other = write_llama(tmp_path / "other.gguf", layers=20)
        file = write_substitutes(other, tmp_path / "copies.gguf", range(20))
        with raises(CapabilityError, "does not contain a low-bit copy of blk.", code="lowbit_not_supported"):
            _view(demo, file)

    @pytest.mark.parametrize(
        ("name", "value"), [("_GET_TENSOR", "_ZNK11llama_model10no_such_fnEPKc"), ("_TENSOR_BYTES", 64)]
    )
    def test_another_llama_cpp(
        self, demo: LanguageModel, copies: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
    ) -> None:
        monkeypatch.setattr(substitutes, name, value)
        with raises(CapabilityError, "cannot share weights", code="lowbit_not_supported"):
            _view(demo, copies)

    def test_a_cache_folder_that_cannot_be_written(
        self, demo: LanguageModel, copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("not a folder")
        monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(blocked / "cache"))
        with raises(BackendError, code="file_not_written"):
            _view(demo, copies)

    def test_a_cache_folder_in_memory(
        self, demo: LanguageModel, copies: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(substitutes, "stores_holes", lambda path: True)
        with raises(CapabilityError, "is kept in memory", code="lowbit_not_supported"):
            _view(demo, copies)

    def test_too_little_memory(self, demo_target: Path, copies: Path) -> None:
        target = load(str(demo_target), "target", options(memory_bytes=14 << 20))
        with pytest.raises(MemoryBudgetError):
            _view(target, copies)
        target.close()
