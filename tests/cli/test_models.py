"""`edgespec models`: what is known, without downloading anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Run, json_of, one_line_error

DRAFT = ROOT / "models" / "demo-draft-q8_0.gguf"


def test_the_list_begins_with_what_is_embedded(run: Run) -> None:
    listed = json_of(run("models", "list", "--json"))
    assert [model["name"] for model in listed["models"][:2]] == ["demo", "demo-draft"]
    here = [model["name"] for model in listed["models"] if model["on_this_machine"]]
    assert here == ["demo", "demo-draft"]
    llama = next(model for model in listed["models"] if "8b-q4" in model["aliases"])
    assert llama["gguf"]
    assert llama["mlx"]
    assert llama["drafts"]
    assert llama["licence"]


def test_the_list_in_a_pipe_is_a_line_for_each_model(run: Run) -> None:
    result = run("models", "list")
    count = len(json_of(run("models", "list", "--json"))["models"])
    assert len(result.stdout.splitlines()) == count + 1
    assert "llama-3.1-8b" in result.stdout
    assert "8b-q4" in result.stdout


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


def test_own_aliases_are_listed_and_shown(run: Run, own_home: Path) -> None:
    folder = own_home / ".config" / "edgespec"
    folder.mkdir(parents=True)
    (folder / "aliases.toml").write_text(f'[aliases]\nmine = "{DRAFT}"\nbig = "70b-q4"\n')
    assert "mine" in run("models", "list").stdout
    assert json_of(run("models", "list", "--json"))["aliases"] == {"mine": str(DRAFT), "big": "70b-q4"}
    assert json_of(run("models", "show", "mine", "--json"))["model"]["architecture"] == "llama"
    assert json_of(run("models", "show", "big", "--json"))["catalogue"]["name"] == "llama-3.3-70b"


def test_show_a_model_that_is_here(run: Run) -> None:
    shown = json_of(run("models", "show", "demo", "--json"))
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
    text = run("models", "show", "demo").stdout
    for word in (
        "llama, Q8_0, 13 MB",
        "11,540,736",
        "6 MB for 1000 tokens",
        "drafts can be verified, trees too",
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


def test_show_what_nobody_knows(run: Run) -> None:
    assert "no model is called nope" in one_line_error(run("models", "show", "nope"), 1)
    assert "is not on this machine" in one_line_error(run("models", "show", "hf:some/one"), 1)
    assert "there is no file" in one_line_error(run("models", "show", "./none.gguf"), 1)
    assert "missing argument" in one_line_error(run("models", "show"), 2)
