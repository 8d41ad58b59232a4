"""Draft models: which ones can draft for a target, and which one `auto` chooses.

Measured acceptance rates are counted, saved, used by `auto`, and deleted.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec
from edgespec.errors import BackendError, EdgespecError, MemoryBudgetError, ModelFileError, OptionError
from edgespec.loading import pair_loading
from edgespec.loading.prepare.gguf_parts import GgufParts, write_gguf
from edgespec.model.formats.gguf_header import read_header
from edgespec.store import catalogue
from edgespec.store.catalogue import models_folder
from edgespec.store.drafts import DraftChoice, DraftOption, choose_draft, draft_options
from edgespec.store.installed import find_installed
from edgespec.store.reference import Resolved, resolve
from edgespec.store.speedup_estimate import (
    AcceptanceRecorder,
    LocalModel,
    _key,
    add_acceptance,
    estimate_acceptance_rate,
    estimate_speedup,
    measured_acceptance_rate,
)
from edgespec.system.facts import Facts
from tests.backends.tiny_models import WORDS, write_llama
from tests.raising import raises
from tests.saved_facts import saved_facts
from tests.store.fake_stores import OllamaStore, add_to_hub, add_to_lmstudio

QUICKLY: dict[str, Any] = {"context": 256, "threads": 1, "exactness": "off", "measure_costs": False}
TARGET, DRAFT = (models_folder() / f"demo-{name}-q8_0.gguf" for name in ("target", "draft"))


@pytest.fixture
def lmstudio(own_home: Path) -> Path:
    """Fill LM Studio with the demo pair under other names, a model with other tokens, and a too large one."""
    folder = own_home / ".lmstudio" / "models"
    add_to_lmstudio(folder, "maker/Large-GGUF/large-Q8_0.gguf", TARGET)
    add_to_lmstudio(folder, "maker/Small-GGUF/small-Q8_0.gguf", DRAFT)
    other = write_llama(own_home / "other.gguf")
    add_to_lmstudio(folder, "maker/Small-Like-GGUF/small-like-F32.gguf", other)
    return folder


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "aliases.toml"
    monkeypatch.setattr(catalogue, "user_aliases_path", lambda: path)
    return path


def write_large(path: Path, parameters: int) -> None:
    """Write the header of a model with the demo's tokens and a given number of parameters."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    tokens = list(read_header(TARGET).metadata["tokenizer.ggml.tokens"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    size_bytes = 2 * parameters
    writer.add_tensor_info("blk.0.ffn_up.weight", (parameters,), np.dtype(np.float16), size_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, read_header(path).size_bytes + size_bytes)


def drafts_of(reference: str) -> list[DraftOption]:
    return draft_options(resolve(reference, allow_download=False), find_installed())


def chosen(reference: str, memory_bytes: int | None = None) -> DraftChoice:
    return choose_draft(resolve(reference, allow_download=False), memory_bytes)


def test_drafts_are_matched_by_tokens(lmstudio: Path) -> None:
    (option,) = drafts_of("maker/Large-GGUF")
    assert option.reference == "maker/Small-GGUF"
    assert (option.shared_token_fraction, option.tokens, option.source) == (
        1.0,
        "the same tokens as the model",
        "tokens",
    )
    assert drafts_of("maker/Small-GGUF") == []  # A larger model never drafts.
    assert drafts_of("maker/Small-Like-GGUF") == []


def test_auto_takes_the_draft_and_gives_the_reason(lmstudio: Path) -> None:
    choice = chosen("maker/Large-GGUF")
    assert choice.draft is not None
    assert choice.draft.path == lmstudio / "maker/Small-GGUF/small-Q8_0.gguf"
    assert choice.reason == (
        "it has the same tokens as the model, and its expected speed-up is 1.5x (estimated from its size)"
    )
    assert not choice.is_expected
    assert chosen("maker/Large-GGUF") == choice


@pytest.mark.long
def test_the_runtime_reports_the_draft_and_replies_are_unchanged(lmstudio: Path) -> None:
    with edgespec.load("maker/Large-GGUF", context=256, threads=1) as runtime:
        assert runtime.draft is not None
        assert "using the draft model maker/Small-GGUF: it has the same tokens" in runtime.target.notice
        reply = runtime.generate("How do I list files?", max_tokens=12, seed=3)
    with edgespec.load("demo", "none", context=256, threads=1, method="none") as runtime:
        assert runtime.generate("How do I list files?", max_tokens=12, seed=3).tokens == reply.tokens


