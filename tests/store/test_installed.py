"""Models in other programs' stores are found, can be resolved by name, and are never modified.

This also covers their projectors, and the sampling settings that their makers recommend.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import gguf
import pytest

import edgespec
from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.options.reply_options import stated_sampling
from edgespec.store import catalogue, stored_models
from edgespec.store.catalogue import load_catalogue, models_folder
from edgespec.store.download import _choose_model
from edgespec.store.hub_files import HubFile, best_projector, group_gguf_files
from edgespec.store.installed import RecommendedSetting, find_installed, find_projector, recommended_sampling
from edgespec.store.lmstudio import lmstudio_models
from edgespec.store.reference import Resolved, resolve
from edgespec.store.remote_header import resolve_metadata
from tests.backends.split_gguf import write_parts
from tests.backends.tiny_models import write_llama
from tests.backends.tiny_vision import VisionModel, write_vision_model
from tests.raising import raises
from tests.store.fake_stores import OllamaStore, add_to_hub, add_to_lmstudio, snapshot_of
from tests.store.stand_in_hub import REPOSITORY, StandInHub

DRAFT = models_folder() / "demo-draft-q8_0.gguf"
MLX = models_folder() / "demo-mlx-draft"
IN_FILE = "the model's files"


def references() -> list[str]:
    return [installed.reference for installed in find_installed().models]


def why_skipped() -> dict[str, str]:
    return {skipped.name: skipped.reason for skipped in find_installed().unusable}


class TestOllama:
    def test_every_ollama_name_resolves(self, ollama: OllamaStore) -> None:
        blob = ollama.add("llama3.2", "1b", DRAFT.read_bytes())
        for name in ("someone/tiny", "hf.co/user/repo-GGUF", "registry.example.com:8080/team/tiny"):
            ollama.add(name, "latest", DRAFT.read_bytes())
        names = references()
        assert set(names) == {
            "hf.co/user/repo-GGUF:latest",
            "llama3.2:1b",
            "registry.example.com:8080/team/tiny:latest",
            "someone/tiny:latest",
        }
        for name in names:
            assert resolve(name, allow_download=False).path == blob
            found = resolve(f"ollama:{name}", allow_download=False)
            assert (found.path, found.source) == (blob, "ollama")
            assert found.note == f"ollama:{name} -> Ollama's {name}: {blob}"

    def test_the_default_tag_is_latest_and_case_is_ignored(self, ollama: OllamaStore) -> None:
        blob = ollama.add("someone/Tiny", "latest", DRAFT.read_bytes())
        assert resolve("someone/tiny", allow_download=False).path == blob
        assert resolve("ollama:SOMEONE/tiny:LATEST", allow_download=False).path == blob

    def test_ollama_models_variable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "elsewhere"))
        OllamaStore(tmp_path / "elsewhere").add("tiny", "q8", DRAFT.read_bytes())
        assert references() == ["tiny:q8"]

    def test_unusable_models_have_a_reason(self, ollama: OllamaStore, tmp_path: Path) -> None:
        ollama.add("bad", "magic", b"not a model")
        ollama.add("tuned", "latest", DRAFT.read_bytes(), ("adapter", b"no adapter"))
        ollama.add("cut", "latest", DRAFT.read_bytes()[:100_000])
        ollama.add("gone", "latest", b"GGUF gone").unlink()
        projector = gguf.GGUFWriter(tmp_path / "p.gguf", "clip")
        projector.write_header_to_file()
        projector.write_kv_data_to_file()
        projector.close()
        ollama.add("eyes", "latest", (tmp_path / "p.gguf").read_bytes())
        (ollama.folder / "manifests" / "x").mkdir()
        (ollama.folder / "manifests/registry.ollama.ai/library/odd").mkdir()
        odd = ollama.folder / "manifests/registry.ollama.ai/library/odd/latest"
        for content in ("", "[]", '{"layers": 3}', '{"layers": [{"mediaType": 1}]}', "\0", "[" * 100_000):
            odd.write_text(content)
            assert "the model's manifest is damaged" in why_skipped()["odd:latest"]
        odd.write_text(
            '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "../../x"}]}'
        )
        why = why_skipped()
        assert why["odd:latest"] == "the model's file has an invalid digest"
        assert why["bad:magic"] == "the model's file is not a GGUF file"
        assert why["tuned:latest"] == "the model's adapter is not a GGUF file"
        assert "not a complete GGUF file" in why["cut:latest"]
        assert "cannot be read: no such file" in why["gone:latest"]
        assert why["eyes:latest"] == "the file is an image projector, not a language model"
        assert references() == []
        with raises(
            ModelFileError, "Ollama", "tuned:latest", "model's adapter", code="model_file_not_supported"
        ):
            resolve("tuned", allow_download=False)

    def test_an_unknown_name_suggests_similar_ones(self, ollama: OllamaStore) -> None:
        ollama.add("someone/tiny", "q8", DRAFT.read_bytes())
        with raises(ModelNotFoundError, "Ollama", "someone/tiny:q8"):
            resolve("ollama:someone/tiney:q8")
        ollama.add("homemade", "latest", DRAFT.read_bytes())
        with raises(ModelNotFoundError, "homemade:latest"):
            resolve("homemad")


class TestLmStudio:
    def test_references_by_file_quantisation_and_folder(self, lmstudio: Path) -> None:
        one = add_to_lmstudio(lmstudio, "maker/One-GGUF/one-Q8_0.gguf", DRAFT)
        add_to_lmstudio(lmstudio, "maker/One-GGUF/mmproj-one-F16.gguf", DRAFT)
        two = [add_to_lmstudio(lmstudio, f"maker/Two-GGUF/two-{q}.gguf", DRAFT) for q in ("Q4_0", "Q8_0")]
        twins = [add_to_lmstudio(lmstudio, f"maker/Twins/{x}-Q8_0.gguf", DRAFT) for x in "ab"]
        folder = add_to_lmstudio(lmstudio, "mlx-community/Three-8bit", MLX)
        found = {installed.reference: installed.path for installed in find_installed().models}
        assert found == {
            "maker/One-GGUF": one,
            "maker/Two-GGUF:Q4_0": two[0],
            "maker/Two-GGUF:Q8_0": two[1],
            "maker/Twins/a-Q8_0.gguf": twins[0],
            "maker/Twins/b-Q8_0.gguf": twins[1],
            "mlx-community/Three-8bit": folder,
        }
        for reference, path in found.items():
            for prefix in ("", "lmstudio:"):
                there = resolve(f"{prefix}{reference}", allow_download=False)
                assert (there.path, there.source) == (path, "lmstudio")
            assert there.note.startswith(f"lmstudio:{reference} -> LM Studio's ")
        assert [installed.format for installed in find_installed().models].count("mlx") == 1
        # The Hugging Face reference leads to the same model, so it is not downloaded again.
        assert resolve("hf:maker/Two-GGUF:q4_0", allow_download=False).path == two[0]

    def test_an_ambiguous_reference_lists_the_matches(self, lmstudio: Path) -> None:
        for name in ("a-Q8_0", "b-Q8_0"):
            add_to_lmstudio(lmstudio, f"maker/Twins/{name}.gguf", DRAFT)
        with raises(
            ModelNotFoundError, "2 models", "maker/Twins", "a-Q8_0.gguf, b-Q8_0.gguf", code="ambiguous"
        ):
            resolve("maker/Twins", allow_download=False)

    def test_many_models_are_scanned_once(self, lmstudio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Regression test: ten thousand files in a folder took minutes, because all pairs were compared."""
        for number in range(30):
            add_to_lmstudio(lmstudio, f"maker/Many/m{number:02}-Q8_0.gguf", DRAFT)
        looks: list[int] = []

        def counted(files: Sequence[HubFile]) -> list[list[HubFile]]:
            looks.append(len(files))
            return group_gguf_files(files)

        monkeypatch.setattr("edgespec.store.lmstudio.group_gguf_files", counted)
        assert len({names[-1] for names in (model.names for model in lmstudio_models())}) == 30
        assert looks == [30]
        with raises(ModelNotFoundError, "30 models", "maker/Many", "m19-Q8_0.gguf", code="ambiguous"):
            resolve("maker/Many", allow_download=False)

    def test_a_split_model_must_be_complete(self, lmstudio: Path, tmp_path: Path) -> None:
        parts = write_parts(lmstudio / "maker" / "Split", "tiny-Q8_0")
        (installed,) = find_installed().models
        assert installed.path == parts[0]
        assert installed.info.size_bytes == sum(part.stat().st_size for part in parts)
        renamed = parts[2].rename(parts[2].with_name("tiny-Q8_0-00003-of-00003 (1).gguf"))
        assert parts[0] in [model.path for model in find_installed().models]
        renamed.unlink()
        assert why_skipped() == {"maker/Split": "it lacks 1 of its 3 parts"}

    def test_a_whole_file_named_like_a_part_is_a_model(self, lmstudio: Path, tmp_path: Path) -> None:
        model = write_llama(tmp_path / "tiny.gguf")
        path = add_to_lmstudio(lmstudio, "maker/Split/tiny-Q8_0-00001-of-00002.gguf", model)
        assert [model.path for model in find_installed().models] == [path]

    def test_model_folders_of_the_settings_are_used(self, own_home: Path, tmp_path: Path) -> None:
        add_to_lmstudio(tmp_path / "disk", "maker/One/one.gguf", DRAFT)
        add_to_lmstudio(tmp_path / "moved" / "models", "maker/Two/two.gguf", DRAFT)
        add_to_lmstudio(own_home / ".cache/lm-studio/models", "maker/Old/old.gguf", DRAFT)
        (own_home / ".lmstudio").mkdir()
        settings = own_home / ".lmstudio" / "settings.json"
        settings.write_text(json.dumps({"downloadsFolder": str(tmp_path / "disk")}))
        (own_home / ".lmstudio-home-pointer").write_text(f"{tmp_path / 'moved'}\n")
        assert sorted(references()) == ["maker/Old", "maker/One", "maker/Two"]
        for text in ("", "[]", '{"downloadsFolder": 3}', "\0"):
            settings.write_text(text)
            assert sorted(references()) == ["maker/Old", "maker/Two"]

    def test_an_incomplete_folder_has_a_reason(self, lmstudio: Path) -> None:
        folder = add_to_lmstudio(lmstudio, "maker/Half", MLX)
        (folder / "model.safetensors").unlink()
        assert why_skipped() == {"maker/Half": "the model lacks model.safetensors"}
        (folder / "model.safetensors").write_bytes((MLX / "model.safetensors").read_bytes()[:5000])
        assert "not a safetensors file" in why_skipped()["maker/Half"]
        (folder / "config.json").write_text("[]")
        assert "does not contain a JSON object" in why_skipped()["maker/Half"]

    def test_link_loops_and_special_files_do_not_hang(self, lmstudio: Path) -> None:
        one = add_to_lmstudio(lmstudio, "maker/One/one.gguf", DRAFT)
        (lmstudio / "maker" / "loop").symlink_to(lmstudio)
        (lmstudio / "maker" / "One" / "again").symlink_to(lmstudio / "maker")
        (lmstudio / "self").symlink_to("self")
        (lmstudio / "maker" / "One" / "gone-Q8_0.gguf").symlink_to("nowhere")
        os.mkfifo(lmstudio / "maker" / "One" / "pipe-Q4_0.gguf")
        assert [(installed.reference, installed.path) for installed in find_installed().models] == [
            ("maker/One", one)
        ]

    def test_a_link_to_the_root_is_not_followed(self, lmstudio: Path, tmp_path: Path) -> None:
        one = add_to_lmstudio(lmstudio, "maker/One/one.gguf", DRAFT)
        add_to_lmstudio(tmp_path, "other/Two/two.gguf", DRAFT)
        (lmstudio / "all").symlink_to("/")
        for name, around in (("a", Path("/")), ("b", tmp_path), ("c", lmstudio.parent)):
            (lmstudio / "maker" / name).symlink_to(around)
        assert [installed.path for installed in find_installed().models] == [one]
        with pytest.raises(ModelNotFoundError):
            resolve("lmstudio:maker/b", allow_download=False)

    def test_a_link_to_many_files_hides_no_model(
        self, lmstudio: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        much = tmp_path_factory.mktemp("much")
        for i in range(9):
            add_to_lmstudio(much, f"m{i}/tiny.gguf", DRAFT)
        monkeypatch.setattr(stored_models, "_MAX_LINKED_ENTRIES", 5)
        (lmstudio / "a").mkdir()
        (lmstudio / "a" / "much").symlink_to(much)
        one = add_to_lmstudio(lmstudio, "maker/One/one.gguf", DRAFT)
        assert [installed.path for installed in find_installed().models] == [one]

    def test_a_link_to_a_model_is_followed(self, lmstudio: Path, tmp_path: Path) -> None:
        (lmstudio / "me" / "mine").mkdir(parents=True)
        model = write_llama(add_to_lmstudio(tmp_path, "big/disk/tiny.gguf", DRAFT))
        (lmstudio / "me" / "mine" / "tiny.gguf").symlink_to(model)
        assert references() == ["me/mine"]
        (lmstudio / "me" / "mine" / "tiny.gguf").unlink()
        (lmstudio / "me" / "yours").symlink_to(model.parent)
        assert references() == ["me/yours"]


class TestHubCache:
    def test_gguf_and_mlx_snapshots(self, cache: Path) -> None:
        file = add_to_hub(cache, "maker/One-GGUF", DRAFT) / DRAFT.name
        folder = add_to_hub(cache, "mlx-community/Two", *MLX.iterdir())
        found = {
            installed.reference: (installed.path, installed.format) for installed in find_installed().models
        }
        assert found == {"maker/One-GGUF:Q8_0": (file, "gguf"), "mlx-community/Two": (folder, "mlx")}
        for reference, (path, _) in found.items():
            assert resolve(reference, allow_download=False).path == path

    def test_an_incomplete_update_does_not_hide_a_model(self, cache: Path) -> None:
        folder = add_to_hub(cache, "mlx-community/Two", *MLX.iterdir())
        add_to_hub(cache, "mlx-community/Two", MLX / "config.json", commit="2" * 40)
        assert [model.path for model in find_installed().models] == [folder]
        assert resolve("mlx-community/Two", allow_download=False).path == folder

    def test_embedding_models_and_partial_downloads_are_left_out(self, cache: Path, tmp_path: Path) -> None:
        config = {"model_type": "bert", "architectures": ["BertModel"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        others = [path for path in MLX.iterdir() if path.name != "config.json"]
        add_to_hub(cache, "someone/embedder", tmp_path / "config.json", *others)
        add_to_hub(cache, "someone/half", tmp_path / "config.json")
        (cache / "models--someone--strange").write_text("a file")
        (cache / "models--someone--empty").mkdir()
        assert references() == []
        assert why_skipped() == {
            "someone/embedder": "the file is an embedding model, which does not generate text"
        }


def test_an_ambiguous_name_lists_both_models(
    ollama: OllamaStore, lmstudio: Path, cache: Path, tmp_path: Path
) -> None:
    other = write_llama(tmp_path / "other-Q8_0.gguf")
    mine = add_to_lmstudio(lmstudio, "maker/tiny/tiny-Q8_0.gguf", DRAFT)
    blob = ollama.add("maker/tiny", "latest", other.read_bytes())
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("maker/tiny", allow_download=False)
    assert "lmstudio:maker/tiny" in caught.value.what
    assert "ollama:maker/tiny:latest" in caught.value.what
    found = {installed.path: installed.reference for installed in find_installed().models}
    assert set(found) == {mine, blob}
    for path, reference in found.items():
        assert resolve(reference, allow_download=False).path == path
    # Two copies of the same file are not ambiguous.
    add_to_hub(cache, "maker/copy", DRAFT)
    add_to_lmstudio(lmstudio, "maker/copy/copy-Q8_0.gguf", DRAFT)
    assert resolve("maker/copy", allow_download=False).source == "hub"


def test_an_alias_may_hide_an_installed_name(
    ollama: OllamaStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = ollama.add("tiny", "latest", DRAFT.read_bytes())
    (tmp_path / "aliases.toml").write_text('[aliases]\n"tiny:latest" = "demo"\n')
    monkeypatch.setattr(catalogue, "user_aliases_path", lambda: tmp_path / "aliases.toml")
    assert references() == ["ollama:tiny:latest"]
    assert resolve("ollama:tiny:latest").path == blob


def test_a_catalogue_name_uses_the_model_of_another_program(lmstudio: Path) -> None:
    path = add_to_lmstudio(
        lmstudio, "bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q4_K_M.gguf", DRAFT
    )
    found = resolve("1b-q4", allow_download=False)
    assert (found.path, found.source) == (path, "lmstudio")
    assert found.entry is not None
    assert found.entry.name == "llama-3.2-1b"


@pytest.mark.long
def test_prepared_models_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "ours"))
    model = write_llama(tmp_path / "tiny.gguf", layers=3)
    made = prepare_layerskip(model, 1)
    (prepared,) = find_installed().prepared
    assert (prepared.kind, prepared.source, prepared.folder) == ("layerskip", model, made.folder)


def test_stores_are_never_written_to(ollama: OllamaStore, lmstudio: Path, own_home: Path) -> None:
    ollama.add("tiny", "latest", DRAFT.read_bytes())
    add_to_lmstudio(lmstudio, "maker/One/one.gguf", DRAFT)
    before = snapshot_of(own_home)
    assert len(find_installed().models) == 2
    assert snapshot_of(own_home) == before


def test_names_cannot_escape_a_store(ollama: OllamaStore, lmstudio: Path, own_home: Path) -> None:
    """A manifest or a model outside the store is not part of it."""
    outside = OllamaStore(own_home / "other")
    outside.add("tiny", "latest", DRAFT.read_bytes())
    add_to_lmstudio(own_home, "maker/tiny/tiny-Q8_0.gguf", DRAFT)
    add_to_lmstudio(lmstudio, "maker/One/one.gguf", DRAFT)
    private = add_to_lmstudio(own_home, "private/tiny-Q8_0.gguf", DRAFT).parent
    above = "../../../../other/manifests/registry.ollama.ai/library/tiny"
    for name in (
        f"ollama:{above}",
        "ollama:..",
        "lmstudio:../../../maker/tiny",
        "lmstudio:../../maker",
        "lmstudio:maker/../../../private",
        f"lmstudio:maker/{private}",
        "lmstudio:maker/One/../../../../private",
        "ollama:a//b",
    ):
        with pytest.raises(ModelNotFoundError):
            resolve(name, allow_download=False)


def test_the_search_of_a_huge_folder_is_limited(lmstudio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(30):
        add_to_lmstudio(lmstudio, f"maker/m{i:02}/tiny.gguf", DRAFT)
    monkeypatch.setattr(stored_models, "_MAX_ENTRIES", 45)
    assert 0 < len(find_installed().models) < 30
    assert resolve("maker/m29", allow_download=False).path.exists()


@pytest.mark.parametrize("ref", [b"", b"../../../..", b"/", b"\xff\xfe", b"a\0b", b"x" * 5000])
def test_a_ref_without_a_snapshot_is_ignored(cache: Path, tmp_path: Path, ref: bytes) -> None:
    add_to_lmstudio(tmp_path, "elsewhere/other-Q8_0.gguf", DRAFT)
    model = add_to_hub(cache, "maker/tiny", DRAFT) / DRAFT.name
    (cache / "models--maker--tiny" / "refs" / "main").write_bytes(ref)
    assert [one.path for one in find_installed().models] == [model]
    assert resolve("maker/tiny", allow_download=False).path == model


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are POSIX")
def test_a_pipe_instead_of_a_model_does_not_block(ollama: OllamaStore) -> None:
    blob = ollama.add("tiny", "latest", DRAFT.read_bytes())
    blob.unlink()
    os.mkfifo(blob)
    assert "the path is not a regular file" in why_skipped()["tiny:latest"]


def test_empty_or_unreadable_homes_are_no_error(own_home: Path) -> None:
    assert find_installed().models == ()
    (own_home / ".lmstudio").write_text("a file")
    (own_home / ".ollama").write_text("a file")
    installed = find_installed()
    assert (installed.models, installed.unusable) == ((), ())


@pytest.fixture
def files(tmp_path: Path) -> VisionModel:
    return write_vision_model(tmp_path / "model", "llava")


def test_a_projector_next_to_the_model_is_found(files: VisionModel) -> None:
    assert find_projector(resolve(str(files.model))) == files.projector


@pytest.mark.parametrize("place", ["", "mmproj"])
def test_a_projector_elsewhere_in_the_repository_is_found(
    files: VisionModel, cache: Path, lmstudio: Path, place: str
) -> None:
    for name, folder in {
        "hf:maker/Seer-GGUF": add_to_hub(cache, "maker/Seer-GGUF"),
        "lmstudio:someone/Seer-GGUF": lmstudio / "someone" / "Seer-GGUF",
    }.items():
        (folder / "Q8_0").mkdir(parents=True)
        (folder / place).mkdir(exist_ok=True)
        shutil.copy(files.model, folder / "Q8_0" / "seer-Q8_0.gguf")
        shutil.copy(files.projector, folder / place)
        found = resolve(f"{name}:Q8_0", allow_download=False)
        assert find_projector(found) == folder / place / files.projector.name


def test_a_plan_finds_a_projector_elsewhere_in_the_repository(
    files: VisionModel, hub: StandInHub, tmp_path: Path
) -> None:
    hub.files = {
        "Q8_0/seer-Q8_0.gguf": files.model.read_bytes(),
        files.projector.name: files.projector.read_bytes(),
    }
    assert find_projector(resolve_metadata(f"{REPOSITORY}:Q8_0", tmp_path / "headers"))


def test_a_projector_in_the_folder_above_a_file_of_the_user_is_ignored(files: VisionModel) -> None:
    inner = files.model.parent / "inner"
    inner.mkdir()
    shutil.copy(files.model, inner)
    assert find_projector(resolve(str(inner / files.model.name))) is None


def test_a_folder_without_projectors_has_none(tmp_path: Path) -> None:
    assert find_projector(resolve(str(write_llama(tmp_path / "tiny.gguf")))) is None


def test_projectors_that_cannot_fit_are_skipped(files: VisionModel) -> None:
    # The name fits best, but this is a language model.
    shutil.copy(files.model, files.model.with_name("mmproj-tiny.gguf.gguf"))
    files.model.with_name("mmproj-tin.gguf").write_bytes(b"GGUF")
    assert find_projector(resolve(str(files.model))) == files.projector


@pytest.mark.parametrize(
    ("names", "best"),
    [
        (["a-Q4_K_M.gguf"], None),
        (["mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"], "mmproj-F16.gguf"),
        (["mmproj-a-f32.gguf", "mmproj-b-f16.gguf"], "mmproj-a-f32.gguf"),
        (["a-mmproj-Q8_0.gguf", "mmproj.txt"], "a-mmproj-Q8_0.gguf"),
        (["other/mmproj-a-f16.gguf", "mmproj-f32.gguf"], "mmproj-f32.gguf"),
        (["mmproj-a-f16.gguf", "sub/mmproj-f32.gguf"], "sub/mmproj-f32.gguf"),
    ],
)
def test_the_best_projector_has_a_fitting_name_and_type(names: list[str], best: str | None) -> None:
    assert best_projector(names, "sub/a-Q4_K_M.gguf") == best


def test_a_projector_is_downloaded_with_its_model() -> None:
    files = [HubFile(name) for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a-f16.gguf")]
    assert [file.name for file in _choose_model("u/r", files, None)] == ["a-Q4_K_M.gguf", "mmproj-a-f16.gguf"]


def test_ollama_stores_projectors_as_layers(
    files: VisionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    (store / "blobs").mkdir(parents=True)
    layers = []
    for number, (kind, file) in enumerate((("model", files.model), ("projector", files.projector))):
        digest = f"{number:064x}"
        shutil.copy(file, store / "blobs" / f"sha256-{digest}")
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "seer" / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": layers}))
    found = find_projector(resolve("ollama:seer"))
    assert found is not None
    assert found.name == f"sha256-{1:064x}"


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
    # Loading the model reports only parameters that are really unused.
    assert model.unused == ("template", "num_ctx")


@pytest.mark.parametrize(
    ("header", "temperature"),
    [
        # Names in the Python package's files, and in files written by bartowski's tools.
        ({"name": "Smollm2 135M 8k Lc100K Mix1 Ep2"}, 0.2),
        ({"name": "SmolLM2 135M Instruct"}, 0.2),
        ({"basename": "SmolLM2", "size_label": "135M", "finetune": "Instruct"}, 0.2),
        ({"name": "Qwen3-8B"}, 0.6),
        # The base model, and a fine-tuned version of the model.
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
