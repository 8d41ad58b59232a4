"""Drafters are created from options, and errors for missing drafters say how to get them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import edgespec
import edgespec.methods.model.translation as comparison
from edgespec.errors import ModelFileError, OptionError
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.loading.prepare.lowbit import prepare_lowbit
from edgespec.store.reference import resolve
from tests.backends.tiny_models import write_lfm2
from tests.raising import raises

PROMPT = "How do I list files by size?"
LENGTH = 24
# For tests that compare no replies.
QUICKLY: dict[str, Any] = {"context": 256, "exactness": "off", "measure_costs": False}


def same_as_plain(runtime: edgespec.Runtime, methods: Sequence[str], **options: Any) -> list[edgespec.Reply]:
    """Return the replies of these methods after checking that they equal plain decoding."""
    how: dict[str, Any] = {"max_tokens": LENGTH, "seed": 3, "temperature": 0.8} | options
    plain = runtime.generate(PROMPT, method="none", **how)
    replies = [runtime.generate(PROMPT, method=method, **how) for method in methods]
    for reply in replies:
        assert reply.tokens == plain.tokens, reply.method
    return replies


class TestAsked:
    @pytest.mark.long
    def test_lookup_drafters_are_always_created(self) -> None:
        with edgespec.load("demo", context=512) as runtime:
            assert runtime.drafters == ("model", "suffix", "ngram")
            same_as_plain(runtime, ["suffix", "model+suffix", "model+suffix+ngram"])

    def test_the_error_for_an_unloaded_drafter_tells_how_to_load_it(self) -> None:
        with edgespec.load("demo", "none", **QUICKLY) as runtime:
            for name in ("lookahead", "layerskip", "lowbit"):
                with raises(OptionError, name, code="method_unavailable", option="method"):
                    runtime.generate(PROMPT, method=name)

    @pytest.mark.parametrize("name", ["layerskip", "lowbit"])
    def test_the_error_for_a_missing_drafter_tells_what_to_do(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
        with raises(OptionError, f"edgespec prepare {name} demo", code="method_unavailable"):
            edgespec.load("demo", "none", **QUICKLY, method=name)

    def test_recurrent_models_get_no_hint_for_a_low_bit_copy(self, tmp_path: Path) -> None:
        model = str(write_lfm2(tmp_path / "model.gguf"))
        with raises(OptionError, "branches", code="method_unavailable", option="method"):
            edgespec.load(model, "none", context=256, method="lowbit")

    @pytest.mark.parametrize("name", ["layerskip", "lowbit"])
    def test_hints_quote_the_path_of_the_target(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
        model = tmp_path / "my model.gguf"
        shutil.copyfile(resolve("demo").path, model)
        with raises(OptionError, name, model, code="method_unavailable", option="method"):
            edgespec.load(str(model), "none", **QUICKLY, method=name)

    def test_a_combination_is_created_once(self) -> None:
        with edgespec.load("demo", context=512, methods=("model+ngram",)) as runtime:
            drafters = runtime._session.drafters
            one, other = (drafters.choose(drafters.resolve(each)) for each in ("model+ngram", "ngram+model"))
            assert one is not None
            assert one is other

    def test_two_self_drafts_are_rejected(self) -> None:
        with raises(OptionError, "2 methods", "layerskip", option="method"):
            edgespec.load("demo", method="layerskip+lowbit")

    @pytest.mark.long
    def test_lookahead_reports_its_statistics(self) -> None:
        with edgespec.load("demo", "none", context=512, method="lookahead") as runtime:
            (reply,) = same_as_plain(runtime, ["lookahead"], draft_length=8)
        assert "lookahead" in reply.method.note

    @pytest.mark.long
    def test_adaptive_trees(self) -> None:
        with edgespec.load("demo", context=512, draft_branches="auto") as runtime:
            same_as_plain(runtime, ["model", "auto"], draft_length=8)


class TestPrepared:
    @pytest.mark.long
    def test_early_exit(self, demo_target: Path) -> None:
        prepared = prepare_layerskip(demo_target, 4)
        with edgespec.load("demo", "none", context=512, method="layerskip") as runtime:
            alone, together = same_as_plain(runtime, ["layerskip", "layerskip+suffix"])
            assert runtime.target.path == str(prepared.folder)
        both = ("layerskip", "lowbit")
        with raises(OptionError, "demo`", code="method_unavailable", option="method"):
            edgespec.load("demo", "none", context=512, methods=both)
        copy = prepare_lowbit(demo_target, "Q4_0")
        with edgespec.load("demo", "none", context=512, methods=both) as runtime:
            _, low = same_as_plain(runtime, [*both])
            assert low.stats.draft_weight_bytes == pytest.approx(copy.facts["weight_bytes"], rel=1e-3)
            assert low.stats.accepted_tokens
        assert alone.stats.accepted_tokens
        assert alone.stats.draft_weight_bytes == alone.stats.draft_kv_bytes == 0
        assert together.stats.accepted_tokens
        with edgespec.load(str(prepared.folder), context=512, methods=("layerskip",)) as runtime:
            same_as_plain(runtime, ["layerskip", "ngram"], temperature=0.0)
        (prepared.folder / "lower.gguf").write_bytes(b"GGUF")
        with raises(ModelFileError, "damaged", code="prepared_outdated"):
            edgespec.load("demo", "none", method="layerskip")
        with edgespec.load("demo", "none", context=512, method="ngram") as runtime:
            same_as_plain(runtime, ["ngram"])

    @pytest.mark.long
    def test_lowbit(self, demo_target: Path) -> None:
        prepared = prepare_lowbit(demo_target, "Q4_0")
        with edgespec.load("demo", "none", context=512, method="lowbit", draft_window=64) as runtime:
            alone, together = same_as_plain(runtime, ["lowbit", "lowbit+suffix"])
        assert alone.stats.draft_weight_bytes == pytest.approx(prepared.facts["weight_bytes"], rel=1e-3)
        assert alone.stats.accepted_tokens
        assert together.stats.accepted_tokens

    @pytest.mark.long
    def test_lowbit_without_a_prepared_copy(self, demo_target: Path, tmp_path: Path) -> None:
        model = Path(shutil.copy(demo_target, tmp_path / "model.gguf"))
        folder = prepare_layerskip(model, 4).folder
        with edgespec.load(str(model), "none", context=512, method="none") as runtime:
            plain = runtime.generate(PROMPT, max_tokens=LENGTH, seed=3, temperature=0.8)
        model.unlink()
        for name in (model, folder):
            with raises(OptionError, f"edgespec prepare lowbit {folder}", code="method_unavailable"):
                edgespec.load(str(name), "none", context=512, method="lowbit")
        prepare_lowbit(folder)
        for name in (model, folder):
            with edgespec.load(str(name), "none", context=512, method="lowbit", draft_window=64) as runtime:
                alone, _ = same_as_plain(runtime, ["lowbit", "lowbit+suffix"])
                assert alone.tokens == plain.tokens
                assert alone.stats.accepted_tokens

    @pytest.mark.long
    def test_a_copy_of_another_model_is_rejected(self, demo_target: Path, tmp_path: Path) -> None:
        model = tmp_path / "model.gguf"
        data = demo_target.read_bytes()
        model.write_bytes(data)
        prepare_lowbit(model, "Q4_0")
        model.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with raises(ModelFileError, "since", code="prepared_outdated"):
            edgespec.load(str(model), "none", method="lowbit")


class TestMlx:
    SHORT = 12  # tokens: MLX is slow on a CPU

    @pytest.mark.long
    def test_every_self_draft(self) -> None:
        pytest.importorskip("mlx.core")
        with edgespec.load("demo-mlx-draft", "none", context=256, method="lowbit") as runtime:
            same_as_plain(runtime, ["lowbit"], max_tokens=self.SHORT)
        with edgespec.load(
            "demo-mlx-draft", "none", context=256, method="layerskip", exit_layer=1
        ) as runtime:
            (early,) = same_as_plain(runtime, ["layerskip"], max_tokens=self.SHORT)
        assert early.stats.accepted_tokens
        assert early.stats.draft_weight_bytes == 0

    def test_a_missing_exit_layer_is_rejected(self) -> None:
        pytest.importorskip("mlx.core")
        with raises(OptionError, "12"):
            edgespec.load("demo-mlx-draft", "none", **QUICKLY, method="layerskip", exit_layer=12)

    @pytest.mark.parametrize("name", ["layerskip", "lowbit"])
    def test_the_error_for_a_recurrent_model_gives_the_reason(self, name: str, tmp_path: Path) -> None:
        checkpoints = pytest.importorskip("tests.backends.mlx.tiny_checkpoints")
        model = str(checkpoints.write_checkpoint(tmp_path / "model", "lfm2"))
        with raises(OptionError, "branches", code="method_unavailable", option="method"):
            edgespec.load(model, "none", **QUICKLY, method=name)

    def test_learn_needs_an_mlx_draft(self) -> None:
        with raises(
            OptionError, "demo-draft", "--learn works only", code="option_not_supported", option="learn"
        ):
            edgespec.load("demo", "demo-draft", **QUICKLY, learn=True)
        with raises(OptionError, code="draft_missing", option="learn"):
            edgespec.load("demo", "none", **QUICKLY, learn=True)

    # `test_parity.py` proves both methods, each on its own, in every run.
    @pytest.mark.long
    def test_learn_with_a_low_bit_target(self) -> None:
        pytest.importorskip("mlx.core")
        with edgespec.load(
            "demo-mlx-draft", "demo-mlx-draft", context=256, learn=True, method="lowbit+model"
        ) as runtime:
            same_as_plain(runtime, ["model", "lowbit+model"], max_tokens=self.SHORT)

    @pytest.mark.long
    def test_learn_rejects_a_draft_with_another_vocabulary(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoints = pytest.importorskip("tests.backends.mlx.tiny_checkpoints")
        draft = str(checkpoints.write_checkpoint(tmp_path / "draft", "llama"))
        with raises(OptionError, "demo-mlx-draft", code="option_not_supported", option="learn"):
            edgespec.load("demo-mlx-draft", draft, **QUICKLY, learn=True)
        monkeypatch.setattr(comparison, "MIN_TRANSLATED_FRACTION", 0.0)
        with raises(OptionError, "demo-mlx-draft", code="option_not_supported", option="learn"):
            edgespec.load("demo-mlx-draft", draft, **QUICKLY, learn=True)

    @pytest.mark.long
    def test_learn_rejects_a_draft_with_a_window(self) -> None:
        pytest.importorskip("mlx.core")
        with raises(OptionError, code="option_not_supported", option="learn"):
            edgespec.load("demo-mlx-draft", "demo-mlx-draft", **QUICKLY, learn=True, draft_window=24)

    def test_learn_rejects_a_recurrent_draft(self, tmp_path: Path) -> None:
        checkpoints = pytest.importorskip("tests.backends.mlx.tiny_checkpoints")
        model = str(checkpoints.write_checkpoint(tmp_path / "model", "lfm2"))
        with raises(OptionError, "architecture", code="option_not_supported", option="learn"):
            edgespec.load(model, model, **QUICKLY, learn=True)

    @pytest.mark.long
    def test_learn_with_an_mlx_draft(self) -> None:
        pytest.importorskip("mlx.core")
        with edgespec.load("demo-mlx-draft", "demo-mlx-draft", context=256, learn=True) as runtime:
            same_as_plain(runtime, ["model", "model+ngram"], max_tokens=self.SHORT)


class TestTexts:
    @pytest.mark.long
    def test_suffix_drafts_from_a_corpus(self, tmp_path: Path) -> None:
        with edgespec.load("demo", "none", context=512) as runtime:
            said = runtime.generate(PROMPT, temperature=0.0, max_tokens=60)
            (without,) = same_as_plain(runtime, ["suffix"], temperature=0.0)
        (tmp_path / "notes.txt").write_text(said.text, encoding="utf-8")
        with edgespec.load("demo", "none", context=512, corpus=str(tmp_path)) as runtime:
            (found,) = same_as_plain(runtime, ["suffix"], temperature=0.0)
        assert found.stats.target_passes < without.stats.target_passes
        assert "tokens of files" in found.method.note

    @pytest.mark.long
    def test_a_missing_corpus_is_rejected(self, tmp_path: Path) -> None:
        with raises(OptionError, "missing", code="file_not_read", option="corpus"):
            edgespec.load("demo", "none", corpus=str(tmp_path / "missing"))


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"draft_branches": "some"},
            {"draft_window": -1},
            {"draft_sinks": -1},
            {"exit_layer": 0},
            {"draft_confidence": 1.0},
            {"methods": ("modle",)},
            {"exit_layer": 2},
            {"corpus": "README.md", "method": "model"},
            {"learn": True, "method": "suffix"},
        ],
    )
    def test_invalid_options_are_rejected(self, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError):
            edgespec.load("demo", **options)

    @pytest.mark.long
    def test_draft_window(self) -> None:
        with edgespec.load("demo", context=512, draft_window=24, draft_sinks=2) as runtime:
            assert "sees only the first 2 and the last 24 tokens" in runtime.target.notice
            same_as_plain(runtime, ["model"], max_tokens=60)

    @pytest.mark.long
    @pytest.mark.parametrize("window", [24, None])
    def test_the_draft_context_is_only_as_large_as_its_window(self, window: int | None) -> None:
        """A KV cache for the whole context would not fit, so it must never be allocated."""
        options: dict[str, Any] = {"context": 16384, "draft_window": window}
        with edgespec.load("demo", **options) as runtime:
            assert runtime.draft is not None
            assert runtime.plan is not None
            needed = runtime.plan.total_bytes
        with edgespec.load("demo", **options, memory=needed) as runtime:
            assert "sees only the first 4 and the last" in runtime.target.notice
            same_as_plain(runtime, ["model"])
