"""Complete files that llama.cpp does not expect are not reported as damaged, but are not offered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.errors import ModelFileError
from edgespec.loading.prepare.gguf_parts import GgufParts, write_gguf
from edgespec.model import trial_load
from edgespec.model.formats.file_quirks import explain_refusal, foreign_part, why_doubtful
from edgespec.model.formats.gguf_header import GgufHeader, GgufTensor, read_header
from edgespec.model.formats.gguf_metadata import read_gguf_info
from edgespec.model.registry import format_of
from edgespec.model.trial_load import TrialModel, why_refused
from tests.backends.tiny_models import write_jamba, write_llama, write_mamba, write_moe
from tests.raising import raises


@pytest.fixture
def asks_llama_cpp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let llama.cpp check the files, unlike other tests, which load files as if already tried."""
    results: dict[str, trial_load._Result] = {}
    monkeypatch.setattr(trial_load, "_known", results.get)
    monkeypatch.setattr(trial_load, "_remember", lambda key, result: results.update({key: result}))


def changed(path: Path, change: Callable[[dict[str, Any]], Any], architecture: str = "") -> Path:
    """Write a tiny Llama model whose tensors were changed."""
    whole = GgufParts([write_llama(path.with_name("original.gguf"), layers=2)])
    tensors = dict(whole.tensors)
    change(tensors)
    metadata = whole.metadata(0, whole.layer_count)
    if architecture:
        metadata = {
            key.replace(f"{whole.architecture}.", f"{architecture}."): value
            for key, value in metadata.items()
        }
    write_gguf(path, architecture or whole.architecture, metadata, tensors)
    path.with_name("original.gguf").unlink()
    return path


def add(*names: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update(dict.fromkeys(names, tensors["output_norm.weight"]))


def remove(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(name)


def replace_with(name: str, other: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: tensors[other]})


UNUSUAL: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "image encoder": (add("v.patch_embd.weight"), "", "v.patch_embd.weight"),
    "image projector": (add("mm.0.weight", "mm.2.weight", "mm.3.weight"), "", "mm.0.weight"),
    "audio encoder": (add("a.conv1.weight"), "", "audio encoder"),
    "unused tensor": (add("blk.0.secret.weight"), "", "blk.0.secret.weight"),
    "missing tensor": (remove("blk.1.ffn_up.weight"), "", "'blk.1.ffn_up.weight'"),
    "missing embedding": (remove("token_embd.weight"), "", "'token_embd.weight'"),
    "wrong shape": (
        replace_with("blk.1.attn_norm.weight", "blk.1.ffn_up.weight"),
        "",
        "'blk.1.attn_norm.weight'",
    ),
    "unknown architecture": (dict, "zukunft", "'zukunft'"),
    "Ollama's architecture": (dict, "gptoss", "Ollama's own"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_files_are_explained_and_not_offered(name: str, asks_llama_cpp: None, tmp_path: Path) -> None:
    change, architecture, reason = UNUSUAL[name]
    path = changed(tmp_path / "model.gguf", change, architecture)
    with raises(ModelFileError, reason, code="model_file_not_supported") as caught:
        edgespec.plan(str(path), None)
    assert read_gguf_info(path).doubt
    trial = TrialModel("model", path, format_of("gguf"), runs=False)
    assert why_refused([trial, trial])[0] == caught.value.what


@pytest.mark.parametrize("write", [write_llama, write_moe, write_mamba, write_jamba])
def test_good_models_are_not_refused(
    write: Callable[[Path], Path], asks_llama_cpp: None, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf")
    assert why_refused([TrialModel("model", path, format_of("gguf"), runs=False)]) == [""]


def test_ordinary_models_need_no_trial(tmp_path: Path, demo_target: Path, demo_draft: Path) -> None:
    for path in (write_llama(tmp_path / "model.gguf"), demo_target, demo_draft):
        assert read_gguf_info(path).doubt == ""


def test_a_refused_model_does_not_hide_the_others(asks_llama_cpp: None, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    bad = changed(tmp_path / "bad" / "bad.gguf", add("v.a.weight"))
    good = write_llama(tmp_path / "good.gguf")
    crashing = write_llama(tmp_path / "crashing.gguf", architecture="llada-moe")
    trials = [
        TrialModel(path.name, path, format_of("gguf"), runs=False) for path in (bad, crashing, good, bad)
    ]
    for _ in range(2):
        first, second, third, fourth = why_refused(trials)
        assert "contains an image encoder" in first == fourth
        assert "crashed" in second
        assert third == ""


def test_messages_of_llama_cpp_about_damage_are_left_alone() -> None:
    header = GgufHeader({"general.architecture": "llama"}, (GgufTensor("v.a", (1,), 0, 0),), 0)
    assert explain_refusal("tensor 'a' data is not within the file bounds", [header]) is None
    assert foreign_part(["token_embd.weight", "blk.0.attn_v.weight", "value.weight"]) == ""


def test_metadata_that_do_not_fit_the_tensors_raise_a_doubt(tmp_path: Path) -> None:
    header = read_header(write_llama(tmp_path / "model.gguf"))
    assert why_doubtful([header]) == ""
    # A huge number of layers must not take long.
    for change in ({"llama.embedding_length": 7}, {"llama.block_count": 1 << 62}):
        metadata = {**header.metadata, **change}
        assert why_doubtful([GgufHeader(metadata, header.tensors, header.size_bytes)])
