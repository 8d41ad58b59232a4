"""`--exact`: replies equal plain decoding from an empty cache, whatever is in the caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import Reply, Runtime
from edgespec.assembly import exact
from edgespec.assembly.exact import restrict_to_exact
from edgespec.assembly.loading import always_draft
from edgespec.backends.bit_exactness import BitExactPasses
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from tests.backends.tiny_models import write_jamba, write_llama, write_mamba
from tests.tables import table

TURNS = 5
# What a text is read in where it matters.
PIECE = 256


def reply_to(runtime: Runtime, tokens: list[int], **options: Any) -> Reply:
    stream = runtime.stream_tokens(tokens, max_tokens=10, **options)
    for _ in stream:
        pass
    return stream.reply


def day(
    target: str,
    *,
    methods: tuple[str, ...] = ("auto",),
    turns: int = TURNS,
    begin_tokens: int = 2 * PIECE + 20,
    **options: Any,
) -> tuple[Runtime, list[Reply]]:
    """Compare turns of three chats, two with a common prefix, with a runtime that reads every prompt."""
    options = {"context": 1024, "draft": "none", "measure_costs": False, "exact": True, **options}
    replies = []
    with (
        always_draft(),
        edgespec.load(target, prefix_cache="none", **options) as fresh,
        edgespec.load(target, methods=methods, prefix_cache_memory="64MiB", **options) as runtime,
    ):
        random = np.random.default_rng(1)
        vocab = runtime.target.vocab_size

        def words(count: int) -> list[int]:
            return [int(word) for word in random.integers(vocab // 8, vocab, count)]

        begin = words(begin_tokens)
        chats = [words(30), begin + words(20), begin + words(40)]
        for turn in range(turns):
            chat = chats[turn % 3]
            chat += words(8)
            how = {"seed": turn, "temperature": 0.8 * (turn % 2)}
            reply = reply_to(runtime, chat, method=methods[turn % len(methods)], **how)
            fresh.clear_cache()
            assert reply.tokens == reply_to(fresh, chat, method="none", **how).tokens
            replies.append(reply)
            chat += reply.tokens
        return runtime, replies


def test_bit_exact_model_reuses_prefixes_and_verifies_drafts() -> None:
    runtime, replies = day("demo", draft="auto", methods=("auto", "model", "suffix"))
    able = runtime.target.capabilities
    assert able.exact
    assert able.prefix_reuse_exact
    assert able.max_width > 8
    assert sum(reply.stats.drafted_tokens for reply in replies) > TURNS
    # The third chat begins as the second one does; the fourth turn goes on with all of the first.
    assert replies[2].stats.cached_prompt_tokens >= 2 * PIECE + 20
    assert replies[3].stats.cached_prompt_tokens >= 30 + 8 + len(replies[0].tokens) - 1


def test_generated_tokens_that_round_differently_are_read_again() -> None:
    """An f16 cache, which llama.cpp's attention reads by several kernels."""
    options: dict[str, Any] = {"draft": "auto", "methods": ("auto", "model"), "kv_type": "f16"}
    runtime, replies = day("demo", begin_tokens=PIECE + 20, **options)
    assert runtime.target.capabilities.exact
    assert not runtime.target.capabilities.prefix_reuse_exact
    went_on = [reply.stats.cached_prompt_tokens for reply in replies]
    assert went_on == [0, 0, *(PIECE if turn % 3 else 0 for turn in range(2, TURNS))]


@pytest.mark.long
def test_small_model_without_exact() -> None:
    """With one thread a step and a draft are read by one of those kernels."""
    methods = ("auto", "model", "suffix")
    runtime, replies = day("demo", draft="auto", methods=methods, kv_type="f16", exact=False, turns=12)
    able = runtime.target.capabilities
    assert not able.exact
    assert not able.prefix_reuse_exact
    assert replies[2].stats.cached_prompt_tokens == 2 * PIECE
    assert sum(reply.stats.drafted_tokens for reply in replies) > TURNS


