"""Model references: the model or the one-line error that each one leads to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError, ModelFileError, ModelNotFoundError
from edgespec.store import catalogue
from edgespec.store.catalogue import load_catalogue, models_folder
from edgespec.store.drafts import choose_draft
from edgespec.store.reference import (
    HubReference,
    NameReference,
    PathReference,
    Reference,
    parse_reference,
    resolve,
)
from tests.raising import raises
from tests.store.stand_in_hub import REPOSITORY, StandInHub


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("demo", NameReference("demo", None)),
        (" 70b-q4 ", NameReference("70b-q4", None)),
        ("llama3.2:1b", NameReference("llama3.2", "1b")),
        ("8b-q4/", NameReference("8b-q4", None)),
        ("user/repo", HubReference("user/repo", None)),
        ("user/repo:Q8_0", HubReference("user/repo", "Q8_0")),
        ("hf:user/repo:q4_k_m", HubReference("user/repo", "q4_k_m")),
        ("hf:user/repo:sub/file-Q4_0.gguf", HubReference("user/repo", "sub/file-Q4_0.gguf")),
        ("hf.co/user/repo:Q4_0", HubReference("user/repo", "Q4_0")),
        ("hf.co/user/repo:latest", HubReference("user/repo", None)),
        ("user/repo:Latest", HubReference("user/repo", None)),
        ("https://huggingface.co/user/repo/", HubReference("user/repo", None)),
        ("https://huggingface.co/user/repo/tree/main", HubReference("user/repo", None)),
        ("hf.co/user/repo/blob/main/a-Q4_0.gguf", HubReference("user/repo", "a-Q4_0.gguf")),
        (
            "https://huggingface.co/user/repo/resolve/main/q/a.gguf?download=true",
            HubReference("user/repo", "q/a.gguf"),
        ),
        ("model.gguf", PathReference(Path("model.gguf"))),
        ("./demo", PathReference(Path("demo"))),
        ("../a/b", PathReference(Path("../a/b"))),
        ("my models/a model.gguf", PathReference(Path("my models/a model.gguf"))),
        ("a/b/c", PathReference(Path("a/b/c"))),
    ],
)
def test_parse_reference(text: str, meaning: Reference) -> None:
    assert parse_reference(text) == meaning


def test_the_home_folder_is_expanded(own_home: Path) -> None:
    model = own_home / "my model.gguf"
    model.write_bytes(b"GGUF")
    resolved = resolve("~/my model.gguf")
    assert (resolved.path, resolved.source, resolved.entry) == (model, "path", None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "use a path"),
        ("  ", "use a path"),
        ("hf:", "hf:"),
        ("hf:repo", "hf:repo"),
        ("hf.co/user", "Face repository"),
        ("hf:user/repo with spaces", "Face repository"),
        ("hf:user/repo:", "hf:user/repo:"),
        ("8b-q4:", "8b-q4:"),
        ("8b-q4@main", "revision main"),
        ("user/repo@", "a revision"),
        ("hf:user/repo@v1:Q8_0", "hf:user/repo:Q8_0"),
        ("https://example.com/a.gguf", "Face URL"),
        ("https://huggingface.co/u/r/blob/dev/a.gguf", "Face repository"),
        ("ollama:", "ollama:"),
        ("LMStudio: ", "LMStudio:"),
        ("a" * 5000, "5,000"),
        ("a" * 600, "600"),
        ("u/" + "a" * 600, "602"),
        ("hf:u/" + "a" * 600 + ":Q4_0", "602"),
    ],
)
def test_invalid_references_have_a_hint(text: str, line: str) -> None:
    with raises(ModelNotFoundError, line, code="reference_invalid") as caught:
        parse_reference(text)
    assert len(str(caught.value)) < 200


def test_the_demo_pair_is_embedded() -> None:
    target = resolve("demo", allow_download=False)
    draft = choose_draft(target).draft
    assert draft is not None
    assert [model.path.name for model in (target, draft)] == ["demo-target-q8_0.gguf", "demo-draft-q8_0.gguf"]
    assert target.source == "embedded"
    assert target.note == f"demo -> built in: {target.path}"
    assert target.entry is not None
    assert "demo" in target.entry.notice


def test_the_path_of_the_demo_has_its_entry() -> None:
    embedded = resolve("demo")
    by_path = resolve(os.path.relpath(embedded.path))
    assert by_path.entry == embedded.entry
    draft = choose_draft(by_path).draft
    assert draft is not None
    assert draft.name == "demo-draft"


def test_the_demo_has_one_quantisation() -> None:
    with raises(ModelNotFoundError, "Q8_0", "Q4_0", code="quantisation_unavailable"):
        resolve("demo:Q4_0")
    assert resolve("demo:q8_0").path == resolve("demo").path


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("dmo", "dmo"),
        ("llama-3.3", "llama-3.3-70b"),
        ("8b", "8b-q4"),
        ("qwen3:999b", "qwen3"),
        ("zzzzzz", "`edgespec models list`"),
    ],
)
def test_an_unknown_name_suggests_the_most_similar(text: str, line: str) -> None:
    with raises(ModelNotFoundError, line):
        resolve(text)


@pytest.mark.parametrize("tag", ["", ":latest", ":Latest", ":nosuch", ":q9_9"])
@pytest.mark.parametrize(("name", "meant"), [("dmo", "demo"), ("smolm2", "smollm2"), ("gema4", "gemma4")])
@pytest.mark.parametrize("change", [str.lower, str.upper])
def test_tags_and_case_do_not_change_the_suggestion(
    name: str, meant: str, tag: str, change: Callable[[str], str]
) -> None:
    with raises(ModelNotFoundError, meant):
        resolve(change(name) + tag)


def test_suggestions_name_different_models() -> None:
    assert load_catalogue().nearest("QWEN3:latest") == ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"]


def test_the_tag_latest_means_the_name_alone_as_in_ollama() -> None:
    assert resolve("demo:latest").path == resolve("DEMO:Latest").path == resolve("demo").path


class TestFiles:
    """Tests of paths that are not readable model files."""

    def test_a_missing_file_suggests_a_similar_one(self, tmp_path: Path) -> None:
        (tmp_path / "llama-8b.gguf").touch()
        with raises(ModelNotFoundError, "llama-8b.gguf", "you mean"):
            resolve(str(tmp_path / "lama-8b.gguf"))

    def test_a_folder_suggests_a_model_in_it(self, tmp_path: Path) -> None:
        with raises(ModelFileError, "use the path", code="model_file_incomplete"):
            resolve(str(tmp_path))
        (tmp_path / "a.gguf").touch()
        with raises(ModelFileError, "a.gguf", code="wrong_file"):
            resolve(str(tmp_path))

    def test_a_folder_suggests_a_model_that_can_be_used(self, tmp_path: Path) -> None:
        whole = models_folder() / "demo-draft-q8_0.gguf"
        (tmp_path / "a.gguf").write_bytes(whole.read_bytes()[:1_000_000])
        (tmp_path / "b.gguf").write_text("hello")
        shutil.copy(models_folder() / "demo-head-q8_0.gguf", tmp_path / "c.gguf")
        shutil.copy(whole, tmp_path / "d.gguf")
        with raises(ModelFileError, "d.gguf", code="wrong_file") as caught:
            resolve(str(tmp_path))
        assert "config.json" not in str(caught.value)

    def test_a_path_without_its_suffix_suggests_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "my").mkdir()
        (tmp_path / "my" / "model.gguf").touch()
        monkeypatch.chdir(tmp_path)
        with raises(ModelNotFoundError, "my/model.gguf", "my/model"):
            resolve("my/model")

    def test_a_folder_that_could_be_a_repository(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "user" / "repo").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        with raises(ModelFileError, "write hf:user/repo", code="model_file_incomplete"):
            resolve("user/repo")

    def test_a_file_without_read_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tmp_path / "model.gguf"
        model.touch()

        def refuse(*_: object) -> None:
            raise PermissionError

        monkeypatch.setattr(Path, "open", refuse)  # chmod has no effect on root.
        with raises(ModelFileError, "its permissions", code="model_file_unreadable"):
            resolve(str(model))

    @pytest.mark.parametrize("text", ["\0.gguf", "x" * 5000 + ".gguf", "/dev/null", "~no-such-user/x.gguf"])
    def test_invalid_paths_are_one_line(self, text: str) -> None:
        with pytest.raises(EdgespecError) as caught:
            resolve(text)
        assert caught.value.next_step
        assert "\n" not in str(caught.value)

    def test_a_file_without_the_usual_ending(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "sha256-123").touch()
        monkeypatch.chdir(tmp_path)
        assert resolve("sha256-123").source == "path"


class TestUserAliases:
    """Tests of `aliases.toml` in the user's configuration folder."""

    @pytest.fixture
    def write(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = tmp_path / "aliases.toml"
        monkeypatch.setattr(catalogue, "user_aliases_path", lambda: path)
        return path

    def test_aliases_win_over_the_catalogue_and_may_chain(self, write: Path) -> None:
        write.write_text('[aliases]\n"8b-q4" = "mine"\nMine = "demo-draft"\n', encoding="utf-8")
        assert resolve("8b-q4").path == resolve("demo-draft").path

    def test_aliases_accept_the_tag_that_ollama_adds(self, write: Path) -> None:
        write.write_text('[aliases]\nfavourite = "demo"\n"other:latest" = "demo-draft"\n', encoding="utf-8")
        assert resolve("favourite:latest").path == resolve("demo").path
        assert resolve("other:latest").path == resolve("demo-draft").path

    def test_aliases_are_suggested(self, write: Path) -> None:
        write.write_text('[aliases]\nfavourite = "demo"\n', encoding="utf-8")
        with raises(ModelNotFoundError, "favourite"):
            resolve("favorite")

    def test_circular_aliases_are_rejected(self, write: Path) -> None:
        write.write_text('[aliases]\na = "b"\nb = "a"\n', encoding="utf-8")
        with raises(ModelNotFoundError, "a ->", code="alias_invalid"):
            resolve("a")

    @pytest.mark.parametrize("content", ["not toml", "[aliases]\na = 1\n", "aliases = 3\n", "\udcff"])
    def test_a_broken_file_is_one_line(self, write: Path, content: str) -> None:
        write.write_bytes(content.encode("utf-8", "surrogateescape"))
        with raises(ModelNotFoundError, code="alias_invalid") as caught:
            resolve("demo")
        assert caught.value.next_step

    def test_paths_do_not_need_the_file(self, write: Path) -> None:
        write.write_text("not toml", encoding="utf-8")
        assert resolve(str(catalogue.models_folder() / "demo-draft-q8_0.gguf")).source == "path"


class TestOllamaStore:
    """Tests of models that Ollama stores."""

    @pytest.fixture
    def blob(self, own_home: Path) -> Path:
        store = own_home / ".ollama" / "models"
        manifest = store / "manifests/registry.ollama.ai/library/llama3.2/1b"
        manifest.parent.mkdir(parents=True)
        layers = [
            {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:aa"},
            {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:bb"},
        ]
        manifest.write_text(json.dumps({"layers": layers}), encoding="utf-8")
        blob = store / "blobs" / "sha256-bb"
        blob.parent.mkdir()
        blob.write_bytes(b"GGUF")
        return blob

    def test_an_ollama_model_is_not_downloaded(self, blob: Path) -> None:
        resolved = resolve("llama3.2:1b", allow_download=False)
        assert (resolved.path, resolved.source) == (blob, "ollama")
        assert resolved.entry is not None
        assert resolved.entry.name == "llama-3.2-1b"

    def test_a_deleted_ollama_model_falls_back_to_the_catalogue(self, blob: Path) -> None:
        blob.unlink()
        with raises(
            ModelNotFoundError, "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", code="model_not_downloaded"
        ):
            resolve("llama3.2:1b", allow_download=False)

    def test_an_unknown_manifest_is_not_a_model(self, blob: Path) -> None:
        manifest = blob.parent.parent / "manifests/registry.ollama.ai/library/llama3.2/1b"
        manifest.write_text('{"layers": "moved"}', encoding="utf-8")
        with pytest.raises(ModelNotFoundError):
            resolve("llama3.2:1b", allow_download=False)


def test_a_repository_is_downloaded_with_a_note(hub: StandInHub) -> None:
    resolved = resolve(f"{REPOSITORY}:Q4_K_M")
    assert resolved.source == "hub"
    assert resolved.note == f"{REPOSITORY}:Q4_K_M -> hf:{REPOSITORY}:Q4_K_M: {resolved.path}"
    hub.stop()
    assert resolve(f"hf:{REPOSITORY}:q4_k_m").path == resolved.path


def test_a_name_with_a_quantisation() -> None:
    with raises(ModelNotFoundError, "Meta-Llama-3.1-8B-Instruct-GGUF:Q6_K", code="model_not_downloaded"):
        resolve("llama-3.1-8b:Q6_K", allow_download=False)


def test_no_draft_if_none_is_installed_or_known(tmp_path: Path) -> None:
    model = tmp_path / "other.gguf"
    model.touch()
    assert choose_draft(resolve(str(model))).draft is None
    cached = tmp_path / "cache/models--bartowski--Llama-3.2-3B-Instruct-GGUF/snapshots/abc"
    cached.mkdir(parents=True)
    (cached / "Llama-3.2-3B-Instruct-Q4_K_M.gguf").touch()
    assert choose_draft(resolve("3b-q4")).draft is None


def test_the_best_installed_draft_is_taken(tmp_path: Path) -> None:
    for size in ("1B", "3B"):
        cached = tmp_path / f"cache/models--bartowski--Llama-3.2-{size}-Instruct-GGUF/snapshots/abc"
        cached.mkdir(parents=True)
        (cached / f"Llama-3.2-{size}-Instruct-Q4_K_M.gguf").touch()
    target = tmp_path / "cache/models--bartowski--Llama-3.3-70B-Instruct-GGUF/snapshots/abc"
    target.mkdir(parents=True)
    (target / "Llama-3.3-70B-Instruct-Q4_K_M.gguf").touch()
    by_name = choose_draft(resolve("70b-q4")).draft
    by_repository = choose_draft(resolve("hf:bartowski/Llama-3.3-70B-Instruct-GGUF")).draft
    assert by_name is not None
    assert by_name == by_repository
    assert by_name.name == "llama-3.2-3b"


def test_a_broken_link(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to(tmp_path / "gone.gguf")
    with raises(ModelNotFoundError, "gone.gguf"):
        resolve(str(link))
