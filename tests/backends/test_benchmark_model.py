"""Benchmark models have the weights that they report, and llama.cpp runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.model.base import LoadOptions
from edgespec.model.registry import format_of

GGUF = format_of("gguf")
assert GGUF.benchmark_models is not None
MODELS = GGUF.benchmark_models


@pytest.mark.parametrize("name", MODELS.types)
def test_every_type_is_written_and_run(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = MODELS.write(path, name, 0)
    assert GGUF.read_pass_weights is not None
    read = GGUF.read_pass_weights(path)
    assert read.layers == written.layers
    assert read.bytes_of[name] == pytest.approx(written.total_bytes, rel=0.3)
    bits = 8 * written.total_bytes / (written.layers * (4 * 256 * 256 + 3 * 256 * 256))
    assert bits == pytest.approx(MODELS.types[name])
    model = GGUF.load(str(path), "random", LoadOptions(context_tokens=256), None)
    try:
        model.prefill([5, 6, 7])
        assert model.length == 3
    finally:
        model.close()


def test_the_weights_of_a_pass_add_up_to_the_bytes_that_a_pass_reads() -> None:
    path = Path(__file__).parents[2] / "models" / "demo-target-q8_0.gguf"
    assert GGUF.read_pass_weights is not None
    weights = GGUF.read_pass_weights(path)
    assert weights.total_bytes == GGUF.read_info(path).pass_bytes
    assert weights.layers == 12
    assert weights.bytes_of["Q8_0"] > 0.99 * weights.total_bytes
