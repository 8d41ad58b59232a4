"""Replies of real models equal plain decoding by default, in every quantisation and with every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.api.loading import always_draft
from edgespec.loading.prepare.lowbit import prepare_lowbit

pytestmark = pytest.mark.real

_PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that reverses a linked list.",
    "Copy this exactly, twice: Pack my box with five dozen liquor jugs.",
    "Wie funktioniert ein Fahrrad?",
)
# Files in the folder of real models, with the widths that must at least agree, and the methods to compare.
_TEXT = ("suffix", "ngram", "lookahead", "auto")
_CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "smollm2-q4_1.gguf": ("smollm2-q4_0.gguf", (*_TEXT, "model")),
    "smollm2-q8_0.gguf": ("smollm2-q4_0.gguf", (*_TEXT, "model")),
    "smollm2-q4_0.gguf": ("none", _TEXT),
    "smollm2-q4_k_m.gguf": ("smollm2-q4_0.gguf", (*_TEXT, "model", "model+suffix")),
    "gemma3-270m-q4_k_m.gguf": ("none", _TEXT),
    "smollm2-hf": ("smollm2-mlx-4bit", ("suffix", "lookahead", "auto", "model")),
    "smollm2-mlx-8bit": ("none", ("suffix", "lookahead", "auto", "lowbit", "layerskip")),
    "smollm2-mlx-4bit": ("none", ("suffix", "lookahead", "auto", "lowbit", "layerskip")),
}
# MLX generates a few tokens per second on CPUs, so its replies are short, and each method replies to only one
# of the prompts. There is a prompt for each temperature.
_MLX_TOKENS, _MLX_PROMPTS = 8, 3


@pytest.mark.parametrize("branches", [(), "auto"])
@pytest.mark.parametrize("name", _CASES)
def test_replies_equal_plain_decoding_by_default(real_models: Path, name: str, branches: Any) -> None:
    draft, methods = _CASES[name]
    is_mlx = not name.endswith(".gguf")
    tokens = _MLX_TOKENS if is_mlx else 48
    options: dict[str, Any] = {"context": 1024, "threads": None if is_mlx else 1}
    found = draft if draft == "none" else str(real_models / draft)
    if branches:
        methods = tuple(method for method in methods if method in ("model", "lookahead", "lowbit")) or (
            "suffix",
        )
    if "layerskip" in methods:
        options["exit_layer"] = 6
    with (
        always_draft(),
        edgespec.load(
            str(real_models / name), found, methods=methods, draft_branches=branches, **options
        ) as runtime,
    ):
        assert runtime.target.exactness is not None
        assert runtime.target.exactness.bits
        drafted = 0
        for seed, prompt in enumerate(_PROMPTS[: _MLX_PROMPTS if is_mlx else None]):
            how: dict[str, Any] = {
                "max_tokens": tokens,
                "seed": seed,
                "temperature": (0.0, 0.8, 1.2)[seed % 3],
            }
            replying = methods[seed::_MLX_PROMPTS] if is_mlx else methods
            if not replying:
                continue
            plain = runtime.generate(prompt, method="none", **how)
            for method in replying:
                reply = runtime.generate(prompt, method=method, **how)
                assert reply.tokens == plain.tokens, (method, prompt)
                drafted += reply.stats.drafted_tokens
        assert drafted


def test_f16_says_that_it_can_differ_or_keeps_its_tokens(real_models: Path) -> None:
    with edgespec.load(str(real_models / "smollm2-f16.gguf"), "none", context=1024, threads=1) as runtime:
        found = runtime.target.exactness
        assert found is not None
        assert found.bits or found.reason in runtime.target.notice
    with (
        always_draft(),
        edgespec.load(
            str(real_models / "smollm2-f16.gguf"), "none", context=1024, threads=1, exactness="bits"
        ) as runtime,
    ):
        assert runtime.target.capabilities.exact
        for seed, prompt in enumerate(_PROMPTS):
            how: dict[str, Any] = {"max_tokens": 48, "seed": seed, "temperature": 0.8}
            plain = runtime.generate(prompt, method="none", **how)
            reply = runtime.generate(prompt, method="suffix", **how)
            assert reply.tokens == plain.tokens


@pytest.mark.parametrize("branches", [(), (3, 2)])
def test_a_copy_with_fewer_bits(real_models: Path, branches: tuple[int, ...]) -> None:
    """SmolLM2 in Q4_1, with which other tests run, has too few bits per weight for a copy."""
    path = real_models / "smollm2-q8_0.gguf"
    prepare_lowbit(path)
    options: dict[str, Any] = {"context": 1024, "threads": 1, "methods": ("lowbit",)}
    with always_draft(), edgespec.load(str(path), "none", draft_branches=branches, **options) as runtime:
        assert runtime.target.exactness is not None
        assert runtime.target.exactness.bits
        for seed, prompt in enumerate(_PROMPTS):
            how: dict[str, Any] = {"max_tokens": 48, "seed": seed, "temperature": (0.0, 0.8, 1.2)[seed % 3]}
            plain = runtime.generate(prompt, method="none", **how)
            reply = runtime.generate(prompt, method="lowbit", **how)
            assert reply.tokens == plain.tokens, prompt
            assert reply.stats.accepted_tokens
