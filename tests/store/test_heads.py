"""Heads: which ones are found or rejected for a target, and how they are downloaded and converted."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import CancelledError, CapabilityError, EdgespecError, ModelFileError, ModelNotFoundError
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pairing import find_pair
from edgespec.model.base import Head
from edgespec.model.formats.head_files import head_info, why_not_made_for
from edgespec.store.catalogue import load_catalogue
from edgespec.store.heads import HeadOption, head_options, named_head, published_heads, resolve_head
from edgespec.store.installed import model_info
from edgespec.store.reference import Resolved, resolve
from edgespec.store.remote_header import resolve_head_metadata
from edgespec.store.speedup_estimate import estimate_head_speedup
from tests.backends.published_heads import VOCAB, write_published
from tests.backends.tiny_heads import write_eagle
from tests.backends.tiny_models import write_llama
from tests.model.heads.published import write_head
from tests.model.heads.residual_files import Layout, random_arrays, write_heads
from tests.raising import raises
from tests.store.fake_stores import add_to_hub
from tests.store.stand_in_hub import REPOSITORY, StandInHub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a target of three layers."""
    folder = tmp_path / "models"
    folder.mkdir()
    write_llama(folder / "target.gguf", layers=3)
    return folder


def target_in(folder: Path) -> Resolved:
    return resolve(str(folder / "target.gguf"))


def options_in(folder: Path) -> list[HeadOption]:
    return head_options(target_in(folder))


def named(reference: str | Path, folder: Path) -> HeadOption:
    return named_head(resolve_head(str(reference)), target_in(folder))