def test_widest_exact_pass_equals_single_steps() -> None:
    """Drafts may be as long: wider ones would be read by the kernel for many rows."""
    random = np.random.default_rng(1)
    with (
        edgespec.load("demo", "none", kv_type="f16", context=512, measure_costs=False) as runtime,
        runtime.borrowed_target() as model,
    ):
        able = runtime.target.capabilities
        assert 17 < able.max_width < runtime.context_tokens - PIECE
        everything = np.arange(runtime.target.vocab_size)
        tokens = random.integers(everything.size // 8, everything.size, PIECE + able.max_width).tolist()
        model.prefill(tokens[:PIECE])
        steps = []
        for token in tokens[PIECE:]:
            steps.append(model.verify(TokenTree.chain(token)).at(0, everything))
            model.commit(())
        model.truncate(PIECE)
        widest = model.verify(TokenTree.chain(tokens[PIECE], tokens[PIECE + 1 :]))
        for row, step in enumerate(steps):
            np.testing.assert_array_equal(widest.at(row, everything), step)


def test_failed_commit_does_not_affect_later_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unused cell in the KV cache changes the order of the others."""

    def no_memory(*_: Any) -> None:
        raise MemoryError

    with (
        edgespec.load("demo", "none", kv_type="f16", context=512, measure_costs=False) as runtime,
        runtime.borrowed_target() as model,
    ):
        model.prefill(list(range(20, 120)))
        model.verify(TokenTree((5, 6, 7), (-1, 0, 0), (None,) * 3))
        with monkeypatch.context() as patch:
            patch.setattr(LlamaContext, "export_sequence", no_memory)
            with pytest.raises(MemoryError):
                model.commit((2,))
        model.truncate(0)
        model.prefill([9] * model.free_tokens)
        assert model.length == 512


@pytest.mark.parametrize("write", [write_llama, write_jamba])
def test_exact_with_other_architectures(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / "tiny.gguf")
    runtime, _ = day(str(path), methods=("suffix",))
    assert runtime.target.capabilities.exact


def test_replaying_model_reads_the_whole_prompt_if_replay_rounds_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would ride in the pass of a step, or be read with what comes after them."""
    widths: list[int] = []
    run = LlamaCppModel.verify

    def noted(model: LlamaCppModel, tree: TokenTree, first: int = 0) -> HostLogits:
        widths.append(tree.width)
        return run(model, tree, first)

    monkeypatch.setattr(LlamaCppModel, "verify", noted)
    path = write_mamba(tmp_path / "tiny.gguf")
    with edgespec.load(str(path), "none", context=512, exact=True, measure_costs=False) as runtime:
        widths.clear()
        tokens = list(range(40, 70))
        for _ in range(2):
            reply = reply_to(runtime, tokens)
            assert reply.stats.cached_prompt_tokens == 0
        assert set(widths) == {1}


def test_exact_with_mlx(tmp_path: Path) -> None:
    tiny_checkpoints = pytest.importorskip("tests.backends.mlx.tiny_checkpoints")
    path = tiny_checkpoints.write_checkpoint(tmp_path / "tiny", "llama", quantisation=("affine", 8, 32))
    runtime, _ = day(str(path), methods=("suffix",), turns=4, begin_tokens=80, context=256)
    assert runtime.target.capabilities.exact


@pytest.mark.long
def test_exact_with_a_trained_mlx_pair() -> None:
    pytest.importorskip("mlx.core")
    runtime, _ = day("demo-mlx", draft="auto", turns=2, begin_tokens=80)
    assert runtime.target.capabilities.exact


def test_bit_exactness_is_probed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    said: list[str] = []

    def progress(what: str, _fraction: float) -> bool:
        said.append(what)
        return True

    for times in (1, 0):
        said.clear()
        with edgespec.load("demo", "none", exact=True, context=512, progress=progress) as runtime:
            assert runtime.target.capabilities.exact
        assert any("bit-exact" in what for what in said) == bool(times)


def test_probe_results_of_other_load_options_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a smaller context, with fewer threads, with weights in one piece."""
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    small = restrict_to_exact(table(3, context_tokens=20), "", None)
    assert small == "exact: this model cannot draft; each reply is processed again before the next reply"
    assert "17 tokens" in restrict_to_exact(table(3), "", None)
    monkeypatch.setattr(exact, "find_bit_exact_passes", lambda *_: BitExactPasses(5, True, True))
    assert "17 tokens" in restrict_to_exact(table(3), "", None)
    split = table(3)
    able = replace(split.facts.capabilities, self_draft_methods=frozenset({"lowbit"}))
    split.facts = replace(split.facts, capabilities=able)
    assert "5 tokens" in restrict_to_exact(split, "", None)
    monkeypatch.setattr(exact, "usable_cores", lambda: 1000)
    assert "5 tokens" in restrict_to_exact(table(3), "", None)


def test_without_exact_nothing_is_probed() -> None:
    with edgespec.load("demo", "none", context=256) as runtime:
        assert not runtime.target.capabilities.exact
