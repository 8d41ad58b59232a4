"""The catalogue is complete, and its embedded models are shipped and documented.

The suggested first model fits, its command works as printed, and both models can be downloaded.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from edgespec.cli.help import load_command
from edgespec.errors import ModelNotFoundError
from edgespec.store.catalogue import Catalogue, ModelEntry, load_catalogue, models_folder, suggest_models
from edgespec.store.hub_files import HubFile, choose_files, is_quantisation
from edgespec.store.reference import resolve
from edgespec.system.installation import chat_command
from tests.raising import raises
from tests.store import stand_in_hub
from tests.store.stand_in_hub import StandInHub

ENTRIES = load_catalogue().entries
GIB = 1 << 30


def test_every_entry_is_complete() -> None:
    for entry in ENTRIES:
        check_entry(entry)


def check_entry(entry: ModelEntry) -> None:
    assert entry.parameters > 0, entry.name
    assert entry.context_tokens >= 1024
    assert entry.licence
    assert entry.chat_template
    assert entry.sources
    assert bool(entry.embedded_file) != bool(entry.repository)
    for quantisation in (entry.quantisation, *entry.aliases.values()):
        in_bits = re.fullmatch(r"[2-8]-bit", quantisation) is not None
        assert in_bits if entry.format == "mlx" else is_quantisation(quantisation)
    if entry.embedded_path:
        assert entry.embedded_path.is_dir() == (entry.format == "mlx")
        assert entry.embedded_path.exists()
        assert entry.notice
    else:
        # Between 1.5 and 16 bits per weight, which catches typing errors in either number.
        assert 0.19 < entry.approximate_file_bytes / entry.parameters < 2.0


def test_every_head_states_its_licence_or_that_none_was_found() -> None:
    tables = tomllib.loads((models_folder() / "catalogue.toml").read_text("utf-8"))["head"]
    assert [table["name"] for table in tables if "licence" not in table] == []


def test_no_entry_has_unverified_facts() -> None:
    catalogue = load_catalogue()
    sources = {entry.name: entry.sources for entry in catalogue.entries}
    sources |= {head.name: head.sources for head in catalogue.heads}
    assert not [name for name, given in sources.items() if any("not verified" in each for each in given)]


def test_every_draft_is_known_and_smaller() -> None:
    for entry in ENTRIES:
        for name in entry.drafts:
            found = load_catalogue().find(name)
            assert found is not None, name
            assert found[0].parameters * 2 <= entry.parameters, (entry.name, name)
            assert found[0].format == entry.format, (entry.name, name)


@pytest.mark.parametrize(
    ("alias", "name", "quantisation"),
    [
        ("70b-q4", "llama-3.3-70b", "Q4_K_M"),
        ("8B-Q4", "llama-3.1-8b", "Q4_K_M"),
        ("8b-q8", "llama-3.1-8b", "Q8_0"),
        ("gemma4:e4b", "gemma-4-e4b", "Q4_K_M"),
        ("gpt-oss:20b", "gpt-oss-20b", "MXFP4"),
        ("qwen3.6:27b", "qwen3.6-27b", "UD-Q4_K_XL"),
        ("qwen3.5:27b", "qwen3.5-27b", "Q4_K_M"),
        ("qwen3.5:35b", "qwen3.5-35b-a3b", "UD-Q4_K_XL"),
        ("qwen3.6-27b-mlx", "qwen3.6-27b-mlx", "4-bit"),
        ("gpt-oss-20b-mlx", "gpt-oss-20b-mlx", "4-bit"),
        ("demo", "demo", "Q8_0"),
        ("demo-mlx", "demo-mlx", "8-bit"),
        ("8b-mlx", "llama-3.1-8b-mlx", "4-bit"),
        ("70B-MLX", "llama-3.3-70b-mlx", "4-bit"),
        ("llama3.2:1b-mlx", "llama-3.2-1b-mlx", "4-bit"),
        ("qwen3-8b-mlx", "qwen3-8b-mlx", "4-bit"),
    ],
)
def test_aliases(alias: str, name: str, quantisation: str) -> None:
    found = load_catalogue().find(alias)
    assert found is not None
    assert (found[0].name, found[1]) == (name, quantisation)


def test_every_model_with_an_mlx_repository_has_an_mlx_entry() -> None:
    catalogue = load_catalogue()
    for entry in ENTRIES:
        if entry.format == "gguf" and entry.mlx_repository:
            found = catalogue.find(f"{entry.name}-mlx")
            assert found is not None
            assert found[0].format == "mlx"
            assert found[0].repository == entry.mlx_repository
            assert catalogue.of_repository(entry.mlx_repository) == found[0]
            assert catalogue.of_repository(entry.gguf_repository) == entry
            assert list(found[0].drafts) == [f"{name}-mlx" for name in entry.drafts]


def test_a_duplicate_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="the catalogue has two models named demo"):
        Catalogue([ENTRIES[0], ENTRIES[0]])


def test_the_model_card_covers_exactly_the_shipped_files() -> None:
    card = (models_folder() / "MODEL_CARD.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w-]+\.(?:gguf|jsonl))`", card))
    shipped = {path.name for path in models_folder().iterdir() if path.suffix in (".gguf", ".jsonl")}
    assert named == shipped
    folders = {path.parent.name for path in models_folder().glob("*/config.json")}
    assert set(re.findall(r"^\| `([\w-]+)/` \|.*\bMLX\b", card, re.MULTILINE)) == folders
    for folder in folders:
        size_bytes = sum(path.stat().st_size for path in (models_folder() / folder).iterdir())
        assert re.search(rf"^\| `{folder}/` .*\| {size_bytes:,} \|$", card, re.MULTILINE)


def test_the_held_out_prompts_are_conversations() -> None:
    lines = (models_folder() / "eval_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    assert len(prompts) == 34
    assert all(prompt["messages"][-1]["role"] == "user" for prompt in prompts)


def test_resolving_a_name_does_not_import_huggingface_hub() -> None:
    imported = "sys.exit('huggingface_hub' in sys.modules)"
    script = f"import sys; from edgespec.store.reference import resolve; resolve('demo'); {imported}"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("name", "quantisation", "parts"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M", 1),
        ("Q8_0/qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M", 2),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL", 1),
        ("Qwen3-8B-BF16.gguf", "BF16", 1),
        ("model.fp16.gguf", "FP16", 1),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4", 1),
        ("model-IQ2_XXS.gguf", "IQ2_XXS", 1),
        ("ggml-model.gguf", "", 1),
    ],
)
def test_the_quantisation_is_read_from_the_name(name: str, quantisation: str, parts: int) -> None:
    file = HubFile(name)
    assert (file.quantisation, file.part_count) == (quantisation, parts)


def choose(names: list[str], quantisation: str | None) -> list[str]:
    return [file.name for file in choose_files("u/r", map(HubFile, names), quantisation)]


def test_the_only_model_is_the_default_whatever_its_quantisation() -> None:
    assert choose(["a-Q8_0.gguf", "mmproj-a-F16.gguf", "a.imatrix.gguf"], None) == ["a-Q8_0.gguf"]
    with raises(ModelNotFoundError, "u/r", "Q4_K_M", "Q8_0, Q6_K", code="quantisation_unavailable"):
        choose(["a-Q8_0.gguf", "b-Q6_K.gguf"], None)


def test_a_file_can_be_named_where_two_models_share_a_quantisation() -> None:
    names = ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"]
    with raises(ModelNotFoundError, "2 models", "Q4_K_M", "u/r", "a-Q4_K_M.gguf", code="ambiguous"):
        choose(names, None)
    assert choose(names, "B-q4_k_m.gguf") == ["b-Q4_K_M.gguf"]


def test_repositories_without_a_complete_model() -> None:
    with raises(ModelNotFoundError, "no GGUF", code="repository_unusable"):
        choose(["model.safetensors"], None)
    with raises(ModelNotFoundError, "1 of", "2 parts", code="repository_unusable"):
        choose(["a-Q8_0-00001-of-00002.gguf"], "Q8_0")


def test_the_demo_models_are_called_built_in() -> None:
    """The code says `embedded`, but no text for users contains this word."""
    for entry in load_catalogue().entries:
        assert "embedded" not in entry.notice
    assert "built-in demo" in load_catalogue().find("demo")[0].notice  # type: ignore[index]
    root = models_folder().parent
    for page in (root / "README.md", root / "models" / "MODEL_CARD.md", *(root / "docs").glob("*.md")):
        assert not re.search(r"\bembedded\b", page.read_text("utf-8"), re.IGNORECASE), page


@pytest.mark.parametrize(
    ("budget_bytes", "pair"),
    [
        (2 * GIB, ("qwen3.5-0.8b", "")),
        (4 * GIB, ("qwen3.5-2b", "qwen3.5-0.8b")),
        (64 * GIB, ("qwen3.5-9b", "")),  # It drafts with its own layers for multi-token prediction.
    ],
)
def test_the_largest_model_that_fits(budget_bytes: int, pair: tuple[str, str]) -> None:
    suggestions = suggest_models(budget_bytes)
    assert suggestions[-1][:2] == pair
    sizes = [each.download_bytes for each in suggestions]
    assert sizes == sorted(sizes)


def test_mlx_models_are_suggested_for_the_mlx_demo() -> None:
    assert suggest_models(64 * GIB, "mlx")[-1][:2] == ("qwen3.5-9b-mlx", "qwen3.5-0.8b-mlx")


def test_the_command_parses_and_both_models_can_be_downloaded(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    suggestion = suggest_models(4 * GIB)[-1]
    words = ["edgespec", "chat", "--target", suggestion.target, "--draft", suggestion.draft]
    command = load_command("chat")
    assert isinstance(command, click.Command)
    options = command.make_context("chat", words[2:]).params
    for reference in (options["target"], options["draft"]):
        found = load_catalogue().find(reference)
        assert found is not None
        monkeypatch.setattr(stand_in_hub, "REPOSITORY", found[0].repository)
        path = resolve(reference).path
        assert path.name == "tiny-Q4_K_M.gguf"


def test_the_command_is_the_one_that_started_the_chat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("_EDGESPEC_CHAT_COMMAND", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert chat_command() == f"{sys.executable} -m edgespec chat"
    (tmp_path / "edgespec").touch(mode=0o755)
    assert chat_command() == f"{sys.executable} -m edgespec chat", "that is another installation"
    other = tmp_path / "my env"
    other.mkdir()
    (other / "edgespec").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["my env/edgespec", "chat"])
    assert chat_command() == f"{sys.executable} -m edgespec chat", "that is another installation too"
    monkeypatch.setattr(sys, "executable", str(other / "python"))
    assert chat_command() == "'my env/edgespec' chat"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert chat_command() == "edgespec chat"
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    monkeypatch.setenv("PATH", str(link))
    assert chat_command() == "edgespec chat", "the folder on PATH is a link to this installation"
    monkeypatch.setenv("_EDGESPEC_CHAT_COMMAND", "scripts/chat")
    assert chat_command() == "scripts/chat"
