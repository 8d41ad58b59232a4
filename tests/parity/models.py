"""The tiny models that stand for a kind of memory, what they are asked, and their replies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest

from edgespec import Reply, Runtime
from edgespec.backends import llamacpp, mlx
from edgespec.backends.base import LanguageModel, LoadOptions
from edgespec.methods import Drafters
from tests.backends import tiny_models

mx = pytest.importorskip("mlx.core")
tiny_checkpoints = pytest.importorskip("tests.backends.mlx.tiny_checkpoints")

CONTEXT = 128
MAX_TOKENS = 16


class Column(NamedTuple):
    """A backend, and how a model remembers."""

    backend: str
    memory: str


# Which tiny models stand for a kind of memory; what is said of the kind is true of all of them.
KINDS: dict[Column, tuple[str, ...]] = {
    Column("llama.cpp", "full"): ("llama",),
    Column("llama.cpp", "window"): ("gemma2",),
    Column("llama.cpp", "recurrent"): ("jamba", "lfm2", "mamba"),
    Column("MLX", "full"): ("llama",),
    Column("MLX", "window"): ("gemma3", "llama_sliding"),
    Column("MLX", "recurrent"): ("lfm2", "mamba2", "qwen3_next"),
    Column("MLX", "chunked"): ("llama4",),
}
COLUMNS = list(KINDS)
BACKENDS = ("llama.cpp", "MLX")


def tensors_of(path: Path) -> dict[str, Any]:
    """The arrays of a GGUF file, to be written into."""
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path, "r+").tensors}


def write_tiny(backend: str, name: str, folder: Path) -> Path:
    """A tiny model in the form of a backend."""
    if backend == "MLX":
        return Path(tiny_checkpoints.write_checkpoint(folder / "target", name))
    write: Callable[[Path], Path] = getattr(tiny_models, f"write_{name}")
    return write(folder / "target.gguf")


def write_like(path: Path, copy: Path) -> Path:
    """A GGUF file or MLX folder whose head is a little off: a draft that is often right and often wrong."""
    random = np.random.default_rng(1)
    if path.is_file():
        shutil.copy(path, copy)
        tensors = tensors_of(copy)
        head = tensors["output.weight" if "output.weight" in tensors else "token_embd.weight"]
        head *= 1 + 0.3 * random.normal(size=head.shape)
        return copy
    shutil.copytree(path, copy)
    weights = mx.load(str(path / "model.safetensors"))
    for name, array in weights.items():
        if array.shape[0] == tiny_checkpoints.ROWS:
            noise = 1 + 0.3 * random.normal(size=array.shape).astype(np.float32)
            weights[name] = array * mx.array(noise)
    mx.save_safetensors(str(copy / "model.safetensors"), weights, {"format": "mlx"})
    return copy


class Ask(NamedTuple):
    """What a reply is asked for. `few`: only two tokens may be said, so that they come again soon."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int = 1
    few: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        bias = {"logit_bias": dict.fromkeys((70, 80), 60.0)} if self.few else {}
        return {"temperature": self.temperature, "seed": self.seed} | bias


# The first repeats itself; all are longer than a window.
_SOME = np.random.default_rng(0).integers(65, 200, 60).tolist()
PROMPTS = (tuple(_SOME[:9] * 4), tuple(_SOME[9:40]), tuple(_SOME[15:60]))
ASKED = (
    Ask(PROMPTS[0], 0.0),
    Ask(PROMPTS[1], 0.0),
    Ask(PROMPTS[1], 0.8, 2),
    Ask(PROMPTS[2], 0.8, 3),
    Ask(PROMPTS[2], 0.0, few=True),
    Ask(PROMPTS[0], 0.8, few=True),
)


class Tiny:
    """A tiny model and its draft of the same kind, each loaded when it is first needed."""

    def __init__(self, folder: Path, backend: str, name: str) -> None:
        self._backend = backend
        self._name = name
        self._folder = folder / f"{backend}-{name}"
        self._folder.mkdir()
        self._made: list[LanguageModel] = []
        self._plain: dict[Ask, tuple[int, ...]] = {}

    @cached_property
    def path(self) -> Path:
        return write_tiny(self._backend, self._name, self._folder)

    @cached_property
    def target(self) -> LanguageModel:
        return self._load(self.path)

    @cached_property
    def draft(self) -> LanguageModel:
        return self._load(write_like(self.path, self.path.with_stem("draft")))

    def plain(self, ask: Ask) -> tuple[int, ...]:
        """The tokens of plain decoding."""
        if ask not in self._plain:
            runtime = Runtime(self.target, None, Drafters(self.target, None))
            self._plain[ask] = reply_to(runtime, ask, "none").tokens
        return self._plain[ask]

    def _load(self, path: Path) -> LanguageModel:
        load = mlx.load if self._backend == "MLX" else llamacpp.load
        model = load(str(path), self._name, LoadOptions(context_tokens=CONTEXT))
        self._made.append(model)
        return model

    def close(self) -> None:
        for model in self._made:
            model.close()


class Zoo:
    """All tiny models, each made once, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tiny: dict[tuple[str, str], Tiny] = {}

    def tiny(self, backend: str, name: str) -> Tiny:
        if (backend, name) not in self._tiny:
            self._tiny[backend, name] = Tiny(self.folder, backend, name)
        return self._tiny[backend, name]

    def of(self, column: Column) -> list[Tiny]:
        """Those that stand for a kind of memory."""
        return [self.tiny(column.backend, name) for name in KINDS[column]]

    def close(self) -> None:
        for tiny in self._tiny.values():
            tiny.close()


def reply_to(runtime: Runtime, ask: Ask, method: str, **options: Any) -> Reply:
    """The reply by a method, which must have been the one that ran."""
    stream = runtime.stream_tokens(
        ask.prompt, method=method, max_tokens=MAX_TOKENS, **ask.sampling, **options
    )
    for _ in stream:
        pass
    assert stream.reply.method.effective == method
    return stream.reply
