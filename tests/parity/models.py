"""Tiny models that represent each kind of memory, their requests, and their replies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pytest

from edgespec import Reply, Runtime
from edgespec.backends import llamacpp, mlx
from edgespec.decode.drafter_set import DrafterSet
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends import tiny_models, tiny_mtp_models
from tests.parity.weights import keep_to_letters, quieten, write_near, write_renamed

mx = pytest.importorskip("mlx.core")
mtp_layers = pytest.importorskip("tests.backends.mlx.mtp_layers")
tiny_checkpoints = pytest.importorskip("tests.backends.mlx.tiny_checkpoints")

# Larger than the room a draft with a window takes.
CONTEXT = 256
MAX_TOKENS = 12


class Column(NamedTuple):
    """A backend, and how a model remembers."""

    backend: str
    memory: str


# The tiny models that represent each kind of memory. Results must be the same for all models of a kind.
KINDS: dict[Column, tuple[str, ...]] = {
    Column("llama.cpp", "full"): ("llama",),
    Column("llama.cpp", "window"): ("gemma2",),
    Column("llama.cpp", "recurrent"): ("jamba", "lfm2", "mamba"),
    Column("MLX", "full"): ("llama",),
    Column("MLX", "window"): ("llama_sliding", "gemma3"),
    Column("MLX", "recurrent"): ("lfm2", "mamba2", "qwen3_next"),
    Column("MLX", "chunked"): ("llama4",),
}
COLUMNS = list(KINDS)
# Additional models that can be split into halves, for kinds whose other models cannot.
IN_HALVES: dict[Column, tuple[str, ...]] = {Column("llama.cpp", "window"): ("gemma3",)}
# Models with multi-token prediction layers, which the others do not have.
WITH_MTP: dict[Column, tuple[str, ...]] = {
    Column("llama.cpp", "full"): ("glm4moe", "deepseek2", "hy_v3"),
    Column("llama.cpp", "window"): ("step35", "mimo2", "cohere2moe"),
    Column("llama.cpp", "recurrent"): ("qwen35", "qwen35moe", "qwen3next", "bailingmoe3", "deepseek4"),
    Column("MLX", "recurrent"): ("qwen3_next",),
}
BACKENDS = ("llama.cpp", "MLX")


# With `quiet`, the middle layers add little, so that some can be skipped. With `letters`, all tokens are
# text.
Voice: TypeAlias = Literal["plain", "quiet", "letters"]
# Layer counts for models whose usual tiny version has too few layers to skip some.
_LAYERS = {"llama": 3, "mamba": 2}


def write_tiny(backend: str, name: str, folder: Path, voice: Voice = "plain") -> Path:
    """A tiny model in the form of a backend."""
    layers = _LAYERS.get(name) if voice == "quiet" else None
    if backend == "MLX":
        more = {"num_hidden_layers": layers} if layers else {}
        path = Path(tiny_checkpoints.write_checkpoint(folder / "target", name, config=more))
        if name == "qwen3_next":
            mtp_layers.write_mtp_layer(path)
    elif name in tiny_mtp_models.SHAPES:
        path = tiny_mtp_models.write_mtp_model(folder / "target.gguf", name)
    else:
        write: Callable[..., Path] = getattr(tiny_models, f"write_{name}")
        path = write(folder / "target.gguf", **({"layers": layers} if layers else {}))
    if voice == "quiet":
        quieten(path)
    if voice == "letters":
        keep_to_letters(path)
    return path


class Ask(NamedTuple):
    """A request for a reply.

    Attributes:
        few: Whether only two tokens are allowed, so that they soon repeat.
        regex: A regular expression that the reply must match.
    """

    prompt: tuple[int, ...]
    temperature: float
    seed: int = 1
    few: bool = False
    regex: str | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        bias = {"logit_bias": dict.fromkeys((70, 80), 60.0)} if self.few else {}
        return {"temperature": self.temperature, "seed": self.seed} | bias

    @property
    def options(self) -> dict[str, Any]:
        return self.sampling | ({"regex": self.regex} if self.regex else {})


# The first repeats itself; all are longer than a window.
_SOME = np.random.default_rng(0).integers(65, 200, 60).tolist()
PROMPTS = (tuple(_SOME[:9] * 4), tuple(_SOME[9:40]), tuple(_SOME[15:60]))
ASKED = (
    Ask(PROMPTS[0], 0.0),
    Ask(PROMPTS[1], 0.8, 2),
    Ask(PROMPTS[2], 0.0, few=True),
    # The temperature is high enough to alternate between the two tokens, so that lookups are sometimes wrong.
    Ask(PROMPTS[1], 5.0, few=True),
    Ask(PROMPTS[0], 0.8, few=True),
)
# Both determine most of the tokens, but not all.
CONSTRAINED = tuple(
    Ask(PROMPTS[1], temperature, 3, regex="(abc[def]ghi[jkl]mno[a-z]){9}") for temperature in (0.0, 0.8)
)
# The requests of every test run. The long tests use all of the above.
FEW = (ASKED[0], CONSTRAINED[1], ASKED[3])


class Tiny:
    """A tiny model and its draft models, each of which is written and loaded on first use."""

    def __init__(self, folder: Path, backend: str, name: str, voice: Voice = "plain") -> None:
        self.backend = backend
        self.name = name
        self._voice = voice
        self._folder = folder / f"{backend}-{name}-{voice}"
        self._folder.mkdir()
        self._plain: dict[Ask, tuple[int, ...]] = {}

    @cached_property
    def path(self) -> Path:
        return write_tiny(self.backend, self.name, self._folder, self._voice)

    @cached_property
    def near(self) -> Path:
        """A draft that is often right and often wrong."""
        path = self.path
        if self.name == "llama4":  # no draft: it cannot go back
            path = write_tiny(self.backend, "llama", self._folder / "other")
        return write_near(path, self._folder / f"near{path.suffix}")

    @cached_property
    def renamed(self) -> Path:
        """The same draft, with other ids for its tokens."""
        return write_renamed(self.near, self._folder / f"renamed{self.near.suffix}")

    @cached_property
    def target(self) -> LanguageModel:
        load = mlx.load if self.backend == "MLX" else llamacpp.load
        return load(str(self.path), self.name, LoadOptions(context_tokens=CONTEXT))

    def plain(self, ask: Ask) -> tuple[int, ...]:
        """The tokens of plain decoding."""
        if ask not in self._plain:
            runtime = Runtime(self.target, None, DrafterSet(self.target))
            self._plain[ask] = reply_to(runtime, ask, "none").tokens
        return self._plain[ask]

    def close(self) -> None:
        if "target" in vars(self):
            self.target.close()


class Zoo:
    """All tiny models, each made once, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tiny: dict[tuple[str, str, str], Tiny] = {}

    def tiny(self, backend: str, name: str, voice: Voice = "plain") -> Tiny:
        key = (backend, name, voice)
        if key not in self._tiny:
            self._tiny[key] = Tiny(self.folder, backend, name, voice)
        return self._tiny[key]

    def of(self, column: Column) -> list[Tiny]:
        """Those that stand for a kind of memory."""
        return [self.tiny(column.backend, name) for name in KINDS[column]]

    def close(self) -> None:
        for tiny in self._tiny.values():
            tiny.close()


def reply_to(runtime: Runtime, ask: Ask, method: str, *, effective: str = "", **options: Any) -> Reply:
    """Return the reply by a method, checking that this method or `effective` was the one that ran."""
    stream = runtime.stream_tokens(ask.prompt, method=method, max_tokens=MAX_TOKENS, **ask.options, **options)
    for _ in stream:
        pass
    assert stream.reply.method.effective == (effective or method)
    return stream.reply