def test_a_draft_beyond_the_memory_limit_is_not_taken(lmstudio: Path) -> None:
    both = TARGET.stat().st_size + DRAFT.stat().st_size + (6144 + 768) * 1024
    assert chosen("maker/Large-GGUF", both).draft is not None
    choice = chosen("maker/Large-GGUF", both - 1)
    assert choice.draft is None
    assert choice.reason.startswith("the draft model maker/Small-GGUF needs 3.4 MiB, which does not fit")


def test_drafts_of_another_backend_are_offered_but_not_taken(lmstudio: Path) -> None:
    (lmstudio / "maker/Small-GGUF/small-Q8_0.gguf").unlink()
    add_to_lmstudio(lmstudio, "maker/Small-MLX", models_folder() / "demo-mlx-draft")
    (option,) = drafts_of("maker/Large-GGUF")
    assert (option.format, option.shared_token_fraction) == ("mlx", 1.0)
    choice = chosen("maker/Large-GGUF")
    assert choice.draft is None
    assert choice.reason.startswith("no draft model was found for maker/Large-GGUF; ")


def test_auto_skips_drafts_of_unknown_architecture(own_home: Path) -> None:
    folder = own_home / ".lmstudio" / "models"
    large = write_llama(own_home / "large.gguf", layers=40)
    for architecture, taken in (("strange", None), ("qwen2", "maker/small")):
        small = write_llama(own_home / "small.gguf", architecture=architecture)
        add_to_lmstudio(folder, "maker/small/small.gguf", small)
        add_to_lmstudio(folder, "maker/large/large.gguf", large)
        assert [option.reference for option in drafts_of("maker/large")] == ["maker/small"]
        draft = chosen("maker/large").draft
        assert (draft.name if draft else None) == taken


def test_auto_takes_the_highest_expected_speedup(lmstudio: Path, own_home: Path) -> None:
    """A copy of less than half the target's size is also a draft model. A larger one is not chosen."""
    OllamaStore(own_home / ".ollama" / "models").add("small", "again", DRAFT.read_bytes())
    options = drafts_of("maker/Large-GGUF")
    assert {option.reference for option in options} == {"maker/Small-GGUF", "small:again"}
    choice = chosen("maker/Large-GGUF")
    assert choice.draft is not None
    assert choice.draft.name == "maker/Small-GGUF"  # Equal estimates are ordered by name.
    assert choice.reason.endswith("the best of 2 draft models")


def test_a_draft_that_shares_most_of_the_tokens(own_home: Path) -> None:
    folder = own_home / ".lmstudio" / "models"
    words = tuple(f"▁word{i}" for i in range(1500))
    large = write_llama(own_home / "large.gguf", words=(*WORDS, *words), layers=8)
    small = write_llama(own_home / "small.gguf", words=(*WORDS, *words[:1450]))
    poor = write_llama(own_home / "poor.gguf", words=(*WORDS, *words[:900]))
    for name, path in (("large", large), ("small", small), ("poor", poor)):
        add_to_lmstudio(folder, f"maker/{name}/{name}.gguf", path)
    shares = {option.reference: option.shared_token_fraction for option in drafts_of("maker/large")}
    tokens = 1500 + len(WORDS) + 259
    assert shares == {
        "maker/small": pytest.approx((tokens - 50) / tokens, abs=1e-3),
        "maker/poor": pytest.approx((tokens - 600) / tokens, abs=1e-3),
    }
    choice = chosen("maker/large")
    assert choice.draft is not None
    assert choice.draft.name == "maker/small"
    assert "it has 97.2% of the model's tokens" in choice.reason


