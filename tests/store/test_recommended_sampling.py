"""Tests of the sampling settings that a model's makers recommend: where they come from, and which counts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

import edgespec
from edgespec.options.stated_sampling import stated_sampling
from edgespec.store.catalogue import load_catalogue, models_folder
from edgespec.store.recommended_sampling import RecommendedSetting, recommended_sampling
from edgespec.store.reference import Resolved, resolve
from tests.backends.tiny_models import write_llama
from tests.store.fake_stores import OllamaStore, add_to_lmstudio

IN_FILE = "the model's files"


def settings_of(model: Resolved) -> dict[str, RecommendedSetting]:
    return recommended_sampling(model, model.entry)


def test_a_gguf_file_states_settings_in_its_header(tmp_path: Path) -> None:
    stated = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "penalty_repeat": 1.05, "penalty_last_n": -1}
    path = write_llama(tmp_path / "model.gguf", sampling=stated)
    assert settings_of(resolve(str(path))) == {
        "temperature": (0.6, IN_FILE),
        "top_p": (0.95, IN_FILE),
        "top_k": (20, IN_FILE),
        "repetition_penalty": (1.05, IN_FILE),
        "penalty_window": (-1, IN_FILE),
    }


def test_an_mlx_folder_states_settings_in_its_generation_config(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models_folder() / "demo-mlx-draft", folder)
    assert settings_of(resolve(str(folder))) == {}
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 1.0, "top_k": 64, "min_p": None, "eos_token_id": [1]})
    )
    assert settings_of(resolve(str(folder))) == {"temperature": (1.0, IN_FILE), "top_k": (64, IN_FILE)}
    (folder / "generation_config.json").write_text("{")
    assert settings_of(resolve(str(folder))) == {}


def test_ollama_counts_before_the_file_and_the_file_before_the_catalogue(
    own_home: Path, tmp_path: Path
) -> None:
    store = OllamaStore(own_home / ".ollama" / "models")
    path = write_llama(tmp_path / "model.gguf", sampling={"temp": 0.6, "top_k": 20})
    parameters = {"temperature": 1, "repeat_penalty": 1.1, "num_ctx": 4096, "stop": ["<|im_end|>"]}
    store.add("tiny", "latest", path.read_bytes(), ("params", json.dumps(parameters).encode()))
    model = resolve("tiny")
    entry = load_catalogue().find("qwen3-8b")
    assert entry is not None
    assert settings_of(replace(model, entry=entry[0])) == {
        "temperature": (1.0, "Ollama"),
        "repetition_penalty": (1.1, "Ollama"),
        "top_k": (20, IN_FILE),
        "top_p": (0.95, "the catalogue"),
    }
    # Only what is really not used is reported when the model is loaded.
    assert model.unused == ("template", "num_ctx")


@pytest.mark.parametrize(
    ("header", "temperature"),
    [
        # As in the files of the Python package, and in those that bartowski's tools write.
        ({"name": "Smollm2 135M 8k Lc100K Mix1 Ep2"}, 0.2),
        ({"name": "SmolLM2 135M Instruct"}, 0.2),
        ({"basename": "SmolLM2", "size_label": "135M", "finetune": "Instruct"}, 0.2),
        ({"name": "Qwen3-8B"}, 0.6),
        # The base model, and a model that someone has trained further.
        ({"name": "SmolLM2 135M"}, None),
        ({"name": "My SmolLM2 135M Instruct"}, None),
        ({}, None),
    ],
)
def test_a_copy_in_another_program_has_the_settings_of_the_catalogue(
    own_home: Path, tmp_path: Path, header: dict[str, str], temperature: float | None
) -> None:
    path = write_llama(tmp_path / "model.gguf", general=header)
    add_to_lmstudio(own_home / ".lmstudio" / "models", "someone/copies/renamed.gguf", path)
    model = resolve("lmstudio:someone/copies")
    expected = None if temperature is None else (temperature, "the catalogue")
    assert settings_of(model).get("temperature") == expected


def test_a_model_that_is_not_on_this_machine_has_the_settings_of_the_catalogue() -> None:
    entry = load_catalogue().find("qwen3-8b")
    assert entry is not None
    settings = recommended_sampling(None, entry[0])
    assert settings["temperature"] == (0.6, "the catalogue")
    assert not recommended_sampling(None, replace(entry[0], sampling=MappingProxyType({})))


@pytest.mark.parametrize("value", [-1.0, float("nan"), "0.7", True, None, [0.7]])
def test_invalid_values_are_left_out(value: object) -> None:
    assert stated_sampling({"temp": value, "top_p": 0.9, "mirostat": 1}) == {"top_p": 0.9}


def test_numbers_are_read_as_other_programs_mean_them() -> None:
    assert stated_sampling({"top_k": -1}) == {"top_k": 0}
    assert stated_sampling({"top_k": 20.0, "temperature": 1}) == {"top_k": 20, "temperature": 1.0}
    assert stated_sampling({"top_k": 20.5}) == {}


def test_every_reply_uses_them_and_an_option_has_precedence(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", sampling={"temp": 0.0, "top_k": 20})
    with edgespec.load(str(path), "none", context=256, threads=1, exactness="off") as runtime:
        assert runtime.reply_defaults()["temperature"] == 0.0
        assert runtime.reply_defaults()["top_k"] == 20
        greedy = [runtime.generate("a", raw=True, max_tokens=12, seed=seed).tokens for seed in (1, 2)]
        assert greedy[0] == greedy[1]
        warm = runtime.generate("a", raw=True, max_tokens=12, seed=1, temperature=5.0, top_k=0)
        assert warm.tokens != greedy[0]
