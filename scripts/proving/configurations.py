"""The models and methods that are compared with plain decoding."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REAL_MODELS = Path(__file__).resolve().parents[2] / "build" / "real-models"
# Methods by the source of their drafts.
GROUPS = {
    "draft model": ("model", "model+suffix", "model+suffix+ngram"),
    "text or grammar": ("suffix", "ngram", "lookahead", "grammar"),
    "the model itself": (
        "layerskip",
        "layerskip+suffix",
        "layerskip+model",
        "lowbit",
        "lowbit+suffix",
    ),
    "auto": ("auto",),
}
_TEXT = ("suffix", "ngram", "lookahead")
_WITH_DRAFT = (*GROUPS["draft model"], *_TEXT, "grammar", "auto")
_SPLIT = ("layerskip", "layerskip+suffix", "layerskip+model")
_MLX = ("model", "model+suffix", *_TEXT, "layerskip", "lowbit", "auto")
# An MLX model generates a few tokens per second on a CPU.
_MLX_INTERVAL, _MLX_MAX_PROMPT_TOKENS = 12, 100


@dataclass(frozen=True)
class Configuration:
    """A pair of models, with the methods that are compared with plain decoding.

    Attributes:
        backend: The backend of the target.
        model: Name of the target in the table.
        target: Reference to the target.
        draft: Reference to the draft model.
        methods: The methods. Two configurations of the same model must not share one.
        exit_layer: Number of layers that `layerskip` drafts with, unless the file is split.
        prepare: Arguments for `edgespec prepare` before the target, and after it.
        interval: The configuration runs in every `interval`-th round, because some models are slow.
        prompts: Number of prompts in a block.
        methods_per_block: Number of methods in a block. The next block has others.
        max_prompt_tokens: Maximum length of a prompt.
        has_trees: Whether drafts can be trees. Draft models with another vocabulary draft only chains.
    """

    backend: str
    model: str
    target: str
    draft: str
    methods: tuple[str, ...]
    exit_layer: int | None = None
    prepare: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    interval: int = 1
    prompts: int = 6
    methods_per_block: int = 4
    max_prompt_tokens: int = 3000
    has_trees: bool = True

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.model}, {self.methods[0]}"

    def block_methods(self, block: int, chosen: Sequence[str] = ()) -> list[str]:
        """Return the methods of a block. In the course of time, each gets all temperatures and shapes.

        Args:
            block: The block's number.
            chosen: Use only these methods, unless empty.
        """
        methods = [method for method in self.methods if not chosen or method in chosen]
        count = len(methods)
        first = (self.methods_per_block - 1) * block + block // max(count, 1)
        return [methods[(first + i) % count] for i in range(min(self.methods_per_block, count))]

    @property
    def load_options(self) -> dict[str, Any]:
        """Options for `edgespec.load`, apart from the methods and the draft's shape."""
        return {} if self.exit_layer is None else {"exit_layer": self.exit_layer}

    @property
    def has_threads(self) -> bool:
        """Whether the number of threads can be set. MLX chooses it itself."""
        return self.backend != "MLX" or self.draft.endswith(".gguf")

    def run_prepare(self, report: Callable[[str], None]) -> None:
        """Create the files that the methods need, unless they exist."""
        before, after = self.prepare
        if before:
            report(f"preparing {before[0]} for {self.model}")
            command = [sys.executable, "-m", "edgespec", "prepare", *before, self.target, *after]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _smollm2(kind: str) -> str:
    return str(REAL_MODELS / f"smollm2-{kind}")


def _gguf(
    model: str, target: str, draft: str, exit_layer: int, *lowbit: str, same_vocabulary: bool = True
) -> tuple[Configuration, ...]:
    """Return the configurations of a GGUF model: the whole model, the split model, and its low-bit copy."""
    whole = Configuration("llama.cpp", model, target, draft, _WITH_DRAFT, has_trees=same_vocabulary)
    split_draft, split_methods = (draft, _SPLIT) if same_vocabulary else ("none", _SPLIT[:2])
    split = Configuration(
        *("llama.cpp", model, target, split_draft, split_methods),
        prepare=(("layerskip",), ("--exit", str(exit_layer))),
        interval=2,
        prompts=3,
    )
    copy = Configuration(
        *("llama.cpp", model, target, "none", lowbit), prepare=(("lowbit",), ()), interval=2, prompts=3
    )
    return (whole, split, copy) if lowbit else (whole, split)


def _mlx(model: str, target: str, draft: str, exit_layer: int) -> Configuration:
    return Configuration(
        *("MLX", model, target, draft, _MLX, exit_layer),
        interval=_MLX_INTERVAL,
        prompts=1,
        methods_per_block=2,
        max_prompt_tokens=_MLX_MAX_PROMPT_TOKENS,
    )


_LOWBIT = ("lowbit", "lowbit+suffix")
# `prepare lowbit` refuses to copy models with few bits per weight, and Gemma, most of which is its embedding.
_GGUF = (
    _gguf("SmolLM2 Q4_K_M", _smollm2("q4_k_m.gguf"), _smollm2("q4_0.gguf"), 8),
    _gguf("SmolLM2 Q8_0", _smollm2("q8_0.gguf"), _smollm2("q4_0.gguf"), 8, *_LOWBIT),
    _gguf("SmolLM2 Q4_0", _smollm2("q4_0.gguf"), _smollm2("q4_1.gguf"), 8),
    _gguf("SmolLM2 Q4_1", _smollm2("q4_1.gguf"), _smollm2("q4_0.gguf"), 8),
    _gguf("SmolLM2 F16", _smollm2("f16.gguf"), _smollm2("q4_0.gguf"), 8, *_LOWBIT),
    _gguf(
        *("Gemma 3 270M Q4_K_M", str(REAL_MODELS / "gemma3-270m-q4_k_m.gguf"), _smollm2("q4_0.gguf"), 6),
        same_vocabulary=False,
    ),
    _gguf("demo model Q8_0", "demo", "demo-draft", 4, *_LOWBIT),
)
CONFIGURATIONS = (
    # The whole models come first, so that a run of a few minutes compares all of them.
    *sorted((each for pair in _GGUF for each in pair), key=lambda each: each.interval),
    _mlx("demo model", "demo-mlx", "demo-mlx-draft", 4),
    _mlx("SmolLM2 4 bits", _smollm2("mlx-4bit"), _smollm2("q4_0.gguf"), 8),
    _mlx("SmolLM2 8 bits", _smollm2("mlx-8bit"), _smollm2("mlx-4bit"), 8),
    _mlx("SmolLM2 16 bits", _smollm2("hf"), _smollm2("mlx-4bit"), 8),
)
