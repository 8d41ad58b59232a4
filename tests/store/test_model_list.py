"""The public functions that list, find and download models."""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from huggingface_hub import constants

import edgespec
from edgespec.errors import DownloadError, OptionError
from edgespec.loading import model_list
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.machine_speed import MachineSpeed, TypeSpeed
from edgespec.model.formats.projector import estimate_projector
from edgespec.model.model_facts import ModelInfo
from edgespec.store.catalogue import load_catalogue, models_folder
from edgespec.store.installed import loaded_bytes
from tests.backends.tiny_gguf import finish
from tests.backends.tiny_vision import write_vision_model
from tests.raising import raises
from tests.store.stand_in_hub import REPOSITORY, StandInHub

GIB = 1 << 30


def by_name(models: list[edgespec.AvailableModel]) -> dict[str, edgespec.AvailableModel]:
    return {model.reference: model for model in models}


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_mlx_models_come_last_where_mlx_is_slower(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    models = [model for model in edgespec.list_models() if not model.is_installed]
    keys = [(model.format == "mlx" and system == "Linux", model.size_bytes) for model in models]
    assert keys == sorted(keys)


def test_the_model_in_a_package_has_the_size_of_the_copy_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = load_catalogue().find("smollm2")
    assert found is not None
    entry = found[0]
    original = ModelInfo("model", "smollm2", "llama", 1, "Q4_1", 98_362_432, 1, 1, 1, 1, "", True, "")
    assert loaded_bytes(original, entry) == entry.approximate_file_bytes
    assert loaded_bytes(replace(original, quantisation="Q4_0"), entry) == 98_362_432
    assert loaded_bytes(original, None) == 98_362_432


def test_models_on_this_machine_come_before_those_of_the_catalogue() -> None:
    models = edgespec.list_models(memory="12GiB")
    places = [model.is_installed for model in models]
    assert places == sorted(places, reverse=True)
    named = by_name(models)
    assert named["demo"].place == "embedded"
    assert (named["demo"].draft, named["demo"].download_bytes) == ("demo-draft", 0)
    assert "demo-draft" not in named
    assert named["8b-q4"].draft == "1b-q4"
    assert named["8b-q4"].download_bytes == named["8b-q4"].size_bytes + named["1b-q4"].size_bytes
    assert (named["8b-q4"].fits, named["70b-q4"].fits) == (True, False)
    assert by_name(edgespec.list_models(memory="5GiB"))["8b-q4"].fits is False
    with raises(OptionError, option="memory"):
        edgespec.list_models(memory="lots")


def test_a_downloaded_model_is_listed_once_with_its_own_size(hub: StandInHub) -> None:
    hub.files = {"tiny-Q8_0.gguf": (models_folder() / "demo-target-q8_0.gguf").read_bytes()}
    path = edgespec.download_model(f"hf:{REPOSITORY}")
    (found,) = [model for model in edgespec.list_models() if model.reference.startswith(REPOSITORY)]
    assert (found.place, found.size_bytes) == ("hub", path.stat().st_size)
    assert found.draft == ""  # `--draft auto` chooses none


def test_the_projector_of_a_listed_model_is_counted() -> None:
    found = load_catalogue().find("qwen3.5-2b")
    assert found is not None
    (entry, _) = found
    assert entry.approximate_projector_bytes > 0
    draft_bytes = by_name(edgespec.list_models())["qwen3.5-0.8b"].download_bytes
    tight, roomy = (by_name(edgespec.list_models(memory=size))["qwen3.5-2b"] for size in ("3.5GiB", "16GiB"))
    for model in (tight, roomy):
        assert model.fits
        assert model.projector_bytes == entry.approximate_projector_bytes
        assert model.download_bytes == model.size_bytes + model.projector_bytes + draft_bytes
    # If only the text fits, the model runs without images.
    assert roomy.needed_bytes == tight.needed_bytes + entry.image_bytes
    mlx = [each for each in load_catalogue().entries if each.format == "mlx"]
    assert not any(each.approximate_projector_bytes for each in mlx)


def test_the_projector_of_a_downloaded_model_is_counted(hub: StandInHub, tmp_path: Path) -> None:
    files = write_vision_model(tmp_path / "seer", "llava")
    hub.files = {"seer-F16.gguf": files.model.read_bytes()}
    edgespec.download_model(f"hf:{REPOSITORY}")

    def listed(memory: str | int) -> edgespec.AvailableModel:
        (model,) = [each for each in edgespec.list_models(memory) if each.reference.startswith(REPOSITORY)]
        return model

    alone = listed("4GiB")
    assert alone.path is not None
    shutil.copy(files.projector, alone.path.with_name("mmproj-seer-F16.gguf"))
    seeing = listed("4GiB")
    assert (alone.projector_bytes, seeing.projector_bytes) == (0, files.projector.stat().st_size)
    parts = estimate_projector(files.projector, on_gpu=False).parts
    assert seeing.needed_bytes - alone.needed_bytes == sum(part.bytes for part in parts)
    tight = listed(alone.needed_bytes)
    assert (tight.needed_bytes, tight.fits) == (alone.needed_bytes, True)


def test_speeds_are_expected_once_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(model.speed is None for model in edgespec.list_models())
    per_byte = CostCurve((1, 2, 4, 8), (1e-10, 1.1e-10, 1.2e-10, 1.4e-10))
    machine = MachineSpeed({"Q4_K": TypeSpeed(per_byte, 1e-11)}, 1e-5)
    monkeypatch.setattr(
        model_list, "saved_machine_speed", lambda form: machine if form.name == "gguf" else None
    )
    named = by_name(edgespec.list_models())
    small, large = named["1b-q4"].speed, named["8b-q4"].speed
    assert small is not None
    assert large is not None
    assert small.tokens_per_second > 4 * large.tokens_per_second
    assert large.speedup > 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="weights are read from disk on Linux only")
