"""Models of every kind of memory for tests of `resize`, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from edgespec.backends import llamacpp, mlx
from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.model.base import LanguageModel, LoadOptions
from edgespec.store.catalogue import models_folder
from tests.backends.contract import ROUNDING, step
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

SMALL, LARGE = 256, 1024

# Loads a model whose files are in a folder.
Maker = Callable[[Path, LoadOptions], LanguageModel]


def _demo(_: Path) -> Path:
    return models_folder() / "demo-target-q8_0.gguf"


def _gguf(write: Callable[[Path], Path], folder: Path, how: LoadOptions) -> LanguageModel:
    return llamacpp.load(str(write(folder / "model.gguf")), "model", how)


def _split(write: Callable[[Path], Path], exit_layer: int, folder: Path, how: LoadOptions) -> LanguageModel:
    to = folder / "split"
    if not to.exists():
        prepare_layerskip(write(folder / "model.gguf"), exit_layer, to=to)
    return load_layerskip(str(to), "model", how)


def _mlx(kind: str, folder: Path, how: LoadOptions) -> LanguageModel:
    path = folder / kind
    return mlx.load(str(path if path.exists() else write_checkpoint(path, kind)), "model", how)


def _tabular(_: Path, how: LoadOptions) -> LanguageModel:
    table = np.random.default_rng(0).normal(size=(11**2, 11)).astype(np.float32)
    return TabularModel(table, context_tokens=how.initial_context_tokens or how.context_tokens or 0)


def _replayed(_: Path, how: LoadOptions) -> LanguageModel:
    return replayed_table(StateModel(context_tokens=how.initial_context_tokens or how.context_tokens or 0))


class Kind(NamedTuple):
    """A kind of model. `rounding` is the maximum logit difference between passes of different widths."""

    make: Maker
    options: Mapping[str, Any] = MappingProxyType({})
    rounding: float = 0.0


KINDS = {
    "full": Kind(partial(_gguf, write_llama)),
    "window": Kind(partial(_gguf, partial(write_gemma2, window=4))),
    "quantised": Kind(partial(_gguf, _demo), {"kv_type": "q8_0"}),
    "keys unlike values": Kind(partial(_gguf, _demo), {"kv_type": "q4_0/f16"}),
    "no flash attention": Kind(partial(_gguf, write_llama), {"flash_attention": "off", "kv_type": "f16"}),
    "mamba": Kind(partial(_gguf, write_mamba), {}, ROUNDING["mamba"]),
    "hybrid": Kind(partial(_gguf, write_jamba), {}, ROUNDING["hybrid"]),
    "short convolution": Kind(partial(_gguf, write_lfm2), {}, ROUNDING["short convolution"]),
    "split": Kind(partial(_split, partial(write_llama, layers=3), 1)),
    "split, window": Kind(partial(_split, partial(write_gemma3, window=4), 6)),
    "split, quantised": Kind(partial(_split, _demo, 4), {"kv_type": "q8_0/q4_0"}),
    "MLX": Kind(partial(_mlx, "llama")),
    "MLX, window": Kind(partial(_mlx, "gemma3")),
    "MLX, hybrid": Kind(partial(_mlx, "qwen3_next"), {}, 1e-3),
    "tabular": Kind(_tabular),
    "tabular replay": Kind(_replayed),
}
_QUICK = (
    "full", "quantised", "hybrid", "short convolution", "split, window", "MLX, window", "tabular replay",
)  # fmt: skip
ALL = [pytest.param(name, marks=[] if name in _QUICK else pytest.mark.long) for name in KINDS]
LLAMA = [name for name in ALL if not str(name.values[0]).startswith(("MLX", "tabular"))]


class Twins(NamedTuple):
    """Two copies of a model: `model` is resized, and `whole` has the full context from the start."""

    model: LanguageModel
    whole: LanguageModel
    rounding: float


def load(name: str, folder: Path, **options: Any) -> LanguageModel:
    # Use the same batch size for all context sizes, so that rounding is the same.
    how = LoadOptions(context_tokens=LARGE, batch_tokens=128, **KINDS[name].options)
    return KINDS[name].make(folder, replace(how, **options))


def check_step(twins: Twins, token: int = 4) -> None:
    """Append a token to both models and assert that their logits are equal."""
    got, expected = (step(model, token) for model in twins[:2])
    np.testing.assert_allclose(got, expected, rtol=0, atol=twins.rounding)
