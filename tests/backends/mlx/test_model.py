"""Tests of the MLX model: versions, probe, load options, snapshots and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import edgespec
from edgespec.backends import mlx
from edgespec.backends.mlx import loading
from edgespec.backends.mlx.build_info import build_info
from edgespec.backends.mlx.weight_loading import load_model
from edgespec.backends.replay import MAX_CHECKPOINTS
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    BackendMissingError,
    CapabilityError,
    MemoryBudgetError,
    ModelFileError,
    OptionError,
)
from edgespec.model.base import LanguageModel, LoadOptions
from edgespec.store.catalogue import models_folder
from tests.backends.mlx.conftest import row
from tests.backends.mlx.tiny_checkpoints import KINDS, write_checkpoint
from tests.raising import raises

CHAINS_ONLY = {"mamba2", "falcon_h1", "qwen3_next", "nemotron_h", "lfm2", "jamba", "granitemoehybrid"}
PLAIN_ONLY = {"llama4"}


class TestProbe:
    @pytest.mark.long
    @pytest.mark.parametrize("kind", KINDS)
    def test_each_kind_of_cache_gets_its_exact_capabilities(self, tmp_path: Path, kind: str) -> None:
        model = mlx.load(str(write_checkpoint(tmp_path, kind)), kind, LoadOptions(context_tokens=64))
        can = model.facts.capabilities
        assert can.rollback == (kind not in PLAIN_ONLY)
        assert can.tree == (kind not in CHAINS_ONLY | PLAIN_ONLY)
        assert bool(can.reason) == (kind in CHAINS_ONLY | PLAIN_ONLY)
        assert model.length == 0
        model.close()

    def test_an_unknown_cache_disables_speculation(self, tmp_path: Path) -> None:
        model = mlx.load(str(write_checkpoint(tmp_path, "llama4")), "llama4", LoadOptions(context_tokens=64))
        assert "ChunkedKVCache" in model.facts.capabilities.reason
        first = row(model, TokenTree.chain(5))
        model.commit(())
        row(model, TokenTree.chain(6))
        model.commit(())
        with pytest.raises(CapabilityError):
            model.verify(TokenTree.chain(7, [8]))
        model.truncate(0)
        np.testing.assert_array_equal(row(model, TokenTree.chain(5)), first)
        model.commit(())
        expected = row(model, TokenTree.chain(6))
        # The cache cannot roll back, so an abandoned step clears it, and no step is launched early.
        model.truncate(1)
        assert model.length == 0
        model.run_ahead(True)
        model.verify(TokenTree.chain(5)).best(0, 1)
        model.commit(())
        np.testing.assert_array_equal(row(model, TokenTree.chain(6)), expected)
        model.close()

    @pytest.mark.parametrize(
        ("lie", "rollback", "reason"),
        [
            ("wide", False, "a multi-token pass"),
            ("positions", True, "a token tree"),
            ("raises", True, "the model could not be run"),
        ],
    )
    def test_capabilities_with_wrong_logits_are_disabled(
        self,
        folder: Path,
        llama: LanguageModel,
        monkeypatch: pytest.MonkeyPatch,
        lie: str,
        rollback: bool,
        reason: str,
    ) -> None:
        monkeypatch.setattr(loading, "load_model", lying(lie))
        model = mlx.load(str(folder / "llama"), "liar", LoadOptions(context_tokens=64))
        can = model.facts.capabilities
        assert (can.rollback, can.tree) == (rollback, False)
        assert reason in can.reason
        model.close()


def lying(lie: str) -> Callable[..., Any]:
    """Return a `load_model` whose models have one defect."""
    opened = load_model

    def open_liar(*args: Any) -> Any:
        checkpoint = opened(*args)
        net = type(checkpoint.skeleton.model)

        class Liar(net):  # type: ignore[misc,valid-type]
            def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
                wide = tokens.shape[1] > 1
                in_tree = cache[0].layout.offsets is not None
                if in_tree and lie == "raises":
                    raise ValueError("no trees here")
                if in_tree and lie == "positions":
                    cache[0].layout.offsets = cache[0].layout.offsets + 1
                logits: mx.array = super().__call__(tokens, cache=cache)
                return logits * 1.01 if wide and lie == "wide" else logits

        checkpoint.skeleton.model.__class__ = Liar
        return checkpoint

    return open_liar


class TestLoading:
    @pytest.mark.parametrize(
        "options",
        [
            {"kv_type": "f16"},
            {"threads": 2},
            {"gpu_layers": 3},
            {"flash_attention": "on"},
            {"mlock": True},
            {"mmap": False},
        ],
    )
    def test_unsupported_options_are_rejected(
        self, folder: Path, llama: LanguageModel, options: dict[str, Any]
    ) -> None:
        with pytest.raises(OptionError):
            mlx.load(str(folder / "llama"), "llama", LoadOptions(**options))

    @pytest.mark.long
    @pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
    def test_a_quantised_cache_is_smaller_and_exact(
        self, folder: Path, llama: LanguageModel, kv_type: str
    ) -> None:
        # Heads of 16 are too small to share scales.
        path = write_checkpoint(folder / "large heads", "llama", config={"head_dim": 32})
        plain = mlx.load(str(path), "llama", LoadOptions(context_tokens=512))
        model = mlx.load(str(path), "llama", LoadOptions(context_tokens=512, kv_type=kv_type))
        assert model.facts.kv_bytes < plain.facts.kv_bytes / 2
        assert model.facts.capabilities.tree
        tokens = np.random.default_rng(0).integers(3, 200, 300).tolist()
        model.prefill(tokens)
        expected = row(model, TokenTree.chain(4))
        model.truncate(0)
        for start in range(0, 300, 50):
            model.verify(
                TokenTree((*tokens[start : start + 50], 9, 9), (*range(-1, 49), 3, 50), (None,) * 52)
            )
            model.commit(tuple(range(1, 50)))
        np.testing.assert_array_equal(row(model, TokenTree.chain(4)), expected)
        assert np.abs(row(model, TokenTree.chain(4)) - row(plain, TokenTree.chain(4))).max() > 0
        plain.close()
        model.close()

    @pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
    def test_an_unsupported_quantised_cache_is_rejected(self, tmp_path: Path, kind: str) -> None:
        # Heads of size 16 are too small to share scales, and attention sinks have no quantised kernel.
        path = write_checkpoint(tmp_path, kind, config={} if kind == "llama" else {"head_dim": 32})
        with raises(OptionError, code="option_not_supported", option="kv_type"):
            mlx.load(str(path), kind, LoadOptions(context_tokens=64, kv_type="q8_0"))

    def test_a_cache_that_is_too_large_is_rejected_with_a_fitting_context(
        self, folder: Path, llama: LanguageModel
    ) -> None:
        weights, cache = llama.facts.weight_bytes, llama.facts.kv_bytes
        options = LoadOptions(context_tokens=512 * 64, memory_bytes=weights + 8 * cache)
        with raises(MemoryBudgetError, "4096"):
            mlx.load(str(folder / "llama"), "llama", options)

    @pytest.mark.long
    def test_cache_bytes_are_predicted(self, folder: Path, llama: LanguageModel) -> None:
        for kind in ("llama", "gemma3", "qwen3_next"):
            path = write_checkpoint(folder / f"sized {kind}", kind)
            model = mlx.load(str(path), kind, LoadOptions(context_tokens=1024))
            model.prefill([5] * 1024)
            inner: Any = getattr(model, "_inner", model)
            held = sum(array.nbytes for array in inner.caches.arrays)
            held += MAX_CHECKPOINTS * sum(cache.nbytes for cache in inner.caches.recurrent)
            assert held <= model.facts.kv_bytes
            if kind != "gemma3":  # The windows have not reached their full size.
                assert held == model.facts.kv_bytes
            model.close()

    def test_snapshots_of_other_weights_or_too_many_tokens_are_rejected(
        self, folder: Path, llama: LanguageModel
    ) -> None:
        path = write_checkpoint(folder / "other weights", "llama", seed=5)
        other = mlx.load(str(path), "other", LoadOptions(context_tokens=512))
        short = mlx.load(str(folder / "llama"), "short", LoadOptions(context_tokens=8))
        llama.truncate(0)
        llama.prefill([5] * 20)
        snapshot = llama.snapshot()
        for model in (other, short):
            with raises(BackendError, "snapshot", code="state_not_restored"):
                model.restore(snapshot)
            assert model.length == 0
            row(model, TokenTree.chain(4))
            model.close()

    @pytest.mark.long
    @pytest.mark.parametrize("cycles", [3, pytest.param(7, marks=pytest.mark.long)])
    def test_closing_a_model_frees_its_memory(self, cycles: int) -> None:
        """All MLX arrays are freed, and the process keeps at most fragments."""
        code = (
            "import edgespec, psutil\n"
            "import mlx.core as mx\n"
            f"for cycle in range({cycles}):\n"
            "    how = {'context': 256, 'prefix_cache': 'none', 'measure_costs': False, 'trust': True,\n"
            "           'exactness': 'off', 'method': 'none'}\n"
            "    with edgespec.load('demo-mlx', 'none', **how) as runtime:\n"
            "        runtime.generate('hi', max_tokens=8, seed=1)\n"
            "    held = psutil.Process().memory_info().rss\n"
            "    print(held, mx.get_active_memory(), runtime.target.weight_bytes)\n"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
        sizes, arrays, weights = zip(
            *(map(int, line.split()) for line in ran.stdout.splitlines()), strict=True
        )
        assert max(arrays) < 1024
        assert sizes[-1] - sizes[1] < weights[0]

    @pytest.mark.long
    def test_random_initial_weights_are_not_kept(self) -> None:
        """Each unevaluated random draw holds the draw before it."""
        mx.random.uniform()
        mlx.load(str(models_folder() / "demo-mlx"), "demo", LoadOptions(context_tokens=64)).close()
        state: Any = mx.random.state
        mx.export_to_dot(graph := StringIO(), state[0])
        assert "Split" not in graph.getvalue()


def test_build_info_does_not_import_mlx_lm() -> None:
    facts = build_info()
    assert facts.version.split(".")[0].isdigit()
    assert facts.lm_version.startswith("0.")
    assert facts.device.startswith("CPU" if not (facts.metal or facts.cuda) else "GPU")


def test_build_info_names_the_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with raises(BackendMissingError, "mlx-lm"):
        build_info()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_the_smallest_context(tmp_path: Path, kind: str) -> None:
    context = 256
    folder = str(write_checkpoint(tmp_path, kind))
    with edgespec.load(folder, folder, context=context) as runtime:
        assert runtime.context_tokens == context
        said = {}
        for method in ("none", "model"):
            stream = runtime.stream_tokens([7] * max(1, context - 3), temperature=0, method=method)
            for _ in stream:
                pass
            said[method] = stream.reply.tokens
        assert said["model"] == said["none"]
        assert len(said["none"]) == context - max(1, context - 3) + 1


def test_a_tokenizer_that_fails_when_it_is_used(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": "x"}))
    with raises(ModelFileError, "be loaded"):
        edgespec.load(str(folder))