class TestCatalogueDrafts:
    """Fill the cache with catalogue repositories that hold the demo's files."""

    @pytest.fixture
    def llamas(self, cache: Path, tmp_path: Path) -> None:
        for size, file in (("8B", TARGET), ("1B", DRAFT)):
            name = {"8B": "Meta-Llama-3.1-8B-Instruct", "1B": "Llama-3.2-1B-Instruct"}[size]
            source = tmp_path / f"{name}-Q4_K_M.gguf"
            shutil.copyfile(file, source)
            add_to_hub(cache, f"bartowski/{name}-GGUF", source)

    def test_a_recommended_draft_is_taken_without_a_notice(self, llamas: None) -> None:
        choice = chosen("8b-q4")
        assert choice.draft is not None
        assert choice.draft.entry is not None
        assert (choice.draft.entry.name, choice.is_expected) == ("llama-3.2-1b", True)

    def test_catalogue_drafts_are_listed_with_installed_ones(self, llamas: None, lmstudio: Path) -> None:
        options = {option.reference: option for option in drafts_of("8b-q4")}
        assert {option.source for option in options.values()} == {"tokens", "catalogue"}
        assert options["maker/Small-GGUF"].path is not None
        assert all(option.shared_token_fraction == 1.0 for option in options.values())

    def test_a_model_with_known_tokens_gets_drafts_of_its_family(self, llamas: None, lmstudio: Path) -> None:
        """A large model outside the catalogue has the same tokens as a listed one."""
        large = lmstudio / "me" / "Mine-GGUF" / "mine-F16.gguf"
        large.parent.mkdir(parents=True)
        write_large(large, parameters=8_000_000_000)
        here = {option.reference: option.path is not None for option in drafts_of("me/Mine-GGUF")}
        assert here["llama-3.2-3b"] is False
        assert "llama-3.3-70b" not in here
        assert "qwen3-0.6b" not in here

    def test_a_missing_recommended_draft_is_named_but_not_downloaded(
        self, cache: Path, tmp_path: Path
    ) -> None:
        source = tmp_path / "Llama-3.3-70B-Instruct-Q4_K_M.gguf"
        shutil.copyfile(TARGET, source)
        add_to_hub(cache, "bartowski/Llama-3.3-70B-Instruct-GGUF", source)
        options = drafts_of("70b-q4")
        assert [option.path for option in options] == [None] * len(options)
        assert {"llama-3.2-3b", "llama-3.2-1b"} <= {option.reference for option in options}
        choice = chosen("70b-q4")
        assert choice.draft is None
        assert choice.reason.startswith(
            "the recommended draft model is not on this machine; to download it, use --draft llama-3.2-3b"
            " (1.9 GiB, expected speed-up "
        )
        assert choice.reason.endswith("x, estimated from its size)")


class TestUserPairs:
    def test_the_users_pair_wins(self, lmstudio: Path, names: Path) -> None:
        names.write_text('[pairs]\n"maker/large-gguf" = "demo-draft"\n')
        for reference in (
            "maker/Large-GGUF",
            "lmstudio:maker/Large-GGUF",
            str(resolve("maker/Large-GGUF").path),
        ):
            choice = chosen(reference)
            assert choice.draft is not None
            assert choice.draft.path == DRAFT
            assert choice.reason.startswith("you chose demo-draft for ")

    def test_a_pair_may_be_none(self, names: Path) -> None:
        names.write_text('[pairs]\ndemo = "none"\n')
        choice = chosen("demo")
        assert choice.draft is None
        assert choice.reason == (
            "you turned off the draft model for demo; to use one anyway, name it with --draft"
        )

    def test_a_missing_draft_of_a_pair_is_not_downloaded(self, names: Path) -> None:
        names.write_text('[pairs]\ndemo = "1b-q4"\n')
        choice = chosen("demo")
        assert choice.draft is None
        assert "1b-q4, is not on this machine" in choice.reason
        assert "use --draft 1b-q4" in choice.reason


def test_the_demo_has_its_own_draft() -> None:
    choice = chosen("demo")
    assert choice.draft is not None
    assert (choice.draft.name, choice.is_expected) == ("demo-draft", True)


class TestSpeedupEstimate:
    def test_larger_drafts_have_higher_estimated_acceptance(self) -> None:
        assert [estimate_acceptance_rate(share) for share in (0.01, 0.1, 1.0)] == pytest.approx(
            [0.70, 0.78, 0.86]
        )

    @given(st.floats(1e-4, 1.0), st.floats(0.001, 1.0), st.floats(0.0, 1.0))
    def test_higher_cost_or_fewer_shared_tokens_never_raise_the_speedup(
        self, size: float, cost: float, shared: float
    ) -> None:
        best = estimate_speedup(size, cost)
        assert best >= estimate_speedup(size, cost, shared)
        assert best >= estimate_speedup(size, cost * 1.5)
        assert best <= estimate_speedup(min(1.0, size * 2), cost)
        assert 0.0 <= estimate_acceptance_rate(size, shared) <= shared + 1e-12