class TestBesideTheTarget:
    def test_a_head_is_found_by_its_name(self, folder: Path) -> None:
        for name in ("eagle3-target.gguf", "EAGLE-x.gguf", "another.gguf", "eagle3-x.bin"):
            write_eagle(folder / name, layers=(0, 1, 2))
        found = {option.reference: option for option in options_in(folder)}
        assert set(found) == {str(folder / "eagle3-target.gguf"), str(folder / "EAGLE-x.gguf")}
        option = found[str(folder / "eagle3-target.gguf")]
        assert (option.head, option.source) == (Head("eagle", folder / "eagle3-target.gguf"), "beside")
        assert option.is_usable
        assert option.size_bytes == (folder / "eagle3-target.gguf").stat().st_size

    def test_a_head_at_the_top_of_a_repository_is_found_for_a_model_in_a_subfolder(
        self, folder: Path, cache: Path, tmp_path: Path
    ) -> None:
        head = write_eagle(tmp_path / "eagle3.gguf", layers=(0, 1, 2))
        snapshot = add_to_hub(cache, "maker/One-GGUF", head)
        (snapshot / "Q8_0").mkdir()
        shutil.copy(folder / "target.gguf", snapshot / "Q8_0" / "one-Q8_0.gguf")
        target = resolve("hf:maker/One-GGUF:Q8_0", allow_download=False)
        assert [option.reference for option in head_options(target)] == [str(snapshot / head.name)]

    def test_heads_for_other_targets_and_damaged_ones_are_left_out(self, folder: Path) -> None:
        write_eagle(folder / "eagle3-size.gguf", layers=(0, 1, 2), size=16)
        write_eagle(folder / "eagle3-vocab.gguf", layers=(0, 1, 2), vocab=100)
        write_eagle(folder / "eagle3-layers.gguf", layers=(0, 1, 9))
        (folder / "eagle3-damaged.gguf").write_bytes(b"GGUF and no more")
        (folder / "eagle3-empty").mkdir()
        shutil.copyfile(folder / "target.gguf", folder / "mtp-model.gguf")
        assert options_in(folder) == []

    def test_the_head_whose_name_resembles_the_target_is_preferred(self, folder: Path) -> None:
        for name in ("eagle3-a.gguf", "eagle3-target.gguf"):
            write_eagle(folder / name, layers=(0, 1, 2))
        assert [Path(option.reference).name for option in options_in(folder)] == [
            "eagle3-target.gguf",
            "eagle3-a.gguf",
        ]

    def test_a_published_head_must_first_be_converted(self, folder: Path) -> None:
        head = write_published(folder / "eagle3-published")
        (option,) = options_in(folder)
        assert not option.is_usable
        assert f"--head {head}" in option.problem
        converted = named(head, folder)
        assert converted.head is not None
        assert converted.head.path is not None
        assert converted.head.path.suffix == ".gguf"
        assert options_in(folder)[0].head == converted.head
        assert converted.head.shown_path == head
        # It is converted again after its files have changed.
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
        assert not options_in(folder)[0].is_usable

    def test_an_eagle_1_head_needs_no_conversion(self, folder: Path) -> None:
        head = write_head(folder / "eagle-published", "EAGLE-1", vocab=VOCAB)
        (option,) = options_in(folder)
        assert (option.kind, option.is_usable) == ("EAGLE-1", True)
        assert option.head == named(head, folder).head == Head("eagle", head)

    def test_a_head_in_the_targets_own_files_is_listed(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        info = replace(model_info(folder / "target.gguf", "gguf"), heads=("MTP, 1 layer",))
        monkeypatch.setattr("edgespec.store.heads.model_info_or_none", lambda _: info)
        (option,) = head_options(target_in(folder))
        assert (option.reference, option.head, option.source) == ("", Head("mtp"), "target")
        assert option.name == "in the model's own files (MTP, 1 layer)"
        assert option.is_usable == ("mtp" in target_in(folder).file_format.heads)


class TestNamedHeads:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"size": 16}, "hidden states of size 16"),
            ({"vocab": 100}, "a vocabulary of size 100"),
            ({"layers": (0, 1, 9)}, "reads the layers"),
        ],
    )
    def test_a_head_for_another_target_is_refused(
        self, folder: Path, options: dict[str, object], message: str
    ) -> None:
        path = write_eagle(folder / "head.gguf", **options)  # type: ignore[arg-type]
        with raises(CapabilityError, code="head_mismatch") as caught:
            named(path, folder)
        assert message in caught.value.what

    def test_a_published_head_for_another_target_is_not_converted(self, folder: Path, tmp_path: Path) -> None:
        head = write_published(tmp_path / "head", vocab_size=50)
        with raises(CapabilityError, code="head_mismatch"):
            named(head, folder)

    def test_medusa_heads_need_no_config(self, folder: Path, tmp_path: Path) -> None:
        layout = Layout("medusa", config=False)
        head = write_heads(tmp_path / "head", layout, random_arrays(layout, 32, VOCAB))
        for reference in (head, head / "medusa_lm_head.safetensors"):
            option = named(reference, folder)
            assert (option.kind, option.head) == ("Medusa", Head("medusa", head))
        (head / "config.json").write_text("{")
        with raises(ModelFileError, "valid JSON"):
            named(head, folder)

    @pytest.mark.parametrize("reference", ["demo", "8b-q4", "hf:unsloth/Qwen3-8B-GGUF", "ollama:llama3.2"])
    def test_a_model_is_refused(self, reference: str) -> None:
        with raises(ModelFileError, code="wrong_file"):
            resolve_head(reference)

    def test_a_model_file_is_refused(self, folder: Path) -> None:
        with raises(ModelFileError, code="wrong_file"):
            named(folder / "target.gguf", folder)

    def test_a_head_that_shares_the_targets_cache_is_refused(self, folder: Path) -> None:
        head = write_published(folder / "assistant")
        config = {"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"]}
        (head / "config.json").write_text(json.dumps(config))
        with raises(ModelFileError, "Gemma 4 assistant", code="model_file_not_supported"):
            named(head, folder)

    def test_a_head_is_refused_as_a_model(self, folder: Path) -> None:
        published = write_published(folder / "eagle3-published")
        for reference in (str(published), "qwen3-8b-eagle3", "hf:AngelSlim/Qwen3-8B_eagle3"):
            with raises(ModelFileError, "proposes tokens", code="wrong_file") as caught:
                resolve(reference)
            assert "--head" in caught.value.next_step

    def test_unknown_names_and_missing_files_are_errors(self, folder: Path) -> None:
        with raises(ModelNotFoundError, "qwen3-8b-eagle3", code="head_not_found"):
            resolve_head("qwen3-8b-eagel3")
        with raises(ModelNotFoundError, "no file"):
            resolve_head(str(folder / "none.gguf"))
        (folder / "empty").mkdir()
        with raises(ModelFileError, code="model_file_incomplete"):
            resolve_head(str(folder / "empty"))