def test_models_a_little_larger_than_memory_run_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    per_byte = CostCurve((1, 2, 4, 8), (1e-11, 1.5e-11, 2.5e-11, 4.5e-11))
    machine = MachineSpeed({"Q4_K": TypeSpeed(per_byte, 1e-11)}, 1e-5)
    monkeypatch.setattr(
        model_list, "saved_machine_speed", lambda form: machine if form.name == "gguf" else None
    )
    monkeypatch.setattr(model_list, "read_bytes_per_second", lambda _path: 1e9)
    model_list._disk_speed.cache_clear()
    fitting = by_name(edgespec.list_models(memory="12GiB"))["8b-q4"]
    models = by_name(edgespec.list_models(memory="5GiB"))
    streamed = models["8b-q4"]
    assert (fitting.fits, fitting.is_streamed) == (True, False)
    assert (streamed.fits, streamed.is_streamed) == (False, True)
    assert not models["70b-q4"].can_run
    assert fitting.speed is not None
    assert streamed.speed is not None
    # Each pass takes as long as reading the part that does not fit from disk, whatever its width.
    seconds = (streamed.needed_bytes - 5 * GIB) / 1e9
    assert streamed.speed.tokens_per_second == pytest.approx(1 / seconds)
    assert set(streamed.speed.pass_costs.values()) == {1.0}
    assert streamed.speed.speedup > fitting.speed.speedup
    model_list._disk_speed.cache_clear()


def test_passes_of_a_mixture_of_experts_read_only_the_experts_that_they_use() -> None:
    entries = load_catalogue().entries
    mixture = next(each for each in entries if 0 < each.active_fraction < 0.2)
    dense = next(each for each in entries if each.active_fraction == 1)
    assert [model_list._reads(2.0, dense)(width) for width in (1, 8)] == [2.0, 2.0]
    one, wide = (model_list._reads(2.0, mixture)(width) for width in (1, 8))
    assert one == pytest.approx(2.0)
    assert 2 * one < wide < 2.0 / mixture.active_fraction


def test_models_are_found_on_the_hub(hub: StandInHub) -> None:
    hub.found = [
        {
            "id": "someone/Big-GGUF",
            "gguf": {"total": 70_000_000_000, "architecture": "llama"},
            "gated": "auto",
        },
        {"id": "bartowski/Llama-3.2-1B-Instruct-GGUF", "gguf": {"total": 1_235_814_432}},
        {"id": "someone/unknown-GGUF"},
        {"id": "someone/other"},
    ]
    big, known, unknown = edgespec.search_models("gguf", memory="8GiB")
    assert (big.reference, big.place, big.fits) == ("hf:someone/Big-GGUF", "search", False)
    assert 35 * 1e9 < big.size_bytes < 50 * 1e9
    assert "must first accept its licence" in big.notice
    assert (known.reference, known.fits) == ("1b-q4", True)
    assert (unknown.size_bytes, unknown.fits) == (0, True)
    assert edgespec.search_models("nothing like it") == []


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_search_without_a_network_fails_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    with raises(DownloadError, code="offline" if is_offline else "network_unreachable") as caught:
        edgespec.search_models("qwen")
    assert "\n" not in str(caught.value)


def test_a_download_can_be_cancelled_and_resumed(hub: StandInHub, cache: Path) -> None:
    with raises(edgespec.EdgespecError, "cancelled at", code="cancelled"):
        edgespec.download_model(f"hf:{REPOSITORY}", lambda _, fraction: fraction < 0.5)
    kept = next(cache.rglob("*.edgespec")).stat().st_size
    assert edgespec.download_model(f"hf:{REPOSITORY}").read_bytes() == hub.files["tiny-Q4_K_M.gguf"]
    assert hub.ranges == [f"bytes={kept}-"]


def test_the_disk_is_measured_with_the_largest_file_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file of a split model may contain only the metadata."""
    for number, size in ((1, 8), (2, 1 << 20)):
        writer = gguf.GGUFWriter(tmp_path / f"model-0000{number}-of-00002.gguf", "llama")
        writer.add_uint16("split.no", number - 1)
        writer.add_uint16("split.count", 2)
        finish(writer, {f"blk.{number}.ffn_up.weight": np.ones(size, np.float32)})
    monkeypatch.setattr(model_list, "read_bytes_per_second", lambda path: float(path.stat().st_size))
    path = tmp_path / "model-00001-of-00002.gguf"
    assert model_list._disk_speed(path) > 4 << 20
