"""Metadata read without loading a model matches the facts of the loaded model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.model import load
from edgespec.errors import ModelFileError
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.methods.model.translation import compare_vocabularies
from edgespec.model.base import LoadOptions
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.formats.gguf_metadata import file_type_name, read_gguf_info
from edgespec.model.formats.mlx_metadata import read_mlx_info
from edgespec.model.model_facts import ModelInfo
from edgespec.model.token_list import TokenList, tokens_of_folder, tokens_of_header
from edgespec.store.catalogue import models_folder
from edgespec.store.installed import ModelVocabulary, model_info, shared_token_fraction
from edgespec.system.facts import Facts
from tests.backends.tiny_models import WORDS, write_llama
from tests.raising import raises

DEMO, DRAFT = (models_folder() / f"demo-{name}-q8_0.gguf" for name in ("target", "draft"))
MLX = models_folder() / "demo-mlx"


def written(path: Path, architecture: str, tensors: Mapping[str, tuple[int, ...]], **values: int) -> Path:
    """Write a GGUF file of zeros with these tensors (slowest dimension first) and architecture values."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        writer.add_uint32(f"{architecture}.{key.replace('__', '.')}", value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TestGguf:
    def test_it_says_what_the_loaded_model_says(self) -> None:
        info = read_gguf_info(DEMO)
        model = llamacpp.load(str(DEMO), "demo", LoadOptions(context_tokens=256, threads=1))
        try:
            facts = model.facts
            assert (info.architecture, info.parameters) == (facts.architecture, facts.parameters)
            assert (info.quantisation, info.size_bytes) == (facts.quantisation, facts.file_bytes)
            assert (info.context_tokens, info.vocab_size) == (facts.trained_context_tokens, facts.vocab_size)
            assert info.kv_bytes * 256 == facts.kv_bytes
            assert info.chat_template
            assert facts.chat_template
            assert facts.weight_bytes <= info.pass_bytes < facts.file_bytes
        finally:
            model.close()
        assert (info.kind, info.family, info.licence) == ("model", "edgespec-demo", "cc-by-4.0")

    def test_of_a_mixture_one_token_reads_the_experts_it_uses(self, tmp_path: Path) -> None:
        path = written(
            tmp_path / "moe.gguf",
            "qwen3moe",
            {
                "token_embd.weight": (64, 32),
                "output.weight": (64, 32),
                "blk.0.attn_q.weight": (32, 32),
                "blk.0.ffn_up_exps.weight": (8, 64, 32),
            },
            block_count=1,
            expert_count=8,
            expert_used_count=2,
            context_length=4096,
            embedding_length=32,
            attention__head_count=4,
            attention__head_count_kv=2,
        )
        info = read_gguf_info(path)
        assert (info.experts, info.experts_used, info.heads) == (8, 2, ())
        assert info.parameters == 2 * 64 * 32 + 32 * 32 + 8 * 64 * 32
        assert info.pass_bytes == 2 * (64 * 32 + 32 * 32 + 2 * 64 * 32)
        assert info.kv_bytes == 2 * (8 + 8) * 2
        assert info.quantisation == "F16"
        assert (info.vocab_size, info.vocabulary, info.chat_template) == (0, "", False)

    def test_heads_are_there_where_their_tensors_are(self, tmp_path: Path) -> None:
        tensors = {"token_embd.weight": (64, 32), "blk.1.nextn.eh_proj.weight": (32, 64)}
        values = {"block_count": 2, "nextn_predict_layers": 1}
        with_head = written(tmp_path / "mtp.gguf", "glm4moe", tensors, **values)
        assert read_gguf_info(with_head).heads == ("MTP, 1 layer",)
        assert read_gguf_info(with_head).kind == "head"  # It has no other layers.
        whole = written(
            tmp_path / "whole.gguf", "glm4moe", tensors | {"blk.0.attn_q.weight": (32, 32)}, **values
        )
        assert (read_gguf_info(whole).kind, read_gguf_info(whole).heads) == ("model", ("MTP, 1 layer",))
        del tensors["blk.1.nextn.eh_proj.weight"]
        assert read_gguf_info(written(tmp_path / "none.gguf", "glm4moe", tensors, **values)).heads == ()
        eagle = read_gguf_info(written(tmp_path / "eagle.gguf", "eagle3", tensors, block_count=1))
        assert (eagle.kind, eagle.heads) == ("head", ("EAGLE-3",))
        assert (
            read_gguf_info(written(tmp_path / "bert.gguf", "bert", tensors, block_count=1)).kind
            == "embedding"
        )
        assert read_gguf_info(written(tmp_path / "odd.gguf", "odd", tensors)).kind == "other"

    def test_a_file_cut_in_its_tensors(self, tmp_path: Path) -> None:
        path = tmp_path / "cut.gguf"
        path.write_bytes(DRAFT.read_bytes()[: read_header(DRAFT).size_bytes + 1000])
        with raises(ModelFileError, "is truncated"):
            read_gguf_info(path)


