"""`edgespec plan`: its JSON contract, the picture, and models that are not on this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from edgespec.store.reference import resolve
from tests.backends.tiny_models import write_llama
from tests.backends.tiny_vision import write_vision_model
from tests.cli.conftest import Run, one_line_error
from tests.store.conftest import use_endpoint
from tests.store.stand_in_hub import REPOSITORY, StandInHub


def test_the_contract(run: Run) -> None:
    done = run("plan", "--memory", "1GiB", "--context", "512", "--json")
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert said["budget_bytes"] == 2**30
    assert said["fits"] is True
    assert said["context"] == 512
    assert said["decisions"] == []
    assert "why_no_draft" not in said
    kinds = {item["kind"] for item in said["items"]}
    of_model = {"weights", "cache", "compute", "output", "vocabulary"}
    assert kinds == of_model | {"process", "headroom"}
    assert sum(item["bytes"] for item in said["items"]) == said["total_bytes"] <= 2**30
    assert all(set(item) == {"name", "kind", "bytes"} for item in said["items"])
    assert [item for item in said["items"] if item["name"] == "draft weights"]


def test_the_prefix_cache_is_reported_beside_the_total(run: Run) -> None:
    def planned(*options: str) -> tuple[int, int]:
        """Return the bytes of the prefix cache, and the total."""
        said = json.loads(run("plan", "--memory", "300MiB", *options, "--json").stdout)
        assert said["total_bytes"] + said["prefix_cache_bytes"] <= said["budget_bytes"]
        return said["prefix_cache_bytes"], said["total_bytes"]

    none, total = planned("--prefix-cache", "none")
    assert none == 0
    left = 300 * 2**20 - total
    assert planned() == (left // 4, total)
    assert planned("--prefix-cache", "disk") == planned()
    assert planned("--prefix-cache-memory", "1MiB")[0] == 2**20
    assert planned("--prefix-cache-memory", "1GiB")[0] == left
    said = json.loads(run("plan", "--memory", "1GiB", "--json").stdout)
    kv_cache = next(item["bytes"] for item in said["items"] if item["name"] == "target cache")
    assert said["prefix_cache_bytes"] == 8 * kv_cache
    assert "for the cache of earlier chats" in run("plan", "--memory", "400MiB").stdout
    assert run("plan", "--prefix-cache-memory", "lots").exit_code == 2


@pytest.mark.long
def test_headroom_and_reserve_are_options(run: Run) -> None:
    def planned(*options: str) -> dict[str, int]:
        said = json.loads(run("plan", *options, "--json").stdout)
        return {item["kind"]: item["bytes"] for item in said["items"]} | {"budget": said["budget_bytes"]}

    assert planned()["headroom"] == 64 * 2**20
    assert planned("--headroom", "1GiB")["headroom"] == 2**30
    assert planned("--headroom", "0B")["headroom"] == 0
    more = planned("--reserve", "512MiB")["budget"] - planned("--reserve", "2GiB")["budget"]
    assert abs(more - 1.5 * 2**30) < 2**29, "what is available changes meanwhile"


def test_how_drafts_are_made_is_part_of_it(run: Run, tmp_path: Path) -> None:
    def planned(*options: str) -> dict[str, int]:
        said = json.loads(run("plan", "--memory", "1GiB", "--context", "1024", *options, "--json").stdout)
        return {item["name"]: item["bytes"] for item in said["items"]}

    usual = planned()
    assert planned("--draft-window", "64")["draft cache"] < usual["draft cache"]
    wide = planned("--method", "model", "--draft-branches", "8,4")
    assert wide["target compute buffers"] > usual["target compute buffers"]
    assert run("plan", "--draft", "none", "--method", "model").exit_code == 2
    one_line_error(run("plan", "--adapter", str(tmp_path)), 1, ".gguf", code="adapter_unusable")


@pytest.mark.long
@pytest.mark.parametrize("command", [("plan", "--json"), ("generate", "-n", "1", "--exactness", "off", "hi")])
def test_an_option_for_experts_without_effect_is_a_warning(run: Run, command: tuple[str, ...]) -> None:
    done = run(*command, "--target", "demo", "--draft", "none", "--experts", "cpu")
    assert done.exit_code == 0
    assert done.stderr == "warning: --experts has no effect: demo has no experts\n"
    assert "experts" not in run(*command, "--target", "demo", "--draft", "none").stderr


def test_what_does_not_fit_says_what_to_do(run: Run) -> None:
    done = run("plan", "--memory", "20MiB", "--json")
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert said["fits"] is False
    assert said["why_no_draft"] == "the draft model demo-draft does not fit in memory"
    assert "raise --memory" in said["advice"]
    assert {tuple(each) for each in said["decisions"]} == {("what", "why", "bytes")}


def test_what_is_given_up_is_told(run: Run) -> None:
    done = run(
        "plan", "--memory", "124MiB", "--headroom", "8MiB", "--draft", "none", "--prefer", "context", "--json"
    )
    said = json.loads(done.stdout)
    assert said["fits"]
    assert [each["what"] for each in said["decisions"]] == ["a KV cache of type q8_0"]
    assert said["kv_type"] == "q8_0"
    done = run("plan", "--memory", "124MiB", "--headroom", "8MiB", "--draft", "none")
    assert "a KV cache of type q8_0 (frees 2.6 MiB)" in done.stdout


def test_a_cache_that_is_read_to_the_last_bit(run: Run) -> None:
    asked = ("plan", "--context", "65536", "--memory", "8GiB", "--json")
    usual, exact = (json.loads(run(*asked, *more).stdout) for more in (["--exactness", "off"], []))
    assert (usual["kv_type"], exact["kv_type"]) == ("f16", "f16/bf16")


@pytest.mark.long
def test_the_picture(run: Run) -> None:
    done = run("plan", "--memory", "400MiB")
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "model demo\ndraft model demo-draft\n"
        "context 1,024 tokens (as many as the model was trained for)\n"
        "KV cache type f16/bf16\n"
        "expected speed unknown; to measure this machine, run `edgespec recommend`\n\n"
    )
    assert "of 400 MiB memory, plus up to " in done.stdout
    assert "█" in done.stdout
    assert "░" in done.stdout
    over = run("plan", "--memory", "50MiB")
    assert "▒" in over.stdout
    assert re.search(r"does not fit in memory: raise --memory to \d+ MiB or more", over.stdout)
    lines = over.stdout.splitlines()
    given_up = lines[lines.index("Changed to save memory, but still too large:") + 1 : lines.index("", -4)]
    assert given_up
    assert all(line.startswith("  ") for line in given_up), "what goes on in another line is seen to"
    assert all(line == line.rstrip() for line in lines)
    assert ">999%" in run("plan", "--memory", "1MiB").stdout


@pytest.mark.long
def test_how_much_of_a_longer_text_the_draft_sees_is_told(run: Run) -> None:
    asked = ("plan", "--context", "24576", "--draft-window", "700")
    assert json.loads(run(*asked, "--json").stdout)["draft_sees"] == {"first_tokens": 4, "last_tokens": 700}
    assert (
        "in longer chats, the draft model sees only the first 4 and the last 700 tokens\n"
        in run(*asked).stdout
    )
    assert "draft_sees" not in json.loads(run("plan", "--json").stdout)
    alone = run("plan", "--context", "24576", "--draft", "none")
    assert "the draft model reads" not in alone.stdout


def test_how_long_the_context_may_become_is_told(run: Run, tmp_path: Path) -> None:
    path = str(write_llama(tmp_path / "long.gguf", context=1 << 17))
    options = ("plan", "--target", path, "--draft", "none", "--memory", "4GiB")
    said = json.loads(run(*options, "--json").stdout)
    assert (said["context"], said["context_trained"], said["context_begins"]) == (1 << 17, 1 << 17, 2048)
    shown = " ".join(run(*options).stdout.split())
    assert (
        "131,072 tokens (as many as the model was trained for; memory is allocated as the chat grows, at"
        " first for 2,048) KV cache" in shown
    )
    asked = " ".join(run(*options, "--context", "1024").stdout.split())
    assert "context 1,024 tokens KV cache" in asked
    beyond = " ".join(run(*options, "--context", "262144").stdout.split())
    assert "262,144 tokens (more than the 131,072 that the model was trained for; memory" in beyond


def test_options_of_no_use(run: Run) -> None:
    assert run("plan", "--prefer", "beauty").exit_code == 2
    assert run("plan", "--memory", "lots").exit_code == 2
    assert run("plan", "--headroom", "lots").exit_code == 2
    assert run("plan", "--reserve", "lots").exit_code == 2


class TestNotHere:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandInHub:
        """Set up a hub with a model in one part and in two, and its MLX version in another repository."""
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        whole = write_llama(tmp_path / "tiny-Q4_K_M.gguf").read_bytes()
        hub = StandInHub(files={"tiny-Q4_K_M.gguf": whole + bytes(30_000_000)})
        hub.start()
        use_endpoint(monkeypatch, hub.url)
        return hub

    def test_its_metadata_is_read_and_nothing_else(self, run: Run, hub: StandInHub, tmp_path: Path) -> None:
        done = run("plan", "--target", REPOSITORY, "--draft", "none", "--context", "512", "--json")
        hub.stop()
        assert done.exit_code == 0, done.output
        here = tmp_path / "tiny-Q4_K_M.gguf"
        same = run("plan", "--target", str(here), "--draft", "none", "--context", "512", "--json")
        assert json.loads(done.stdout)["items"] == json.loads(same.stdout)["items"]
        assert not list((tmp_path / "cache").rglob("*.gguf"))

    def test_its_projector_is_counted(self, run: Run, hub: StandInHub, tmp_path: Path) -> None:
        files = write_vision_model(tmp_path / "seer", "llava")
        hub.files = {f"{path.stem}-F16.gguf": path.read_bytes() for path in files}
        done = run("plan", "--target", REPOSITORY, "--draft", "none", "--context", "512", "--json")
        hub.stop()
        assert done.exit_code == 0, done.output
        items = json.loads(done.stdout)["items"]
        projector = [item["kind"] for item in items if item["name"].startswith("projector")]
        assert projector == ["weights", "compute"]
        same = run("plan", "--target", str(files.model), "--draft", "none", "--context", "512", "--json")
        assert items == json.loads(same.stdout)["items"]

    def test_an_mlx_model(
        self, run: Run, hub: StandInHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        folder = resolve("demo-mlx").path
        hub.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        done = run("plan", "--target", REPOSITORY, "--draft", "none", "--json")
        hub.stop()
        assert done.exit_code == 0, done.output
        same = run("plan", "--target", "demo-mlx", "--draft", "none", "--json")
        assert json.loads(done.stdout)["items"] == json.loads(same.stdout)["items"]

    def test_a_hub_that_cannot_be_reached(self, run: Run, hub: StandInHub) -> None:
        hub.stop()
        done = run("plan", "--target", REPOSITORY)
        assert done.exit_code == 1
        assert "cannot reach http" in done.output


def test_a_context_that_is_rounded_up_says_so(run: Run) -> None:
    assert (
        "context 512 tokens (rounded up from 300 to a multiple of 256)"
        in run("plan", "--context", "300").stdout
    )
    assert "rounded" not in run("plan", "--context", "512").stdout