class TestDownloads:
    @pytest.fixture
    def published(self, hub: StandInHub, tmp_path: Path) -> Path:
        """Put a head in the layout of Hugging Face on the hub."""
        head = write_published(tmp_path / "published")
        hub.files = {file.name: file.read_bytes() for file in head.iterdir()} | {"README.md": b"# head"}
        return head

    @pytest.mark.usefixtures("published")
    def test_a_head_is_downloaded_and_converted(self, hub: StandInHub, folder: Path) -> None:
        lines: list[str] = []

        def progress(text: str, _fraction: float) -> bool:
            lines.append(text)
            return True

        found = resolve_head(REPOSITORY, progress=progress)
        assert found.path.is_dir()
        assert any("downloading model.safetensors" in line for line in lines)
        assert not any("README" in request for request in hub.requests if "resolve" in request)
        option = named_head(found, target_in(folder))
        assert option.is_usable
        hub.stop()
        assert resolve_head(REPOSITORY, allow_download=False).path == found.path

    def test_medusa_heads_without_config_are_downloaded(self, hub: StandInHub, tmp_path: Path) -> None:
        layout = Layout("medusa", ".pt", config=False)
        head = write_heads(tmp_path / "head", layout, random_arrays(layout, 32, VOCAB))
        hub.files = {file.name: file.read_bytes() for file in head.iterdir()}
        assert [file.name for file in resolve_head(REPOSITORY).path.iterdir()] == ["medusa_lm_head.pt"]

    @pytest.mark.usefixtures("published")
    def test_nothing_is_downloaded_without_being_asked(self, hub: StandInHub) -> None:
        with raises(ModelNotFoundError, code="model_not_downloaded"):
            resolve_head(REPOSITORY, allow_download=False)
        assert hub.requests == []

    @pytest.mark.usefixtures("published")
    def test_a_cancelled_download_can_be_resumed(self) -> None:
        with pytest.raises(CancelledError):
            resolve_head(REPOSITORY, progress=lambda *_: False)
        assert resolve_head(REPOSITORY).path.is_dir()

    @pytest.mark.usefixtures("published")
    def test_a_head_in_two_files_is_resumed(self, hub: StandInHub) -> None:
        data = hub.files.pop("model.safetensors")
        first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
        hub.files |= {first: data, second: data + b" "}
        with pytest.raises(CancelledError):
            resolve_head(REPOSITORY, progress=lambda what, _: second not in what)
        folder = resolve_head(REPOSITORY).path
        assert {path.name for path in folder.iterdir()} == {"config.json", first, second}

    def test_the_settings_of_medusa_heads_are_downloaded_before_the_weights(
        self, hub: StandInHub, tmp_path: Path
    ) -> None:
        """The weights alone count as complete, but the settings can specify which hidden state they read."""
        layout = Layout("medusa", ".pt", config=False)
        head = write_heads(tmp_path / "head", layout, random_arrays(layout, 32, VOCAB))
        hub.files = {file.name: file.read_bytes() for file in head.iterdir()}
        hub.files["config.json"] = b'{"hidden_state_offset": 1}'
        with pytest.raises(CancelledError):
            resolve_head(REPOSITORY, progress=lambda what, _: "medusa" not in what)
        assert {path.name for path in resolve_head(REPOSITORY).path.iterdir()} == set(hub.files)

    @pytest.mark.parametrize("method", ["eagle", "medusa"])
    def test_a_pickled_head_is_downloaded(
        self, hub: StandInHub, folder: Path, tmp_path: Path, method: str
    ) -> None:
        head, layout = tmp_path / "pickled", Layout("medusa", ".pt", config=False)
        if method == "eagle":
            write_head(head, "EAGLE-1", vocab=VOCAB, pickled=True)
        else:
            write_heads(head, layout, random_arrays(layout, 32, VOCAB))
        hub.files = {file.name: file.read_bytes() for file in head.iterdir()}
        pair = find_pair(str(folder / "target.gguf"), "none", DraftingOptions.of(head=REPOSITORY), None)
        assert [option.method for option in pair.heads] == [method]

    def test_a_plan_for_a_pickled_head_reads_only_its_config(
        self, hub: StandInHub, folder: Path, tmp_path: Path
    ) -> None:
        head = write_published(tmp_path / "pickled", pickled=True)
        hub.files = {file.name: file.read_bytes() for file in head.iterdir()}
        found = resolve_head_metadata(REPOSITORY, tmp_path / "headers")
        option = named_head(found, target_in(folder), convert=False)
        assert option.head is not None
        estimate = target_in(folder).file_format.estimate_head
        assert estimate(option.head, folder / "target.gguf", 512).total_bytes
        assert not any(request.endswith(".bin") for request in hub.requests)

    @pytest.mark.usefixtures("published")
    def test_a_plan_reads_only_the_metadata(self, folder: Path, tmp_path: Path) -> None:
        found = resolve_head_metadata(REPOSITORY, tmp_path / "headers")
        assert found.note.endswith("not on this machine")
        option = named_head(found, target_in(folder), convert=False)
        assert option.head is not None
        estimate = target_in(folder).file_format.estimate_head
        planned = estimate(option.head, folder / "target.gguf", 512)
        assert planned.bytes_of("weights") == option.size_bytes > 10_000

    @pytest.mark.usefixtures("published")
    def test_a_head_for_another_target_is_not_downloaded(self, hub: StandInHub, cache: Path) -> None:
        with raises(CapabilityError, code="head_mismatch"):
            find_pair("demo", "none", DraftingOptions.of(head=REPOSITORY), None)
        assert hub.requests
        assert not cache.exists()

    @pytest.mark.usefixtures("published")
    def test_a_named_head_is_checked_and_downloaded(self, folder: Path, hub: StandInHub) -> None:
        drafting = DraftingOptions.of(head=REPOSITORY, method="eagle")
        pair = find_pair(str(folder / "target.gguf"), "none", drafting, None)
        assert [option.method for option in pair.heads] == ["eagle"]
        hub.stop()
        assert find_pair(str(folder / "target.gguf"), "none", drafting, None).heads == pair.heads

    def test_a_model_is_not_downloaded_as_a_head(
        self, folder: Path, hub: StandInHub, cache: Path, tmp_path: Path
    ) -> None:
        hub.files = {"model-Q4_K_M.gguf": write_llama(tmp_path / "model.gguf").read_bytes()}
        with raises(ModelFileError, code="wrong_file"):
            find_pair(str(folder / "target.gguf"), "none", DraftingOptions.of(head=REPOSITORY), None)
        assert not cache.exists()

    def test_a_file_of_a_gguf_repository_can_be_chosen(self, hub: StandInHub, tmp_path: Path) -> None:
        data = write_eagle(tmp_path / "eagle3.gguf", layers=(0, 1, 2)).read_bytes()
        hub.files = {"eagle3-a.gguf": data, "eagle3-b.gguf": data}
        with raises(ModelNotFoundError, "eagle3-a.gguf, eagle3-b.gguf", code="quantisation_unavailable"):
            resolve_head(REPOSITORY)
        assert resolve_head(f"{REPOSITORY}:eagle3-b.gguf").path.name == "eagle3-b.gguf"

    def test_a_repository_without_a_head_is_an_error(self, hub: StandInHub) -> None:
        hub.files = {"README.md": b"# nothing"}
        with raises(ModelNotFoundError, "not contain a draft head", code="repository_unusable"):
            resolve_head(REPOSITORY)

    def test_a_published_head_in_the_cache_is_found(self, cache: Path, tmp_path: Path) -> None:
        model = write_llama(tmp_path / "Qwen3-8B-Q4_K_M.gguf", layers=3)
        add_to_hub(cache, "unsloth/Qwen3-8B-GGUF", model)
        target = resolve("qwen3-8b", allow_download=False)
        missing = {option.reference: option for option in head_options(target)}
        assert missing["qwen3-8b-eagle3"].head is None
        head = write_eagle(tmp_path / "eagle3.gguf", layers=(0, 1, 2))
        add_to_hub(cache, "AngelSlim/Qwen3-8B_eagle3", head)
        found = head_options(target)[0]
        assert (found.reference, found.source) == ("qwen3-8b-eagle3", "catalogue")
        assert found.head is not None
        assert found.is_usable


