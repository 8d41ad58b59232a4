"""`edgespec models` shows the available information without downloading anything."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from edgespec.model.formats.mlx_files import mlx_installed
from edgespec.store.catalogue import load_catalogue, models_folder
from tests.backends.published_heads import write_published
from tests.backends.tiny_gemma4_models import write_gemma4, write_gemma4_assistant
from tests.backends.tiny_heads import write_eagle
from tests.backends.tiny_models import write_llama
from tests.cli.conftest import ROOT, Run, Start, json_of, one_line_error
from tests.store.fake_stores import add_to_hub

DRAFT = ROOT / "models" / "demo-draft-q8_0.gguf"


def test_the_list_begins_with_what_is_embedded(run: Run) -> None:
    listed = json_of(run("models", "list", "--json"))
    embedded = ["demo", "demo-draft", "demo-mlx", "demo-mlx-draft"]
    assert [model["name"] for model in listed["models"][:4]] == embedded
    assert [model["name"] for model in listed["models"] if model["on_this_machine"]] == embedded
    assert [model["format"] for model in listed["models"][:4]] == ["gguf", "gguf", "mlx", "mlx"]
    llama = next(model for model in listed["models"] if "8b-q4" in model["aliases"])
    assert llama["gguf"]
    assert llama["mlx"]
    assert llama["drafts"]
    assert llama["licence"]


@pytest.mark.long
def test_the_list_in_a_pipe_is_a_line_for_each_model(run: Run) -> None:
    result = run("models", "list")
    count = len(json_of(run("models", "list", "--json"))["models"])
    assert len(result.stdout.splitlines()) == count + 1
    assert "llama-3.1-8b" in result.stdout
    assert "8b-q4, llama3.1:8b" in result.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("columns", "heads"),
    [
        (80, ["NAME", "ALSO CALLED", "FORMAT", "SIZE", "DOWNLOADED"]),
        (60, ["NAME", "SIZE", "DOWNLOADED"]),
    ],
)
def test_the_list_in_a_terminal_has_a_line_for_each_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int, heads: list[str]
) -> None:
    count = len(json_of(run("models", "list", "--json"))["models"])
    monkeypatch.setattr("edgespec.cli.screen.is_terminal", lambda _: True)
    result = run("models", "list", env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    first, _rule, *rows = result.stdout.splitlines()
    assert re.split(r"  +", first.strip()) == heads
    assert all(len(line) < columns for line in rows)
    sized = [line for line in rows if re.search(r" \d[\d.]* [MG]iB ", line)]
    assert len(sized) == count == len(list(takewhile(str.strip, rows)))


def test_a_model_in_the_shared_cache_is_here(run: Run, tmp_path: Path) -> None:
    llama = next(m for m in json_of(run("models", "list", "--json"))["models"] if "8b-q4" in m["aliases"])
    folder = tmp_path / "cache" / f"models--{llama['gguf'].replace('/', '--')}" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "model-Q4_K_M.gguf").write_bytes(DRAFT.read_bytes())
    llama = next(m for m in json_of(run("models", "list", "--json"))["models"] if "8b-q4" in m["aliases"])
    assert list(llama["files"]) == ["Q4_K_M"]
    shown = json_of(run("models", "show", "8b-q4", "--json"))
    assert shown["source"] == "hub"
    assert shown["model"]["parameters"] == 2_384_832


@pytest.mark.long
def test_own_aliases_are_listed_and_shown(run: Run, own_home: Path) -> None:
    folder = own_home / ".config" / "edgespec"
    folder.mkdir(parents=True)
    (folder / "aliases.toml").write_text(f'[aliases]\nmine = "{DRAFT}"\nbig = "70b-q4"\n')
    assert "mine" in run("models", "list").stdout
    assert json_of(run("models", "list", "--json"))["aliases"] == {"mine": str(DRAFT), "big": "70b-q4"}
    assert json_of(run("models", "show", "mine", "--json"))["model"]["architecture"] == "llama"
    assert json_of(run("models", "show", "big", "--json"))["catalogue"]["name"] == "llama-3.3-70b"


def test_show_a_model_that_is_here(run: Run) -> None:
    shown = json_of(run("models", "show", "demo", "--probe", "--json"))
    assert shown["on_this_machine"]
    assert shown["catalogue"]["name"] == "demo"
    model = shown["model"]
    assert model["parameters"] == 11_540_736
    assert model["quantisation"] == "Q8_0"
    assert model["trained_context_tokens"] == 1024
    assert model["vocab_size"] == 8192
    assert model["kv_bytes_per_1000_tokens"] == 6_144_000
    assert model["chat_template"] is True
    assert model["capabilities"]["rollback"] is True
    assert model["capabilities"]["tree"] is True
    text = run("models", "show", "demo", "--probe").stdout
    for word in (
        "llama, Q8_0, 12.0 MiB",
        "11,540,736",
        "5.9 MiB of memory per 1,000 tokens",
        "8,192 tokens (ID f688d3fd2a98)",
        "yes, with one or more proposals for each token",
    ):
        assert word in text


@pytest.mark.parametrize(
    "reference", ["8b-q4", "llama-3.1-8b:Q8_0", "hf:bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"]
)
def test_show_a_model_that_is_not_here(run: Run, reference: str) -> None:
    shown = json_of(run("models", "show", reference, "--json"))
    assert not shown["on_this_machine"]
    assert shown["model"] is None
    assert shown["catalogue"]["name"] == "llama-3.1-8b"
    assert "on this machine" in run("models", "show", reference).stdout


def test_show_names_the_recommended_settings_and_their_source(run: Run, tmp_path: Path) -> None:
    path = str(write_llama(tmp_path / "tiny.gguf", sampling={"temp": 0.6, "top_k": 20}))
    source = "the model's files"
    assert json_of(run("models", "show", path, "--json"))["sampling"] == {
        "temperature": {"value": 0.6, "source": source},
        "top_k": {"value": 20, "source": source},
    }
    assert f"temperature 0.6, top_k 20 (from {source})" in run("models", "show", path).stdout
    assert (
        "temperature 0.6, top_p 0.95, top_k 20 (from the catalogue)"
        in run("models", "show", "qwen3-8b").stdout
    )
    assert json_of(run("models", "show", "demo", "--json"))["sampling"] == {}


@pytest.mark.skipif(not mlx_installed(), reason="MLX is not installed")
def test_an_mlx_model_is_listed_and_shown_as_one(run: Run, tmp_path: Path) -> None:
    listed = json_of(run("models", "list", "--json"))["models"]
    llama = next(model for model in listed if model["name"] == "llama-3.1-8b-mlx")
    assert (llama["format"], llama["gguf"], llama["drafts"]) == ("mlx", "", ["llama-3.2-1b-mlx"])
    assert next(model for model in listed if model["name"] == "demo-mlx")["files"].keys() == {"8-bit"}
    shown = json_of(run("models", "show", "8b-mlx", "--json"))
    assert (shown["format"], shown["on_this_machine"]) == ("mlx", False)
    assert "MLX, run by mlx-lm" in run("models", "show", "8b-mlx").stdout
    assert "GGUF, run by llama.cpp" in run("models", "show", "8b-q4").stdout
    one_line_error(run("models", "show", str(tmp_path)), 1, "lacks config.json", code="model_file_incomplete")


def test_mlx_models_are_listed_only_where_mlx_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    listed = json_of(run("models", "list", "--json"))["models"]
    assert {model["format"] for model in listed} == {"gguf"}
    assert not [name for model in listed for name in model["drafts"] if name.endswith("-mlx")]
    assert json_of(run("models", "show", "qwen3-8b-mlx", "--json"))["catalogue"]["name"] == "qwen3-8b-mlx"


def test_show_says_where_the_facts_are_from(run: Run) -> None:
    shown = json_of(run("models", "show", "qwen3.6-27b", "--json"))["catalogue"]
    assert shown["heads"] == ["MTP"]
    said = run("models", "show", "qwen3.6-27b").stdout
    assert "facts from" in said
    assert shown["sources"][0][:40] in " ".join(said.split())
    assert "usable once the model is downloaded, with --method auto or mtp" in " ".join(said.split())
    assert "facts from" in run("models", "show", "qwen3-8b-eagle3").stdout


def test_show_an_mlx_model_where_mlx_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    done = run("models", "show", "demo-mlx", "--probe", "--json")
    assert done.exit_code == 1
    shown = json.loads(done.stdout)
    assert (shown["format"], shown["on_this_machine"]) == ("mlx", True)
    assert shown["model"]["parameters"] == 11_540_736
    assert "capabilities" not in shown["model"]
    assert "scripts/setup mlx" in shown["problem"]


def test_a_script_notices_that_a_model_is_broken(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes((models_folder() / "demo-target-q8_0.gguf").read_bytes()[:100_000])
    for more in ((), ("--json",)):
        done = run("models", "show", str(path), *more)
        assert done.exit_code == 1
        assert "download it again" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(not mlx_installed(), reason="MLX is not installed")
def test_show_an_mlx_model_that_is_here(start: Start, tmp_path: Path) -> None:
    from tests.backends.mlx.tiny_checkpoints import write_checkpoint

    folder = write_checkpoint(tmp_path / "tiny", "llama", quantisation=("affine", 8, 32))
    process = start("models", "show", str(folder), "--probe", "--json")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    model = json.loads(stdout)["model"]
    assert model["parameters"] == 109_888
    assert model["vocab_size"] == 280
    assert "8-bit" in model["quantisation"]
    assert model["capabilities"]["tree"]


@pytest.mark.parametrize("tag", ["nosuch", "Q2_K"])
def test_show_does_not_advise_to_download_a_version_that_does_not_exist(run: Run, tag: str) -> None:
    line = one_line_error(run("models", "show", f"demo:{tag}"), 1)
    assert "use demo" in line or "did you mean demo" in line


@pytest.mark.long
def test_the_list_shows_the_sizes_of_downloaded_files(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes() -> dict[str, str]:
        lines = run("models", "list").stdout.splitlines()
        return {line.split()[0]: line for line in lines if line.startswith(("demo ", "llama-3.1-8b "))}

    before = sizes()
    wrong = [replace(entry, approximate_file_bytes=7 << 40) for entry in load_catalogue().entries]
    monkeypatch.setattr(load_catalogue(), "entries", tuple(wrong))
    after = sizes()
    assert after["demo"] == before["demo"]
    assert "7.0 TiB" in after["llama-3.1-8b"]


def test_show_what_nobody_knows(run: Run) -> None:
    one_line_error(run("models", "show", "nope"), 1, "nope", code="model_not_found")
    one_line_error(run("models", "show", "hf:some/one"), 1, code="model_not_downloaded")
    one_line_error(run("models", "show", "./none.gguf"), 1, "no file", code="model_not_found")
    one_line_error(run("models", "show"), 2, "missing argument", code="option_invalid")


class TestHeads:
    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        write_eagle(tmp_path / "eagle3-target.gguf", layers=(0, 1, 2))
        return write_llama(tmp_path / "target.gguf", layers=3)

    def test_show_lists_the_heads_beside_a_model(self, run: Run, target: Path) -> None:
        head = target.with_name("eagle3-target.gguf")
        shown = run("models", "show", str(target)).stdout
        assert re.search(
            rf"^head +{head}: EAGLE-3; .*usable with --method auto or eagle$", shown, re.MULTILINE
        )
        (listed,) = json_of(run("models", "show", str(target), "--json"))["heads"]
        assert listed["reference"] == str(head)
        assert (listed["method"], listed["works"], listed["on_this_machine"]) == ("eagle", True, True)

    def test_show_says_how_to_use_the_head_of_the_demo(self, run: Run) -> None:
        assert "use it with --head demo-head --method eagle" in run("models", "show", "demo").output

    def test_no_speed_up_is_predicted_for_a_model_that_is_too_small(self, run: Run) -> None:
        shown = run("models", "show", "demo").stdout
        assert re.search(r"^expected speed-up +cannot be predicted", shown, re.MULTILINE)
        assert not re.search(r"speed-up \d", shown)
        listed = json_of(run("models", "show", "demo", "--json"))
        assert [each["expected_speedup"] for each in listed["drafts"] + listed["heads"]] == [None] * 2

    def test_show_says_where_the_default_settings_are_from(self, run: Run) -> None:
        advised, own = (run("models", "show", name).stdout for name in ("qwen3-8b", "granite-4.1-8b"))
        assert "temperature 0.6, top_p 0.95, top_k 20 (from the catalogue)" in advised
        assert re.search(r"^default settings +no advice from its makers was found;", own, re.MULTILINE)

    def test_show_lists_published_heads(self, run: Run) -> None:
        shown = run("models", "show", "qwen3-8b").stdout
        assert "its publisher measured 1.7x on a server GPU with 16-bit weights" in shown
        assert "not on this machine; --head qwen3-8b-eagle3 downloads it" in shown
        assert re.search(r"^head +qwen3-8b-dflash: .*; licence MIT, that of its", shown, re.MULTILINE)
        assert re.search(r"expected speed-up \d", shown)

    def test_show_a_head(self, run: Run, target: Path) -> None:
        shown = run("models", "show", str(target.with_name("eagle3-target.gguf"))).stdout
        assert re.search(r"^what it is +a draft head, .*\(EAGLE-3, method eagle\)$", shown, re.MULTILINE)
        assert not re.search("^made for", shown, re.MULTILINE)
        assert ", where MODEL is the model that it was trained for (add --method eagle" in shown
        assert "chosen draft model" not in shown

    @pytest.mark.parametrize(
        ("head", "target", "reads"),
        [
            ("demo-head", "demo", "the hidden states of the model's layers 2, 6 and 9"),
            ("demo-mlx-head", "demo-mlx", "hidden states of several layers of the model"),
        ],
    )
    def test_show_a_head_of_the_catalogue(self, run: Run, head: str, target: str, reads: str) -> None:
        lines = dict(
            re.split("  +", line, maxsplit=1) for line in run("models", "show", head).stdout.splitlines()
        )
        assert lines["head"].startswith(f"{head} -> built in: ")
        assert lines["made for"] == target
        assert lines["size"].startswith(("2.1 MiB, Q8_0", "3.9 MiB, float16"))
        assert lines["reads"].startswith(reads)
        assert lines["can propose"] == "all 8,192 tokens of the model"
        assert lines["licence"] == "CC-BY-4.0"
        assert lines["use it with"].startswith(f"--target {target} --head {head} (add --method eagle ")
        shown = json_of(run("models", "show", head, "--json"))
        assert shown["catalogue"]["targets"] == [target]
        assert shown["model"]["heads"] == ["EAGLE-3"]

    def test_show_a_head_that_is_not_on_this_machine(self, run: Run) -> None:
        shown = run("models", "show", "qwen3-8b-eagle3").stdout
        assert "no; download it with `edgespec models pull qwen3-8b-eagle3`" in shown
        assert re.search(r"^licence +none was found; see huggingface.co/AngelSlim/", shown, re.MULTILINE)
        assert "1.7x on a server GPU with 16-bit weights, measured by its publisher" in shown
        assert json_of(run("models", "show", "qwen3-8b-eagle3", "--json"))["on_this_machine"] is False

    def test_show_a_folder_with_a_head(self, run: Run, tmp_path: Path) -> None:
        folder = write_published(tmp_path / "my head", draft_vocab_size=100)
        shown = run("models", "show", str(folder)).stdout
        assert re.search(r"^can propose +100 of the 269 tokens of the model$", shown, re.MULTILINE)
        assert f"--head '{folder}'" in shown

    def test_heads_that_are_part_of_edgespec_are_not_removed(self, run: Run) -> None:
        one_line_error(run("models", "remove", "demo-head", "--yes"), 2, "part of", code="option_invalid")

    def test_show_names_an_assistant_beside_its_model(self, run: Run, tmp_path: Path) -> None:
        target = write_gemma4(tmp_path / "gemma.gguf")
        head = write_gemma4_assistant(tmp_path / "mtp-gemma.gguf")
        shown = run("models", "show", str(target)).stdout
        assert re.search(rf"^head +{head}: MTP; .*usable with --method auto or mtp$", shown, re.MULTILINE)
        assert "(MTP, method mtp)" in run("models", "show", str(head)).stdout
        one_line_error(run("plan", "--target", str(head)), 1, "--head", code="wrong_file")

    def test_the_list_does_not_complain_about_heads(self, run: Run, tmp_path: Path, target: Path) -> None:
        add_to_hub(tmp_path / "cache", "some/head-GGUF", target.with_name("eagle3-target.gguf"))
        done = run("models", "list")
        assert done.exit_code == 0
        assert "head-GGUF" not in done.output

    def test_heads_and_models_are_not_mixed_up(self, run: Run, target: Path) -> None:
        head = str(target.with_name("eagle3-target.gguf"))
        for option in ("--target", "--draft"):
            one_line_error(run("plan", option, head), 1, "--head", code="wrong_file")
        one_line_error(run("plan", "--head", "demo-draft"), 1, "--draft", code="wrong_file")

    def test_the_plan_shows_the_head(self, run: Run, target: Path) -> None:
        shown = run("plan", "--target", str(target)).stdout
        assert f"head {target.with_name('eagle3-target.gguf')}" in " ".join(shown.split())
        assert "head weights" in shown
        planned = json_of(run("plan", "--target", str(target), "--json"))
        assert planned["heads"] == [str(target.with_name("eagle3-target.gguf"))]
        without = json_of(run("plan", "--target", str(target), "--head", "none", "--json"))
        assert (without["heads"], without["why_no_head"]) == ([], "--head none was given")

    def test_pull_and_remove_accept_published_heads(self, run: Run, tmp_path: Path, target: Path) -> None:
        add_to_hub(tmp_path / "cache", "AngelSlim/Qwen3-8B_eagle3", target.with_name("eagle3-target.gguf"))
        assert (
            "qwen3-8b-eagle3 -> hf:AngelSlim/Qwen3-8B_eagle3"
            in run("models", "pull", "qwen3-8b-eagle3").stdout
        )
        removed = run("models", "remove", "qwen3-8b-eagle3", "--yes")
        assert removed.exit_code == 0
        assert "Deleted qwen3-8b-eagle3" in removed.stdout
