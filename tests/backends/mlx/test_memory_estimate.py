"""The estimate for an MLX model from its metadata matches its actual memory use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from edgespec.backends import mlx as backend
from edgespec.backends.mlx.memory_estimate import MlxMemoryEstimator
from edgespec.errors import OptionError
from edgespec.model.base import LoadOptions
from edgespec.model.memory_estimate import MemoryEstimate
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.cases import first
from tests.raising import raises

_LONG = {"max_position_embeddings": 8192, "num_attention_heads": 16}
_KINDS = ("llama_sliding", "deepseek_v3", "mamba2", "gpt_oss", "jamba")


def _told(path: Path, options: LoadOptions) -> MemoryEstimate:
    planned = MlxMemoryEstimator(str(path), "model", options)
    try:
        return planned.estimate(options)
    finally:
        planned.close()


def _check(path: Path, **how: object) -> None:
    options = LoadOptions(**how)  # type: ignore[arg-type]
    planned = _told(path, options)
    model = backend.load(str(path), path.name, options)
    facts = model.facts
    model.close()
    assert planned.context_tokens == facts.context_tokens
    assert planned.bytes_of("weights") == pytest.approx(facts.weight_bytes, rel=0.01)
    assert planned.bytes_of("cache") == pytest.approx(facts.max_kv_bytes, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("kind", first(_KINDS, 3))
def test_every_kind_of_cache(kind: str, tmp_path: Path) -> None:
    _check(write_checkpoint(tmp_path / kind, kind), context_tokens=3000)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kv_type", "memory_bytes"),
    [("auto", 1 << 40), ("auto", 3_000_000), ("q8_0", 1 << 40), ("q4_0", 3_000_000)],
)
def test_kv_types_and_16_bit_weights(kv_type: str, memory_bytes: int, tmp_path: Path) -> None:
    """With little memory halves stay halves."""
    heads = {"head_dim": 32, "hidden_size": 64}
    path = write_checkpoint(tmp_path / "llama", "llama", dtype="bfloat16", config=heads)
    _check(path, context_tokens=4096, kv_type=kv_type, memory_bytes=memory_bytes)


# Fills a context with the given number of tokens, and prints the increase in peak memory (VmHWM).
_TOUCHES = """
import gc, sys
from pathlib import Path
from edgespec.backends import mlx
from edgespec.model.base import LoadOptions
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.system.heap import release_free_memory

def held(name):
    gc.collect()
    release_free_memory()
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index(name + ":") + 1])

def run(path, tokens):
    model = mlx.load(path, "model", LoadOptions(context_tokens=tokens))
    loaded = held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    width = model.facts.capabilities.max_width
    model.prefill([5 + i % 200 for i in range(tokens - width)])
    model.verify(TokenTree.chain(5, range(6, 5 + width))).best(0, 1)
    taken = held("VmHWM") - loaded
    model.close()
    return taken

run(sys.argv[1], 256)
print(run(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.long
@pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device() != mx.cpu, reason="measured on a processor by Linux"
)
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"head_dim": 64, "vocab_size": 16_000, "intermediate_size": 8_000}),
        pytest.param(
            "llama",
            {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 4},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "jamba",
            {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "mamba2",
            {"hidden_size": 512, "num_hidden_layers": 3, "num_heads": 64, "head_dim": 16},
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.parametrize("tokens", [1024, pytest.param(2048, marks=pytest.mark.long)])
def test_estimate_is_near_the_touched_memory(
    kind: str, config: dict[str, int], tokens: int, tmp_path: Path
) -> None:
    """The compute buffers hold scores, logits, the largest layer's cache, or a recurrent layer."""
    path = write_checkpoint(tmp_path / kind, kind, dtype="float16", config={**_LONG, **config})
    told = _told(path, LoadOptions(context_tokens=tokens))
    done = subprocess.run(
        [sys.executable, "-c", _TOUCHES, str(path), str(tokens)], capture_output=True, text=True, check=True
    )
    assert told.bytes_of("compute") > 7 << 20
    assert -(4 << 20) < told.bytes_of("cache", "compute") - int(done.stdout) < 20 << 20


def test_what_does_not_run_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "llama", "llama")
    tiny = MlxMemoryEstimator(str(path), "tiny", LoadOptions())
    with raises(
        OptionError, "'q8_0'", code="option_not_supported", option="kv_type"
    ):  # its heads are too small
        tiny.estimate(LoadOptions(kv_type="q8_0"))
    with raises(OptionError, "auto", code="option_not_supported", option="kv_type"):
        tiny.estimate(LoadOptions(kv_type="q5_0"))


@pytest.mark.parametrize("said", [-5, 0, 10**30])
def test_a_context_that_cannot_be_is_not_believed(said: int, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = said
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert _told(folder, LoadOptions()).context_tokens == 8192
