"""The models for the contract tests. Add a new backend as an entry of BACKENDS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends import llamacpp, mlx
from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.backends.llamacpp.model import load_slots
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.backends.llamacpp.weight_stream import LAYERS_IN_MEMORY, can_stream
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.backends.rewindable import StateModel, replayed_table
from tests.backends.tiny_models import (
    write_gemma2,
    write_gemma3,
    write_jamba,
    write_lfm2,
    write_llama,
    write_mamba,
)
from tests.tabular import TabularModel

CONTEXT = 512

# Called once for all tests with a folder for files and the path of the demo target. Returns a model with
# CONTEXT tokens.
Maker = Callable[[Path, Path], LanguageModel]


def _tabular(folder: Path, demo: Path) -> LanguageModel:
    table = np.random.default_rng(0).normal(size=(11**2, 11)).astype(np.float32)
    return TabularModel(table, context_tokens=CONTEXT)


def _llama_demo(folder: Path, demo: Path) -> LanguageModel:
    return llamacpp.load(str(demo), "demo", LoadOptions(context_tokens=CONTEXT, max_branches=8))


def _llama_streamed() -> Maker:
    """Return a maker of a model that streams more layers in every pass than are in memory at a time.

    Its quantised kernels are as exact as those of the demo model. Its weights fill whole pages of the file.
    """
    prepared: list[Path] = []

    def make(folder: Path, demo: Path) -> LanguageModel:
        if not prepared:
            whole = write_llama(folder / "whole.gguf", layers=LAYERS_IN_MEMORY + 3, feed_forward=256)
            quantise(whole, folder / "model.gguf", "Q8_0")
            prepared.append(folder / "model.gguf")
        options = LoadOptions(context_tokens=CONTEXT, max_branches=8, streamed_layers=100)
        return llamacpp.load(str(prepared[0]), "streamed", options)

    return make


def _replayed_table(folder: Path, demo: Path) -> LanguageModel:
    return replayed_table(StateModel(context_tokens=CONTEXT))


def _llama_made(name: str, write: Callable[[Path], Path]) -> Maker:
    def make(folder: Path, demo: Path) -> LanguageModel:
        path = write(folder / "model.gguf")
        return llamacpp.load(str(path), name, LoadOptions(context_tokens=CONTEXT, max_branches=8))

    return make


def _slot(name: str, write: Callable[[Path], Path]) -> Maker:
    """Return a maker of a model that shares its context with another reply, whose tokens are also cached."""

    def make(folder: Path, demo: Path) -> LanguageModel:
        options = LoadOptions(context_tokens=CONTEXT, max_branches=8, parallel=2)
        neighbour, model = load_slots(str(write(folder / "model.gguf")), name, options)
        neighbour.prefill(list(range(3, 80)))
        close = model.close

        def close_both() -> None:
            neighbour.close()
            close()

        model.close = close_both  # type: ignore[method-assign]
        return model

    return make


def _in_halves(name: str, write: Callable[[Path], Path], exit_layer: int) -> Maker:
    prepared: list[Path] = []

    def make(folder: Path, demo: Path) -> LanguageModel:
        if not prepared:
            path = demo if name == "demo" else write(folder / "model.gguf")
            prepared.append(prepare_layerskip(path, exit_layer, to=folder / "halves").folder)
        options = LoadOptions(context_tokens=CONTEXT, max_branches=8)
        return load_layerskip(str(prepared[0]), name, options)

    return make


def _mlx_made(kind: str) -> Maker:
    def make(folder: Path, demo: Path) -> LanguageModel:
        path = write_checkpoint(folder / kind, kind)
        return mlx.load(str(path), kind, LoadOptions(context_tokens=CONTEXT, max_branches=8))

    return make


BACKENDS: dict[str, Maker] = {
    "tabular": _tabular,
    "llama.cpp demo": _llama_demo,
    **({"llama.cpp streamed": _llama_streamed()} if can_stream() else {}),
    "tabular replay": _replayed_table,
    "llama.cpp tiny": _llama_made("tiny", write_llama),
    "llama.cpp slot": _slot("tiny", write_llama),
    "llama.cpp window slot": _slot("window", partial(write_gemma2, window=16)),
    # Narrower than the trees of the tests are deep.
    "llama.cpp window": _llama_made("window", partial(write_gemma2, window=4)),
    "llama.cpp mamba": _llama_made("mamba", write_mamba),
    "llama.cpp hybrid": _llama_made("hybrid", write_jamba),
    "llama.cpp short convolution": _llama_made("short convolution", write_lfm2),
    "llama.cpp demo in halves": _in_halves("demo", write_llama, 4),
    "llama.cpp tiny in halves": _in_halves("three layers", partial(write_llama, layers=3), 1),
    "llama.cpp window in halves": _in_halves("window in halves", partial(write_gemma3, window=4), 6),
    "MLX": _mlx_made("llama"),
    "MLX window": _mlx_made("gemma3"),
    "MLX hybrid": _mlx_made("qwen3_next"),
}


# The tiny models run the same code as the whole and the split demo model.
_LONG = ("llama.cpp demo", "llama.cpp demo in halves")
_PARAMS = [
    pytest.param(make, id=name, marks=pytest.mark.long if name in _LONG else ())
    for name, make in BACKENDS.items()
]


@pytest.fixture(scope="module", params=_PARAMS)
def shared_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_target: Path
) -> Iterator[LanguageModel]:
    maker: Maker = request.param
    model = maker(tmp_path_factory.mktemp("models"), demo_target)
    yield model
    model.close()


@pytest.fixture
def model(shared_model: LanguageModel) -> LanguageModel:
    """Return a model with an empty cache, shared by the tests of a file."""
    shared_model.interrupt(False)
    shared_model.truncate(0)
    return shared_model


@pytest.fixture(params=_PARAMS)
def own_model(request: pytest.FixtureRequest, tmp_path: Path, demo_target: Path) -> Iterator[LanguageModel]:
    """Return a model for one test, which may close it."""
    maker: Maker = request.param
    model = maker(tmp_path, demo_target)
    yield model
    model.close()
