"""After a prefix cache hit, replies of real models equal those of a fresh run, from memory and from disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import Runtime
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.memory.prefix_cache.store import ReuseCosts
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.ngram.drafter import NgramDrafter
from edgespec.model.base import EarlyExit, LanguageModel, LoadOptions, LowBit
from tests.backends.tiny_models import write_gemma2, write_jamba, write_lfm2, write_mamba
from tests.memory.prefix_cache.helpers import ask, keeping

OPTIONS = LoadOptions(context_tokens=512, threads=1)
VISITS = (0, 1, 2, 0, 2, 1, 1, 0)

Make = Callable[[Path, Path], LanguageModel]


def _gguf(write: Callable[[Path], Path]) -> Make:
    return lambda folder, _demo: llamacpp.load(str(write(folder / "model.gguf")), "tiny", OPTIONS)


def _mlx(kind: str) -> Make:
    def make(folder: Path, _demo: Path) -> LanguageModel:
        pytest.importorskip("mlx.core")
        from edgespec.backends import mlx
        from tests.backends.mlx.tiny_checkpoints import write_checkpoint

        if not (folder / kind).exists():
            write_checkpoint(folder / kind, kind)
        return mlx.load(str(folder / kind), kind, LoadOptions(context_tokens=512))

    return make


MODELS: dict[str, Make] = {
    "llama.cpp": lambda _folder, demo: llamacpp.load(str(demo), "demo", OPTIONS),
    "llama.cpp q8_0 cache": lambda _folder, demo: llamacpp.load(
        str(demo), "demo", LoadOptions(context_tokens=512, threads=1, kv_type="q8_0")
    ),
    "llama.cpp window": _gguf(partial(write_gemma2, window=16)),
    "llama.cpp recurrent": _gguf(write_mamba),
    "llama.cpp hybrid": _gguf(write_jamba),
    "llama.cpp short convolution": _gguf(write_lfm2),
    "MLX": _mlx("llama"),
    "MLX window": _mlx("gemma3"),
    "MLX hybrid": _mlx("qwen3_next"),
}


# Much like another one: not every time.
SELDOM = ("llama.cpp q8_0 cache", "llama.cpp short convolution", "MLX window")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.long] * (name in SELDOM))
        for name, make in MODELS.items()
    ],
)
def test_prefixes_are_reused_in_the_same_run_and_the_next(
    make: Make, tmp_path: Path, demo_target: Path
) -> None:
    model = make(tmp_path, demo_target)
    words = np.random.default_rng(1).integers(3, 90, (4, 100)).tolist()
    begun = [[*words[3], *own] for own in words[:3]]
    ngram = {"ngram": NgramDrafter()}
    with keeping(model, tmp_path / "kept", max_bytes=100_000, others=ngram) as runtime:
        chats, replies = [list(text) for text in begun], []
        for turn, chat in enumerate(VISITS):
            replies.append(_turn(runtime, chats[chat], turn))
        assert runtime.memory().prefix_cache.hits >= 4
        saved = [list(text) for text in chats]
    again = make(tmp_path, demo_target)
    with keeping(again, tmp_path / "kept", others={"ngram": NgramDrafter()}) as runtime:
        for turn, chat in enumerate((1, 0)):
            replies.append(_turn(runtime, chats[chat], 20 + turn))
        assert runtime.memory().prefix_cache.hits == 2
        chats, expected = [list(text) for text in begun], []
        for turn, chat in enumerate(VISITS):
            runtime.clear_cache()
            expected.append(_turn(runtime, chats[chat], turn))
        for turn, chat in enumerate((1, 0)):
            runtime.clear_cache()
            expected.append(_turn(runtime, saved[chat], 20 + turn))
        assert replies == expected


def _turn(runtime: Runtime, chat: list[int], turn: int) -> tuple[int, ...]:
    """Ask with a few more words, and return the reply."""
    chat += np.random.default_rng(turn).integers(3, 90, 9).tolist()
    method = ("none", "ngram")[turn % 2]
    options = {"seed": turn, "max_tokens": 12, "temperature": (0.0, 0.8, 1.2)[turn % 3]}
    reply = ask(runtime, chat, method=method, **options)
    chat += reply.tokens
    return reply.tokens


@pytest.fixture(scope="module")
def forms(
    demo_in_halves: Path, demo_draft: Path, low_bit_copy: Path
) -> Callable[[], tuple[LanguageModel, dict[str, Any]]]:
    """Return the bundled model prepared for early exit, and its drafting options."""

    def make() -> tuple[LanguageModel, dict[str, Any]]:
        model = load_layerskip(str(demo_in_halves), "demo", OPTIONS)
        draft = llamacpp.load(str(demo_draft), "draft", OPTIONS)
        views = {
            "layerskip": model.self_draft(EarlyExit(4)),
            "lowbit": model.self_draft(LowBit(str(low_bit_copy))),
            "model": draft,
        }
        vocab = model.facts.vocab_size
        return model, {name: ModelDrafter(view, vocab, name=name) for name, view in views.items()}

    return make


def test_replies_are_the_same_with_every_drafter(
    forms: Callable[[], tuple[LanguageModel, dict[str, Any]]], tmp_path: Path
) -> None:
    model, drafters = forms()
    begun = [[7 + chat] * 3 + list(range(100, 180)) for chat in range(3)]
    with keeping(model, tmp_path, others=drafters) as runtime:
        chats = [list(text) for text in begun]
        said: list[tuple[list[int], dict[str, Any], tuple[int, ...]]] = []
        for turn, chat in enumerate((0, 1, 2, 0, 1, 2, 2, 1, 0)):
            method = ("none", *drafters)[turn % 4]
            chats[chat] += [50 + turn] * 4
            options: dict[str, Any] = {"seed": turn, "max_tokens": 16, "temperature": 0.8 * (turn % 2)}
            prompt = list(chats[chat])
            reply = ask(runtime, prompt, method=method, **options)
            said.append((prompt, options, reply.tokens))
            chats[chat] += reply.tokens
        assert runtime.memory().prefix_cache.hits >= 5
        for prompt, options, tokens in said:
            runtime.clear_cache()
            assert ask(runtime, prompt, method="none", **options).tokens == tokens


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReuseCosts, "saves_time", lambda _self, tokens, _bytes: tokens > 0)


@pytest.mark.long
@pytest.mark.usefixtures("always")
def test_chats_with_default_options_reuse_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    asked = ["How do I list files by size?", "And by name?", "How do I unpack a tar file?"]

    def talk(runtime: Runtime, *, forget: bool) -> list[tuple[int, ...]]:
        chats = [runtime.chat(system="Be brief.") for _ in range(3)]
        replies = []
        for turn, text in enumerate(asked):
            for seed, (chat, method) in enumerate(zip(chats, ("auto", "suffix", "none"), strict=True)):
                if forget:
                    runtime.clear_cache()
                    method = "none"
                reply = chat.ask(f"{text} ({seed})", method=method, seed=seed + turn, max_tokens=24)
                replies.append(reply.tokens)
        return replies

    with edgespec.load("demo", methods=["suffix"], prefix_cache="disk", threads=1, context=1024) as runtime:
        got = talk(runtime, forget=False)
        assert runtime.memory().prefix_cache.hits >= 6
    with edgespec.load("demo", "none", prefix_cache="none", threads=1, context=1024) as runtime:
        assert talk(runtime, forget=True) == got
        assert runtime.memory().prefix_cache.memory_limit_bytes == 0


@pytest.mark.usefixtures("always")
def test_a_continued_chat_is_not_prefilled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retokenizing a sampled reply does not always give the tokens that were sampled."""
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    load = partial(edgespec.load, "demo", "none", prefix_cache="disk", threads=1, context=1024)
    with load() as runtime:
        chat = runtime.chat(system="Be brief.")
        for seed, text in enumerate(["How do I list files by size?", "And by name?"]):
            reply = chat.ask(text, seed=seed, max_tokens=30, temperature=1.3)
        used = reply.stats.prompt_tokens + len(reply.tokens)
        messages = chat.messages
    with load() as runtime:
        reply = runtime.chat("Be brief.", messages).ask("Thanks", max_tokens=8, seed=1)
        assert reply.stats.cached_prompt_tokens >= used - 2
        assert reply.stats.prompt_tokens - reply.stats.cached_prompt_tokens < 16


@pytest.mark.long
@pytest.mark.usefixtures("always")
def test_replies_are_the_same_with_every_mlx_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core")
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    methods = ["layerskip", "lowbit", "model", "suffix", "auto", "none"]
    load = partial(edgespec.load, "demo-mlx", methods=["layerskip", "lowbit", "suffix"], exit_layer=4)
    said: list[tuple[list[int], dict[str, Any], tuple[int, ...]]] = []
    for run in range(2):
        with load("demo-mlx-draft", context=1024, prefix_cache="disk") as runtime:
            for turn in range(9):
                prompt = [*range(200, 260), *[300 + turn % 3] * 20, *range(400, 410 + turn + 9 * run)]
                options: dict[str, Any] = {"seed": turn, "max_tokens": 16, "temperature": 0.8 * (turn % 2)}
                method = methods[(turn + run) % len(methods)]
                said.append((prompt, options, ask(runtime, prompt, method=method, **options).tokens))
            assert runtime.memory().prefix_cache.hits >= 6
    with load("none", context=1024, prefix_cache="none") as runtime:
        for prompt, options, tokens in said:
            runtime.clear_cache()
            assert ask(runtime, prompt, method="none", **options).tokens == tokens