@pytest.mark.long
@settings(max_examples=60)
@given(st.data())
def test_a_byte_that_flipped_is_an_error_of_ours_or_nothing(
    tmp_path_factory: Any, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    content = bytearray(write_llama(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 1500))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with suppress(ModelFileError):
        read_gguf_info(path)


def test_a_model_prepared_for_early_exit_is_what_it_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "ours"))
    model = write_llama(tmp_path / "tiny.gguf", layers=3)
    whole, folder = read_gguf_info(model), prepare_layerskip(model, 1).folder
    model.unlink()
    info = model_info(folder, "layerskip")
    for name in ("architecture", "parameters", "quantisation", "kv_bytes", "context_tokens", "vocabulary"):
        assert getattr(info, name) == getattr(whole, name), name
    assert abs(info.pass_bytes / whole.pass_bytes - 1) < 0.01
    share = shared_token_fraction(
        ModelVocabulary(folder, "layerskip", info.vocabulary), ModelVocabulary(DRAFT, "gguf", "other")
    )
    assert share is not None
    assert 0.9 < share < 1.0  # every byte is a token of both, and the words are not


class TestFolders:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(MLX, tmp_path / "model"))

    def change(self, folder: Path, **values: Any) -> ModelInfo:
        config = json.loads((MLX / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))
        return read_mlx_info(folder)

    def test_it_is_the_same_model_as_the_gguf_file(self) -> None:
        info, other = read_mlx_info(MLX), read_gguf_info(DEMO)
        for name in ("kind", "architecture", "parameters", "kv_bytes", "context_tokens", "vocab_size"):
            assert getattr(info, name) == getattr(other, name), name
        assert info.vocabulary == other.vocabulary
        assert (info.quantisation, info.chat_template) == ("8-bit", True)
        assert abs(info.size_bytes / other.size_bytes - 1) < 0.1

    @pytest.mark.long
    def test_what_a_config_says(self, folder: Path) -> None:
        info = self.change(folder, num_experts=64, num_experts_per_tok=6, num_nextn_predict_layers=1)
        assert (info.experts, info.experts_used, info.heads) == (64, 6, ())
        assert self.change(folder, text_config={"max_position_embeddings": 4096}).context_tokens == 4096
        assert self.change(folder, architectures=["LlamaForCausalLMEagle3"]).kind == "head"
        assert self.change(folder, architectures=["BertModel"]).kind == "embedding"
        assert self.change(folder, model_type=None).kind == "other"
        assert (
            self.change(folder, quantization=None, quantization_config={"quant_method": "awq"}).quantisation
            == "awq"
        )
        strange: Any
        for strange in (3, True, "LlamaForCausalLM", [], None, 1.5):
            assert self.change(folder, architectures=strange).kind == "model"
        for strange in (-1, 1 << 70, "many", [3], True, None):
            assert self.change(folder, max_position_embeddings=strange).context_tokens == 0

    def test_the_licence_is_in_the_card(self, folder: Path) -> None:
        (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: none\n")
        assert read_mlx_info(folder).licence == "apache-2.0"
        (folder / "README.md").write_text("license: apache-2.0\n")
        assert read_mlx_info(folder).licence == ""

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("config.json", "{"),
            ("config.json", "[" * 100_000),
            ("model.safetensors", "short"),
            ("model.safetensors", "\xff" * 64),
            ("tokenizer.json", "{}"),
            ("tokenizer.json", '{"model": {"vocab": {"a": -1}}}'),
            ("tokenizer.json", '{"model": {"vocab": {"a": 9999999999}}}'),
            ("tokenizer.json", '{"model": {"type": "Unigram", "vocab": [[]]}}'),
            ("tokenizer.json", "[" * 100_000),
        ],
    )
    def test_damage_is_one_line(self, folder: Path, name: str, content: str) -> None:
        (folder / name).write_text(content, encoding="latin-1")
        with raises(ModelFileError, name):
            read_mlx_info(folder)


