"""Behaviour specific to llama.cpp: files that are not models, vocabularies, and cleanup after closing."""

from __future__ import annotations

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.native import captured_log, library
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.backends.llamacpp.weight_layouts import layout_names
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    CancelledError,
    ClosedError,
    EdgespecError,
    MemoryBudgetError,
    ModelFileError,
    OptionError,
)
from edgespec.methods.model.translation import compare_vocabularies
from edgespec.model.base import LanguageModel, LoadOptions
from edgespec.store.catalogue import models_folder
from tests.backends.split_gguf import write_parts
from tests.backends.tiny_models import WORDS, write_llama
from tests.raising import raises


def load(path: Path, **options: object) -> LanguageModel:
    return llamacpp.load(str(path), path.stem, LoadOptions(**options))  # type: ignore[arg-type]


class TestErrorMessages:
    """Each error is one line with the problem and the next step."""

    def refused(self, kind: type[EdgespecError], path: Path, says: str, **options: object) -> None:
        with pytest.raises(kind, match=says) as caught:
            load(path, **options)
        assert "\n" not in str(caught.value)
        assert caught.value.next_step

    def test_a_text_file(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.gguf"
        path.write_text("These are my notes.")
        self.refused(ModelFileError, path, "is not a GGUF file: it begins with the text 'These are my not'")

    def test_an_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.gguf"
        path.touch()
        self.refused(ModelFileError, path, "it is empty")

    def test_no_file(self, tmp_path: Path) -> None:
        self.refused(ModelFileError, tmp_path / "gone.gguf", "no such file")

    def test_a_folder(self, tmp_path: Path) -> None:
        self.refused(ModelFileError, tmp_path, "cannot be read")

    @pytest.mark.parametrize("kept", [5, 100, 5_000, 40_000, -1])
    def test_a_truncated_file(self, tmp_path: Path, kept: int) -> None:
        path = write_llama(tmp_path / "cut.gguf")
        path.write_bytes(path.read_bytes()[:kept])
        self.refused(ModelFileError, path, "cut.gguf")

    def test_a_file_with_truncated_weights_is_reported_as_incomplete(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "cut.gguf")
        path.write_bytes(path.read_bytes()[:-5_000])
        self.refused(ModelFileError, path, "incomplete or damaged")

    @pytest.mark.parametrize(
        ("version", "order", "says"),
        [
            (1, "<", "version 1 of the GGUF format"),
            (3, ">", "wrong byte order for this machine"),
            (1, ">", "order"),
        ],
    )
    def test_an_unreadable_variant_of_the_format(
        self, tmp_path: Path, version: int, order: str, says: str
    ) -> None:
        path = write_llama(tmp_path / "other.gguf")
        data = path.read_bytes()
        path.write_bytes(data[:4] + struct.pack(f"{order}I", version) + data[8:])
        self.refused(ModelFileError, path, says)

    def test_an_unknown_architecture(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "new.gguf", architecture="llama99")
        self.refused(ModelFileError, path, "'llama99', which the installed llama.cpp does not support")

    def test_a_missing_part(self, tmp_path: Path) -> None:
        first, *others = write_parts(tmp_path, "big")
        for part in others:
            part.unlink()
        self.refused(ModelFileError, first, "2 parts, such as big-00002-of-00003.gguf, are missing")

    def test_a_context_larger_than_memory(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "tiny.gguf")
        self.refused(MemoryBudgetError, path, "the KV cache for", context_tokens=10**9, memory_bytes=1 << 30)

    def test_a_small_context_is_rounded_up(self, tmp_path: Path) -> None:
        model = load(write_llama(tmp_path / "model.gguf"), context_tokens=1)
        assert model.facts.context_tokens == 256
        model.prefill([1, 2, 3])
        assert len(model.verify(TokenTree.chain(4, (5,) * 64)).at(64, np.array([6]))) == 1
        model.close()

    def test_weights_larger_than_memory(self, tmp_path: Path) -> None:
        self.refused(MemoryBudgetError, write_llama(tmp_path / "tiny.gguf"), "the weights", memory_bytes=1000)

    def test_an_unknown_cache_type(self, tmp_path: Path) -> None:
        self.refused(OptionError, write_llama(tmp_path / "tiny.gguf"), "kv_type", kv_type="f8")

    def test_a_path_with_spaces_and_unicode(self, tmp_path: Path) -> None:
        model = load(write_llama(tmp_path / "mein größtes Modell 🙂.gguf"))
        model.close()

    def test_loading_can_be_cancelled(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "tiny.gguf")
        with pytest.raises(CancelledError):
            llamacpp.load(str(path), "tiny", LoadOptions(), lambda what, fraction: False)


class TestMmap:
    def _buffers(self, path: Path, **options: object) -> str:
        with captured_log() as lines:
            load(path, **options).close()
        return "\n".join(line for line in lines if "model buffer size" in line)

    def test_weights_are_mapped_by_default(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "m.gguf")
        assert "_Mapped" in self._buffers(path)
        assert "_Mapped" not in self._buffers(path, mmap=False)

    def test_repacked_weights_are_not_mapped(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        quantise(models_folder() / "demo-draft-q8_0.gguf", path, "Q4_0")
        buffers = self._buffers(path, gpu_layers=0)
        assert any(layout in buffers for layout in layout_names()) != ("_Mapped" in buffers)


def test_an_out_of_memory_pass_leaves_the_cache_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_llama(tmp_path / "tiny.gguf"), context_tokens=256)
    model.prefill([1, 2, 3])
    expected = np.array(model.verify(TokenTree.chain(4, [5, 6])).at(0, np.arange(8)))
    model.commit(())
    model.truncate(3)
    with monkeypatch.context() as failing:
        failing.setattr(library(), "llama_decode", lambda *_: -2)
        with raises(MemoryBudgetError, "3 tokens", code="out_of_memory"):
            model.verify(TokenTree.chain(4, [5, 6]))
    assert model.length == 3
    assert np.array_equal(model.verify(TokenTree.chain(4, [5, 6])).at(0, np.arange(8)), expected)
    model.close()


@pytest.mark.parametrize(("rows", "max_branches", "made"), [(None, 8, 256), (96, 8, 96), (4, 8, 9)])
def test_max_logit_rows_limits_the_width(
    tmp_path: Path, rows: int | None, max_branches: int, made: int
) -> None:
    """llama.cpp needs at least one row per sequence."""
    options = {"max_logit_rows": rows, "max_branches": max_branches, "context_tokens": 512}
    model = load(write_llama(tmp_path / "tiny.gguf"), is_draft=True, **options)
    assert model.facts.capabilities.max_width == made
    model.close()


class TestAfterClosing:
    def test_a_closed_model_s_vocabulary_raises(self, tmp_path: Path) -> None:
        model = load(write_llama(tmp_path / "tiny.gguf"))
        model.close()
        for call in (
            lambda: model.vocabulary.tokenize("the file", special=True, start=True),
            lambda: model.vocabulary.raw_piece(5),
            lambda: model.vocabulary.piece(5),
            lambda: model.vocabulary.is_end(5),
        ):
            with pytest.raises(ClosedError):
                call()

    def test_closing_does_not_wait_for_a_running_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = load(write_llama(tmp_path / "tiny.gguf"))
        tokenizing, go_on, freed = threading.Event(), threading.Event(), threading.Event()
        tokenize, free = library().llama_tokenize, library().llama_model_free

        def slow(*args: Any) -> Any:
            tokenizing.set()
            assert go_on.wait(60)
            assert not freed.is_set()
            return tokenize(*args)

        def recorded(weights: Any) -> None:
            assert not freed.is_set()
            freed.set()
            free(weights)

        monkeypatch.setattr(library(), "llama_tokenize", slow)
        monkeypatch.setattr(library(), "llama_model_free", recorded)
        expected = model.vocabulary.piece(5)
        with ThreadPoolExecutor(1) as pool:
            tokens = pool.submit(model.vocabulary.tokenize, "the file", special=True, start=True)
            assert tokenizing.wait(60)
            assert model.vocabulary.piece(5) == expected
            model.close()
            assert not freed.is_set()
            with pytest.raises(ClosedError):
                model.vocabulary.raw_piece(5)
            go_on.set()
            assert len(tokens.result(30)) > 1
        assert freed.wait(60)


class TestVocabularies:
    def test_padding_at_the_end_is_ignored(self, tmp_path: Path) -> None:
        mine = load(write_llama(tmp_path / "mine.gguf"))
        other = load(write_llama(tmp_path / "other.gguf", words=(*WORDS, "<pad0>", "<pad1>")))
        assert compare_vocabularies(mine.vocabulary, other.vocabulary, "mine", "other").mapping == "same"
        assert compare_vocabularies(other.vocabulary, mine.vocabulary, "other", "mine").mapping == "same"
        mine.close()
        other.close()

    @pytest.mark.parametrize("token", [-1, 10**6])
    def test_an_unknown_token_is_refused(self, tmp_path: Path, token: int) -> None:
        model = load(write_llama(tmp_path / "tiny.gguf"))
        with raises(EdgespecError, code="token_unknown"):
            model.vocabulary.piece(token)
        model.close()