def test_every_published_head_has_known_targets_and_a_kind() -> None:
    catalogue = load_catalogue()
    for head in catalogue.heads:
        assert head.targets
        for name in head.targets:
            found = catalogue.find(name)
            assert found is not None
            assert found[0].name == name
            assert head in catalogue.heads_for(found[0])
            assert head.name in [option.reference for option in published_heads(found[0])]
            assert head.approximate_file_bytes < found[0].approximate_file_bytes
        assert HeadOption(head.name, head.kind, None, "catalogue").method
        named = head.name if head.gguf_file else head.repository or head.name
        assert catalogue.find_head(named) == head
        assert head.sources
        assert head.licence or any("licence" in source or "card" in source for source in head.sources)
        assert bool(head.published_speedup) == bool(head.published_on)


def test_the_heads_of_a_catalogue_model_include_the_layers_in_its_files() -> None:
    catalogue = load_catalogue()
    found = catalogue.find("qwen3.6-27b")
    assert found is not None
    own, *others = published_heads(found[0])
    assert (own.reference, own.kind, own.source, own.problem) == ("", "MTP", "target", "")
    assert [option.reference for option in others] == ["qwen3.6-27b-dflash"]
    assert catalogue.find_head(found[0].repository) is None


def test_a_head_in_a_gguf_file_is_not_offered_for_mlx() -> None:
    catalogue = load_catalogue()
    gguf, mlx = catalogue.find("gemma-4-31b"), catalogue.find("gemma-4-31b-mlx")
    assert gguf is not None
    assert mlx is not None
    offered = [[option.reference for option in published_heads(found[0])] for found in (gguf, mlx)]
    assert "gemma-4-31b-mtp" in offered[0]
    assert offered[1] == [name for name in offered[0] if name != "gemma-4-31b-mtp"]