class TestTokens:
    @pytest.mark.long
    def test_equal_hashes_are_the_same_vocabulary_and_shares_are_those_of_a_translation(
        self, tmp_path: Path
    ) -> None:
        """As the loader compares loaded models."""
        few, more = (*WORDS[:4], "▁other", "x"), (*WORDS, "▁more")
        paths = [
            write_llama(tmp_path / f"{i}.gguf", words=words)
            for i, words in enumerate((WORDS, WORDS, few, more))
        ]
        models = [
            llamacpp.load(str(path), path.name, LoadOptions(context_tokens=64)) for path in (*paths, DRAFT)
        ]
        try:
            lists = [tokens_of_header(read_header(path)) for path in (*paths, DRAFT)]
            for mine, tokens in zip(models, lists, strict=True):
                for its, others in zip(models, lists, strict=True):
                    assert tokens is not None
                    assert others is not None
                    compared = compare_vocabularies(mine.vocabulary, its.vocabulary, "a", "b")
                    assert tokens.same_ids(others) == (compared.mapping == "same")
                    if tokens.digest() == others.digest():
                        assert compared.mapping == "same"
                    assert tokens.shared_token_fraction(others) == pytest.approx(
                        compared.shared_fraction, abs=0.01
                    )
        finally:
            for model in models:
                model.close()

    def test_both_forms_of_a_model_have_the_same_tokens(self) -> None:
        mine, its = tokens_of_header(read_header(DEMO)), tokens_of_folder(MLX)
        assert mine is not None
        assert its is not None
        assert mine.digest() == its.digest()
        assert list(mine.tokens) == list(its.tokens)

    @pytest.mark.parametrize(
        "text", ["{", "[]", '{"model": {"vocab": {"a": -3}}}', '{"model": {"vocab": {"a": 1e400}}}']
    )
    def test_a_tokenizer_of_nonsense_is_called_that(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "tokenizer.json").write_text(text)
        with raises(ModelFileError, "tokenizer"):
            tokens_of_folder(tmp_path)

    def test_padding_is_no_difference_and_order_is_one(self) -> None:
        tokens = [b"a", b"bc", b"[PAD2]"]
        assert TokenList("x", tokens).digest() == TokenList("x", tokens[:2]).digest()
        assert TokenList("x", [b"ab", b"c"]).digest() != TokenList("x", [b"a", b"bc"]).digest()
        assert TokenList("x", [b"bc", b"a"]).digest() != TokenList("x", [b"a", b"bc"]).digest()
        assert TokenList("x", [b"bc", b"a"]).shared_token_fraction(TokenList("x", tokens)) == 1.0
        assert TokenList("y", tokens).digest() != TokenList("x", tokens).digest()

    def test_a_few_tokens_more_leave_ids_as_they_are(self) -> None:
        tokens = [b"a", b"bc"]
        more = TokenList("x", [*tokens, *(b"%d" % i for i in range(1024))])
        assert TokenList("x", tokens).same_ids(more)
        assert not TokenList("x", tokens[:1]).same_ids(more)
        assert not TokenList("y", tokens).same_ids(more)
        assert not TokenList("x", tokens[::-1]).same_ids(more)

    def test_bytes_are_compared_however_they_are_spelled(self) -> None:
        byte_level = TokenList("byte-level", ["Ġthe".encode(), "Ċ".encode(), "Ã©".encode(), b"<|end|>"])
        sentencepiece = TokenList("sentencepiece", ["▁the".encode(), b"<0x0A>", "é".encode(), b"</s>"])
        assert byte_level.shared_token_fraction(sentencepiece) == 0.75
        assert TokenList("x", []).shared_token_fraction(byte_level) == 0.0


class TestSaved:
    @pytest.fixture(autouse=True)
    def own_facts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))

    def test_a_model_is_read_once_for_each_state_of_its_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_llama(tmp_path / "tiny.gguf")
        info = model_info(path, "gguf")
        state, value = Facts().get("model", str(path))
        assert model_info(path, "gguf") == info
        Facts().put("model", {str(path): [state, value | {"family": "from the saved value"}]})
        assert model_info(path, "gguf").family == "from the saved value"
        write_llama(path, words=(*WORDS, "more"))
        changed = model_info(path, "gguf")
        assert changed.family == info.family
        assert changed.vocab_size == info.vocab_size + 1

    @pytest.mark.parametrize("change", [{"heads": 3}, {"another field": 1}, None], ids=str)
    def test_a_value_of_another_form_is_read_again(self, change: dict[str, Any] | None) -> None:
        info = model_info(DRAFT, "gguf")
        state, value = Facts().get("model", str(DRAFT))
        Facts().put("model", {str(DRAFT): [state, value | change if change else []]})
        assert model_info(DRAFT, "gguf") == info == read_gguf_info(DRAFT)

    def test_shared_tokens_are_compared_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = (ModelVocabulary(DRAFT, "gguf", digest) for digest in ("one", "other"))
        assert shared_token_fraction(target, draft) == 1.0
        monkeypatch.setattr("edgespec.store.installed._read_tokens", lambda *_: (None, None))
        assert shared_token_fraction(target, draft) == 1.0
        assert shared_token_fraction(draft, target) is None


@pytest.mark.parametrize(
    ("file_type", "name"), [(0, "F32"), (1, "F16"), (7, "Q8_0"), (15, "Q4_K_M"), (9999, ""), (None, "")]
)
def test_file_types_have_the_names_that_files_have(file_type: int | None, name: str) -> None:
    assert file_type_name(file_type) == name


def test_a_loaded_model_names_its_quantisation_like_its_file(tmp_path: Path) -> None:
    """llama.cpp describes this file as "(guessed) all F32"."""
    path = tmp_path / "tiny.gguf"
    write_llama(path)
    options = LoadOptions(context_tokens=64, gpu_layers=0, threads=1, kv_type="f16")
    model = load(str(path), "tiny", options)
    try:
        assert model.facts.quantisation == read_gguf_info(path).quantisation == "F32"
    finally:
        model.close()
