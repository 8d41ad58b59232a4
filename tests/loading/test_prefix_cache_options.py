"""Prefixes on disk are reused only by the same model with the same options."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.errors import OptionError
from edgespec.loading import exact, prefix_cache_options
from edgespec.loading.load_request import LoadRequest
from edgespec.loading.pair_loading import load_target
from edgespec.loading.prefix_cache_options import _identity, file_states
from edgespec.memory.prefix_cache.store import ReuseCosts
from edgespec.methods.costs.target_costs import FreeCosts
from edgespec.model.base import LoadOptions
from edgespec.model.model_facts import Adapter
from edgespec.model.registry import backend_of
from edgespec.system.files import sampled_sha256
from tests.tables import table

PROMPT = "How do I list files by size? " * 4
OPTIONS: dict[str, Any] = {
    "draft": "none",
    "method": "none",
    "threads": 1,
    "context": 512,
    "prefix_cache": "disk",
    "exactness": "off",
    "measure_costs": False,
}


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(ReuseCosts, "saves_time", lambda _self, tokens, _bytes: tokens > 0)


def held(target: Path, **options: Any) -> int:
    """Return the prompt tokens that come from the prefix cache."""
    with edgespec.load(str(target), **{**OPTIONS, **options}) as runtime:
        return runtime.generate(PROMPT, max_tokens=4, seed=1).stats.cached_prompt_tokens


def test_only_the_same_model_with_the_same_options_reuses_prefixes(demo_target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(demo_target, copy)
    assert held(copy) == 0
    assert held(copy) > 20
    for options in (
        {"kv_type": "q8_0"},
        {"flash_attention": "off"},
        {"threads": 2},
        {"prefix_cache": "memory"},
    ):
        assert held(copy, **options) == 0
    assert held(copy, context=256) > 20
    # One byte of the weights, somewhere.
    with copy.open("r+b") as file:
        file.seek(-123_457, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert held(copy) == 0
    assert held(copy) > 20


@pytest.mark.skipif(os.name != "posix", reason="where it is the time the file was made")
def test_changed_weights_with_the_old_file_time_are_detected(demo_target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(demo_target, copy)
    assert held(copy) == 0
    before, sample = copy.stat(), sampled_sha256(copy)
    with copy.open("r+b") as file:
        file.seek(-450_000, os.SEEK_END)
        file.write(bytes(64))
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (copy.stat().st_size, copy.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert sampled_sha256(copy) == sample
    assert held(copy) == 0


def changed(path: Path) -> None:
    """Replace the file by one with other weights."""
    other = path.with_name("other.gguf")
    whole = bytearray(path.read_bytes())
    whole[-123_457] ^= 1
    other.write_bytes(whole)
    os.replace(other, path)


@pytest.mark.parametrize("when", ["before it is read", "after it was read"])
def test_weights_replaced_during_loading_disable_the_disk_cache(
    when: str, demo_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(demo_target, copy)

    def swapped(*given: Any) -> Any:
        if when == "before it is read":
            changed(copy)
            return load_target(*given)
        model = load_target(*given)
        changed(copy)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(exact, "load_target", swapped)
        with edgespec.load(str(copy), **OPTIONS) as runtime:
            runtime.generate(PROMPT, max_tokens=4, seed=1)
            assert "changed while they were being loaded" in runtime.memory().prefix_cache.notice
    assert not list((tmp_path / "data").rglob("*.kept"))
    assert held(copy) == 0
    assert held(copy) > 20


FACTS: dict[str, Any] = {
    "architecture": "other",
    "quantisation": "Q4_0",
    "parameters": 7,
    "file_bytes": 7,
    "vocab_size": 7,
    "rollback": "in another way",
}
STORED: dict[str, Any] = {
    "kv_type": "q8_0",
    "flash_attention": "off",
    "gpu_layers": 3,
    "low_bits": True,
}


class TestIdentity:
    """Every property that can change the KV cache of the same tokens changes the identity."""

    @staticmethod
    def identity(
        facts: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        how: str = "free",
        seen: tuple[str, ...] = ("model.gguf 1",),
        exact: bool = False,
        fixes_threads: bool = False,
    ) -> str:
        model, costs = table(1), FreeCosts()
        capabilities = replace(model.facts.capabilities, exact=exact)
        model.facts = replace(model.facts, capabilities=capabilities, **(facts or {}))
        costs.settings_key, costs.fixes_threads = how, fixes_threads
        return _identity(model, LoadOptions(**(options or {})), costs, seen)

    def test_identity_is_stable(self) -> None:
        assert self.identity() == self.identity(options={"threads": 1, "context_tokens": 7})

    @pytest.mark.parametrize("name", FACTS)
    def test_identity_depends_on_the_model_facts(self, name: str) -> None:
        assert self.identity(facts={name: FACTS[name]}) != self.identity()

    @pytest.mark.parametrize("name", STORED)
    def test_identity_depends_on_the_cache_format(self, name: str) -> None:
        assert self.identity(options={name: STORED[name]}) != self.identity()

    def test_identity_depends_on_the_passes_that_computed_the_cells(self) -> None:
        """Cells from unrestricted passes, such as those that replies share, round differently."""
        found = {self.identity(), self.identity(exact=True), self.identity(exact=True, fixes_threads=True)}
        assert len(found) == 3

    def test_identity_depends_on_the_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = self.identity()
        changed = replace(backend_of("gguf"), build_identity=lambda: "another build")
        monkeypatch.setattr(prefix_cache_options, "backend_of", lambda _: changed)
        assert self.identity() != before

    def test_identity_depends_on_options_and_files(self, tmp_path: Path) -> None:
        assert self.identity(how="with other threads") != self.identity()
        assert self.identity(seen=("model.gguf 2",)) != self.identity()
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(b"one")
        before = self.identity(facts={"path": str(weights)})
        weights.write_bytes(b"two")
        assert self.identity(facts={"path": str(weights)}) != before
        assert self.identity(facts={"path": str(weights.rename(tmp_path / "b.safetensors"))}) != before

    def test_identity_depends_on_the_adapter(self, tmp_path: Path) -> None:
        found = {self.identity()}
        for content in (b"one", b"two"):
            (tmp_path / "adapters.safetensors").write_bytes(content)
            found.add(self.identity(facts={"adapters": (Adapter(str(tmp_path)),)}))
        assert len(found) == 3


@pytest.mark.parametrize("folder", [False, True])
def test_file_states_change_with_the_files(folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = tmp_path if folder else path
    path.write_bytes(b"GGUF one")
    seen = [file_states(model, ())]
    os.utime(path, ns=(1, 1))
    seen.append(file_states(model, ()))
    path.write_bytes(b"GGUF one two")
    os.utime(path, ns=(1, 1))
    seen.append(file_states(model, ()))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapters.safetensors").write_bytes(b"one")
    seen.append(file_states(path, [Adapter(str(adapter))]))
    assert all(seen)
    assert len(set(seen)) == 4
    path.unlink()
    assert file_states(path, ()) == ()


def test_none_writes_no_files(demo_target: Path, tmp_path: Path) -> None:
    for place in ("none", "memory"):
        held(demo_target, prefix_cache=place)
    assert not list((tmp_path / "data").rglob("*.kept"))


def test_invalid_locations_and_sizes_are_rejected() -> None:
    for wrong in ({"prefix_cache": "cloud"}, {"prefix_cache_memory": "much"}, {"prefix_cache_disk": "-1"}):
        with pytest.raises(OptionError):
            LoadRequest.read("demo", None, wrong)
    sizes = {"prefix_cache": "disk", "prefix_cache_memory": "1GiB", "prefix_cache_disk": 5000}
    request = LoadRequest.read("demo", None, sizes)
    assert request.plan.prefix_cache_bytes == 1 << 30
    assert request.drafting.arguments["prefix_cache_disk"] == 5000