def test_a_head_beside_a_catalogue_model_is_found_by_its_file(cache: Path, tmp_path: Path) -> None:
    head = write_eagle(tmp_path / "mtp-gemma-4-31B-it.gguf", layers=(0, 1, 2))
    add_to_hub(cache, "unsloth/gemma-4-31B-it-GGUF", head)
    for name in ("gemma-4-31b-mtp", "hf:unsloth/gemma-4-31B-it-GGUF:mtp-gemma-4-31B-it.gguf"):
        assert resolve_head(name).path.name == head.name
    with raises(ModelFileError, "is a model, not a draft head", code="wrong_file"):
        resolve_head("hf:unsloth/gemma-4-31B-it-GGUF:Q4_K_M")


def test_expectations_are_honest() -> None:
    entry = load_catalogue().find("qwen3-8b")
    assert entry is not None
    eagle, dflash = published_heads(entry[0])
    assert eagle.expectation == (
        "763 MiB, expected speed-up 1.3x (estimated from its size, not measured on this machine; its"
        " publisher measured 1.7x on a server GPU with 16-bit weights)"
    )
    assert "publisher" not in dflash.expectation
    assert 1.0 < estimate_head_speedup(0.5, one_pass=True) < estimate_head_speedup(0.1, one_pass=True)
    assert estimate_head_speedup(0.1, one_pass=False) < estimate_head_speedup(0.1, one_pass=True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
SETTINGS = (
    "architectures", "model_type", "hidden_size", "target_hidden_size", "vocab_size", "num_hidden_layers",
    "num_attention_heads", "head_dim", "eagle_config", "dflash_config", "transformer_layer_config",
    "eagle_aux_hidden_state_layer_ids", "target_layer_ids", "torch_dtype", "_name_or_path",
)  # fmt: skip


@pytest.mark.long
@given(st.dictionaries(st.sampled_from(SETTINGS), VALUES))
def test_any_configuration_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, object]
) -> None:
    target = model_info(resolve("demo").path, "gguf")
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} | config)
    )
    with suppress(EdgespecError):
        assert isinstance(why_not_made_for(head_info(folder), target), str)
        named_head(resolve_head(str(folder)), resolve("demo"))


def test_a_damaged_configuration_is_an_error(tmp_path: Path) -> None:
    head = write_published(tmp_path / "head")
    (head / "config.json").write_text("[]")
    with pytest.raises(EdgespecError):
        named_head(resolve_head(str(head)), resolve("demo"))