class TestFailingDrafts:
    """If a draft model chosen by `auto` cannot be loaded, a notice is shown and the next one is tried."""

    @staticmethod
    def add_tensor(path: Path) -> None:
        whole = GgufParts([path])
        tensors = {**whole.tensors, "v.patch_embd.weight": whole.tensors["output_norm.weight"]}
        other = path.with_suffix(".new")
        write_gguf(other, whole.architecture, whole.metadata(0, whole.layer_count), tensors)
        other.rename(path)

    @staticmethod
    def rename_pre_tokenizer(path: Path) -> None:
        data = path.read_bytes()
        assert data.count(b"smollm") or data.count(b"gpt-2")
        path.write_bytes(data.replace(b"smollm", b"unheard").replace(b"gpt-2", b"gpt-?"))

    @staticmethod
    def delete_after_the_scan(path: Path) -> None:
        find_installed()  # The metadata are cached, as long as size and time are the same.
        status, size = path.stat(), path.stat().st_size
        path.write_bytes(b"GGUF".ljust(size, b"\0"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    @pytest.mark.long
    @pytest.mark.parametrize("damage", ["add_tensor", "rename_pre_tokenizer", "delete_after_the_scan"])
    def test_the_target_runs_without_it(self, lmstudio: Path, damage: str) -> None:
        small = lmstudio / "maker/Small-GGUF/small-Q8_0.gguf"
        getattr(self, damage)(small)
        preview = edgespec.plan("maker/Large-GGUF", context=256)
        assert preview.draft is None
        assert preview.why_no_draft.startswith("not using the draft model maker/Small-GGUF: ")
        assert preview.notes[-1] in preview.why_no_draft
        with edgespec.load("maker/Large-GGUF", **QUICKLY) as runtime:
            assert runtime.draft is None
            assert "not using the draft model maker/Small-GGUF: " in runtime.target.notice
            assert runtime.generate("Hi", max_tokens=4).tokens
        with pytest.raises(ModelFileError, match=re.escape(small.name)):
            edgespec.load("maker/Large-GGUF", "maker/Small-GGUF", context=256)
        with raises(OptionError, "maker/Small-GGUF", code="draft_missing", option="method"):
            edgespec.load("maker/Large-GGUF", context=256, method="model")

    def test_the_next_one_is_used(self, lmstudio: Path, own_home: Path) -> None:
        store = OllamaStore(own_home / ".ollama" / "models")
        self.rename_pre_tokenizer(lmstudio / "maker/Small-GGUF/small-Q8_0.gguf")
        second = lmstudio / "maker/Small-Other-GGUF/small-Q8_0.gguf"
        second.parent.mkdir()
        shutil.copyfile(DRAFT, second)
        self.rename_pre_tokenizer(second)
        store.add("zebra", "latest", DRAFT.read_bytes())
        with edgespec.load("maker/Large-GGUF", **QUICKLY) as runtime:
            assert runtime.draft is not None
            assert runtime.draft.name == "zebra:latest"
            notice = runtime.target.notice
        assert "not using the draft model maker/Small-GGUF" in notice
        assert "not using the draft model maker/Small-Other-GGUF" in notice
        assert "using the draft model zebra:latest" in notice

    @pytest.mark.parametrize(
        "error", [ModelFileError("mmap failed"), MemoryBudgetError("too large"), BackendError("no context")]
    )
    def test_a_failure_after_the_plan_is_noticed(
        self, lmstudio: Path, error: EdgespecError, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load_models(found: Resolved, options: Any, progress: Any) -> Any:
            if found.name == "maker/Small-GGUF":
                raise error
            return original(found, options, progress)

        original = pair_loading._load_models
        monkeypatch.setattr(pair_loading, "_load_models", load_models)
        with edgespec.load("maker/Large-GGUF", **QUICKLY) as runtime:
            assert runtime.draft is None
            assert f"not using the draft model maker/Small-GGUF: {error.what}" in runtime.target.notice
            assert runtime.generate("Hi", max_tokens=4).tokens

    @pytest.mark.long
    @pytest.mark.skipif(find_spec("mlx") is None, reason="needs MLX")
    @pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json", "model.safetensors"])
    def test_an_mlx_draft_that_fails(self, own_home: Path, file: str) -> None:
        folder = own_home / ".lmstudio" / "models"
        add_to_lmstudio(folder, "maker/Large-MLX", models_folder() / "demo-mlx")
        draft = add_to_lmstudio(folder, "maker/Small-MLX", models_folder() / "demo-mlx-draft")
        find_installed()
        path = draft / file
        status, size = path.stat(), path.stat().st_size
        path.write_bytes(b"[" * size)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with edgespec.load("maker/Large-MLX", context=256, exactness="off", measure_costs=False) as runtime:
            assert runtime.draft is None
            assert "not using the draft model maker/Small-MLX: " in runtime.target.notice
            assert runtime.generate("Hi", max_tokens=4).tokens

    @pytest.mark.long
    def test_a_draft_that_the_user_paired_is_still_an_error(self, lmstudio: Path, names: Path) -> None:
        names.write_text('[pairs]\n"maker/large-gguf" = "maker/Small-GGUF"\n')
        self.add_tensor(lmstudio / "maker/Small-GGUF/small-Q8_0.gguf")
        with raises(ModelFileError, "image encoder", code="model_file_not_supported"):
            edgespec.load("maker/Large-GGUF", context=256)


@pytest.fixture(autouse=True)
def own_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[LocalModel, LocalModel]:
    paths = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for path in paths:
        path.write_bytes((models_folder() / "demo-draft-q8_0.gguf").read_bytes())
    return resolve(str(paths[0])), resolve(str(paths[1]))


def test_a_rate_needs_enough_drafts_of_the_same_files(pair: tuple[LocalModel, LocalModel]) -> None:
    record = AcceptanceRecorder(*pair)
    assert measured_acceptance_rate(*pair) is None
    record.count(199, 100)
    record.save()
    assert measured_acceptance_rate(*pair) is None
    record.count(1, 0)
    record.save()
    record.save()
    assert measured_acceptance_rate(*pair) == 0.5
    assert measured_acceptance_rate(pair[1], pair[0]) is None
    os.utime(pair[1].path, (1, 1))
    assert measured_acceptance_rate(*pair) is None
    assert edgespec.delete_data("learned") > 0
    assert not saved_facts("acceptance")


def test_the_history_favours_recent_replies(pair: tuple[LocalModel, LocalModel]) -> None:
    one, other = pair
    add_acceptance(one, one, 300, 150)
    for _ in range(20):
        add_acceptance(one, one, 10_000, 9_000)
    assert measured_acceptance_rate(one, one) == pytest.approx(0.9, abs=0.01)
    record = AcceptanceRecorder(one, other)
    record.count(2000, 500)  # This count is saved before the run ends.
    assert measured_acceptance_rate(one, other) == 0.25
    one.path.unlink()
    record.count(500, 5)
    record.save()
    assert measured_acceptance_rate(one, other) is None


@pytest.mark.parametrize("damaged", [[], {}, [1], ["a", "b"], [-5, -9], [1, 300], 7])
def test_damaged_counts_are_not_used(pair: tuple[LocalModel, LocalModel], damaged: Any) -> None:
    Facts().put("acceptance", {_key(*pair): damaged})
    assert measured_acceptance_rate(*pair) is None
    add_acceptance(*pair, 200, 50)
    assert measured_acceptance_rate(*pair) == 0.25


@pytest.mark.long
def test_auto_uses_measured_acceptance_rates(own_home: Path) -> None:
    folder = own_home / ".lmstudio" / "models" / "maker"
    for name, file in (("Large", "target"), ("Small", "draft")):
        add_to_lmstudio(folder, f"{name}-GGUF/{name}.gguf", models_folder() / f"demo-{file}-q8_0.gguf")
    target = resolve("maker/Large-GGUF", allow_download=False)
    assert choose_draft(target).reason.endswith("(estimated from its size)")
    options = {"context": 512, "threads": 1, "prefix_cache": "none"}
    guesses = true = 0
    with edgespec.load("maker/Large-GGUF", method="model", **options) as runtime:  # type: ignore[arg-type]
        while guesses < 200:
            reply = runtime.generate("How do I list files?", max_tokens=200, seed=guesses + 1)
            guesses += reply.stats.drafted_per_position[0]
            true += reply.stats.accepted_per_position[0]
        before = guesses
        runtime.generate("How do I list files?", max_tokens=20, seed=1, method="suffix")
        runtime.generate("How do I list files?", max_tokens=20, seed=1, method="none")
    assert before == guesses
    (option,) = draft_options(target, find_installed())
    assert option.acceptance_rate == true / guesses
    why = choose_draft(target).reason
    assert f"(measured: {true / guesses:.0%} of its drafted tokens are accepted)" in why
    # A draft model with a very low acceptance rate is no longer chosen.
    add_acceptance(target, resolve("maker/Small-GGUF", allow_download=False), 15_000, 0)
    choice = choose_draft(target)
    assert choice.draft is None
    assert "is expected to make" in choice.reason
    edgespec.delete_data("learned")
    assert choose_draft(target).draft is not None
