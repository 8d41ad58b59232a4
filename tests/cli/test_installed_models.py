"""A new user's Ollama and LM Studio models are found and used, and no byte of them changes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from edgespec.store.catalogue import models_folder
from edgespec.store.installed import plan_removal
from edgespec.store.reference import resolve
from tests.backends.tiny_heads import write_eagle
from tests.backends.tiny_models import WORDS, write_llama
from tests.cli.conftest import Run, Start, json_of, one_line_error
from tests.store.fake_stores import OllamaStore, add_to_hub, add_to_lmstudio, snapshot_of

TARGET, DRAFT = (models_folder() / f"demo-{name}-q8_0.gguf" for name in ("target", "draft"))


@pytest.fixture
def newcomer(own_home: Path) -> Path:
    """Create a home folder with an Ollama store, an LM Studio folder, and something broken in each."""
    ollama = OllamaStore(own_home / ".ollama" / "models")
    ollama.add("helper", "11m", TARGET.read_bytes())
    ollama.add("someone/guesser", "latest", DRAFT.read_bytes())
    ollama.add("broken", "latest", b"nothing")
    folder = own_home / ".lmstudio" / "models"
    add_to_lmstudio(folder, "maker/Helper-GGUF/helper-Q8_0.gguf", TARGET)
    add_to_lmstudio(folder, "mlx-community/Helper-8bit", models_folder() / "demo-mlx")
    (folder / "maker" / "Half-GGUF").mkdir()
    (folder / "maker" / "Half-GGUF" / "half-Q8_0.gguf").write_bytes(TARGET.read_bytes()[:1_000_000])
    return own_home


def test_a_newcomer_sees_and_uses_what_is_there_without_copying_a_byte(run: Run, newcomer: Path) -> None:
    stores = [newcomer / ".ollama", newcomer / ".lmstudio"]
    before = [snapshot_of(store) for store in stores]
    listed = json_of(run("models", "list", "--json"))
    local = {model["reference"]: model for model in listed["local"]}
    assert local.keys() == {
        "helper:11m", "someone/guesser:latest", "maker/Helper-GGUF", "mlx-community/Helper-8bit",
    }  # fmt: skip
    assert {model["kept_by"] for model in local.values()} == {"ollama", "lmstudio"}
    assert local["helper:11m"]["quantisation"] == "Q8_0"
    assert local["helper:11m"]["file_bytes"] == TARGET.stat().st_size
    assert local["mlx-community/Helper-8bit"]["format"] == "mlx"
    assert {model["name"] for model in listed["skipped"]} == {"broken:latest", "maker/Half-GGUF"}
    text = run("models", "list").stdout
    for reference in local:
        assert reference in text
    asked = ("generate", "List files", "-n", "12", "--seed", "1", "--json")
    plain = json_of(run(*asked, "--target", "demo", "--method", "none"))
    for reference in ("helper:11m", "maker/Helper-GGUF"):
        reply = json_of(run(*asked, "--target", reference, "--method", "model"))
        assert reply["tokens"] == plain["tokens"]
        # The small Ollama model has the same vocabulary, so it drafts by default.
        assert reply["draft"] == "someone/guesser:latest"
    assert [snapshot_of(store) for store in stores] == before
    kept = [path for path in newcomer.rglob("*") if path.is_file() and path.stat().st_size > 1_000_000]
    assert all(any(path.is_relative_to(store) for store in stores) for path in kept)


def test_show_names_the_drafts_by_their_tokens(run: Run, newcomer: Path) -> None:
    shown = json_of(run("models", "show", "helper:11m", "--json"))
    assert shown["source"] == "ollama"
    assert shown["note"].startswith("helper:11m -> Ollama's helper:11m: ")
    assert (shown["model"]["vocab_size"], shown["model"]["licence"]) == (8192, "cc-by-4.0")
    drafts = {draft["reference"]: draft for draft in shown["drafts"]}
    assert drafts.keys() == {"someone/guesser:latest"}
    assert all(draft["shared_tokens"] == 1.0 for draft in drafts.values())
    assert shown["auto_draft"]["draft"] == "someone/guesser:latest"
    text = run("models", "show", "helper:11m").stdout
    assert re.search(r"chosen draft model +someone/guesser:latest; it has the same tokens", text)


def test_several_models_of_one_name_are_refused_in_one_line(run: Run, newcomer: Path) -> None:
    add_to_lmstudio(newcomer / ".lmstudio/models", "someone/guesser/other-Q8_0.gguf", TARGET)
    found = ("ollama:someone/guesser:latest", "lmstudio:someone/guesser")
    one_line_error(run("models", "show", "someone/guesser"), 1, *found, code="ambiguous")


class TestNamesOfOnesOwn:
    @pytest.fixture
    def file(self, own_home: Path) -> Path:
        return own_home / ".config" / "edgespec" / "aliases.toml"

    def test_an_alias_is_set_used_and_removed(self, run: Run, file: Path) -> None:
        file.parent.mkdir(parents=True)
        file.write_text('# mine\n[aliases]\nold = "demo"  # kept\n\n[pairs]\nold = "none"\n')
        result = run("models", "alias", "my.fast:one", "demo-draft")
        assert result.stdout == "my.fast:one is now an alias for demo-draft.\n"
        assert json_of(run("models", "show", "MY.fast:one", "--json"))["catalogue"]["name"] == "demo-draft"
        run("models", "alias", "OLD", "demo-draft")
        text = file.read_text()
        assert text.startswith('# mine\n[aliases]\nold = "demo-draft"  # kept\n')
        assert json_of(run("models", "remove", "my.fast:one", "--json"))["removed"] == "my.fast:one"
        assert json_of(run("models", "list", "--json"))["aliases"] == {"old": "demo-draft"}

    def test_a_file_is_made_where_there_is_none(self, run: Run, file: Path) -> None:
        assert json_of(run("models", "alias", "tiny", "demo", "--json"))["remark"] == ""
        assert file.read_text() == '[aliases]\ntiny = "demo"\n'
        remark = json_of(run("models", "alias", "big", "70b-q4", "--json"))["remark"]
        assert "is not on this machine" in remark

    @pytest.mark.parametrize(
        ("name", "reference", "status", "code"),
        [
            *((name, "demo", 2, "alias_invalid") for name in ("auto", "./x", "a/b", "", "-", "...x")),
            ("mine", "dmo", 1, "model_not_found"),
            ("mine", "./none.gguf", 1, "model_not_found"),
            ("mine", "mine", 2, "alias_invalid"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, run: Run, file: Path, name: str, reference: str, status: int, code: str
    ) -> None:
        one_line_error(run("models", "alias", name, reference), status, code=code)
        assert not file.exists()

    def test_a_pair_is_set_used_and_removed(self, run: Run, file: Path) -> None:
        assert run("models", "pair", "demo", "none").stdout == "demo now runs without a draft model.\n"
        chosen = json_of(run("models", "show", "demo", "--json"))["auto_draft"]
        assert chosen["draft"] is None
        assert chosen["why"].startswith("you turned off the draft model for demo; ")
        assert json_of(run("generate", "hi", "-n", "2", "--json"))["draft"] is None
        assert json_of(run("models", "list", "--json"))["pairs"] == {"demo": "none"}
        one_line_error(run("models", "pair", "dmo", "--remove"), 1, "demo?", code="model_not_found")
        run("models", "pair", "demo", "--remove")
        assert json_of(run("models", "show", "demo", "--json"))["auto_draft"]["draft"] == "demo-draft"
        one_line_error(run("models", "pair", "demo"), 2, "--remove", code="option_invalid")
        one_line_error(run("models", "pair", "dmo", "none"), 1, "dmo", code="model_not_found")
        one_line_error(run("models", "pair", "demo", "auto"), 2, "pair", code="option_invalid")

    def test_a_pair_of_other_tokens_is_told(self, run: Run, file: Path, tmp_path: Path) -> None:
        other = write_llama(tmp_path / "other.gguf", words=(*WORDS, *(f"▁word{i}" for i in range(60))))
        strange = write_llama(tmp_path / "strange.gguf", words=tuple(f"▁w{i}" for i in range(600)))
        remark = json_of(run("models", "pair", str(strange), str(other), "--json"))["remark"]
        assert re.search(r"other.gguf has only \d[\d.]*% of ", remark)
        assert json_of(run("models", "pair", "demo", "demo-draft", "--json"))["remark"] == ""
        other.write_bytes(other.read_bytes()[:500])
        remark = json_of(run("models", "pair", "demo", str(other), "--json"))["remark"]
        assert "not a complete GGUF file" in remark

    def test_a_file_in_a_form_of_ones_own_is_left_alone(self, run: Run, file: Path) -> None:
        file.parent.mkdir(parents=True)
        file.write_text('aliases = {mine = "demo"}\n')
        result = run("models", "alias", "mine", "demo-draft")
        one_line_error(result, 1, "automatically", code="configuration_invalid")
        assert file.read_text() == 'aliases = {mine = "demo"}\n'

    @pytest.mark.long
    def test_concurrent_changes_are_all_kept(self, start: Start, file: Path) -> None:
        code = (
            "import sys\nfrom edgespec.cli.models import write_name\n"
            "for at in range(20): write_name('aliases', f'{sys.argv[1]}{at}', 'demo')\n"
        )
        processes = [start(name, code=code) for name in "abc"]
        for process in processes:
            assert process.wait(120) == 0, process.stderr and process.stderr.read()
        assert len(tomllib.loads(file.read_text())["aliases"]) == 60


class TestRemove:
    def test_a_model_of_the_cache_goes_and_what_others_use_stays(self, run: Run, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        add_to_hub(cache, "maker/One-GGUF", DRAFT, TARGET)
        add_to_hub(cache, "maker/One-GGUF", TARGET, commit="2" * 40)
        reference = f"hf:maker/One-GGUF:{DRAFT.name}"
        one_line_error(run("models", "remove", reference), 2, "add --yes", code="confirmation_needed")
        removed = json_of(run("models", "remove", reference, "--yes", "--json"))
        assert removed["freed_bytes"] == DRAFT.stat().st_size
        one_line_error(run("models", "show", reference), 1, code="model_not_downloaded")
        # The other model is in two snapshots, and only the newer snapshot's link is removed.
        run("models", "remove", f"hf:maker/One-GGUF:{TARGET.name}", "--yes")
        assert json_of(run("models", "show", f"hf:maker/One-GGUF:{TARGET.name}", "--json"))["on_this_machine"]

    def test_a_projector_goes_with_its_last_model(self, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        projector = tmp_path / "mmproj-f16.gguf"
        projector.write_bytes(b"GGUF projector")
        head = write_eagle(tmp_path / "eagle3.gguf", layers=(0, 1, 2))
        snapshot = add_to_hub(cache, "maker/Seer-GGUF", TARGET, projector, head)
        (snapshot / "sub").mkdir()
        add_to_hub(cache, "maker/Seer-GGUF", DRAFT)
        (snapshot / "sub" / DRAFT.name).symlink_to((snapshot / DRAFT.name).resolve())
        (snapshot / DRAFT.name).unlink()

        def remove(file: str) -> int:
            return plan_removal(resolve(f"hf:maker/Seer-GGUF:{file}", allow_download=False)).execute()

        assert remove(TARGET.name) == TARGET.stat().st_size
        assert (snapshot / projector.name).exists()
        assert remove(DRAFT.name) == DRAFT.stat().st_size + projector.stat().st_size
        assert remove(head.name) == head.stat().st_size
        assert [path.name for path in cache.rglob("*") if path.is_file()] == ["main"]
        assert not snapshot.exists()

    @pytest.mark.parametrize("name", ["mtp/weights.safetensors", "zoo/mtp.safetensors"])
    def test_separate_mtp_layers_go_with_their_model(self, tmp_path: Path, name: str) -> None:
        cache = tmp_path / "cache"
        layers = tmp_path / "layers"
        layers.write_bytes(b"layers")
        model = models_folder() / "demo-mlx-draft"
        snapshot = add_to_hub(cache, "maker/One", *model.iterdir(), layers)
        (snapshot / name).parent.mkdir()
        (snapshot / name).symlink_to((snapshot / "layers").resolve())
        (snapshot / "layers").unlink()
        plan_removal(resolve("hf:maker/One", allow_download=False)).execute()
        assert [path.name for path in cache.rglob("*") if path.is_file()] == ["main"]
        assert not snapshot.exists()

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("reference", "line"),
        [
            ("demo", "part of edgespec"),
            ("helper:11m", "delete it with `ollama rm`"),
            ("maker/Helper-GGUF", "it is managed by LM Studio"),
            (str(DRAFT), "it is your own file"),
        ],
    )
    def test_what_is_not_ours_stays(self, run: Run, newcomer: Path, reference: str, line: str) -> None:
        before = snapshot_of(newcomer)
        one_line_error(run("models", "remove", reference, "--yes"), 2, line, code="option_invalid")
        assert {name: at for name, at in snapshot_of(newcomer).items() if name in before} == before


def test_pull_says_where_it_is(run: Run, newcomer: Path) -> None:
    assert run("models", "pull", "helper:11m").stdout.startswith("helper:11m -> Ollama's helper:11m: ")
    assert json_of(run("models", "pull", "demo", "--json"))["source"] == "embedded"
    one_line_error(run("models", "pull", "8b-q4"), 1, code="offline")
