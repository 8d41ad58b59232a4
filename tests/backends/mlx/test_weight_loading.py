"""Loading weights: every architecture loads, within the memory limit, and with adapters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from edgespec.backends.mlx import model_skeleton
from edgespec.backends.mlx.weight_loading import LoadedMlxModel, load_model
from edgespec.errors import CancelledError, MemoryBudgetError, ModelFileError
from edgespec.model.base import LoadOptions
from edgespec.model.model_facts import Adapter
from tests.backends.mlx.conftest import in_thread
from tests.backends.mlx.tiny_checkpoints import KINDS, ROWS, configuration, write_adapter, write_checkpoint
from tests.raising import raises

PROMPT = list(range(65, 90))
QUANTISATIONS: dict[str, Any] = {
    "8-bit affine, group 32": ("affine", 8, 32),
    "4-bit affine, group 64": ("affine", 4, 64),
    "3-bit affine, group 32": ("affine", 3, 32),
    "mxfp4": ("mxfp4",),
    "mxfp8": ("mxfp8",),
    "nvfp4": ("nvfp4",),
}


def _open(path: Path, progress: Any = None, **options: Any) -> LoadedMlxModel:
    return load_model(str(path), "tiny", LoadOptions(**options), progress)


def _logits(model: Any, tokens: list[int] = PROMPT) -> Any:
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_loads_in_one_thread_and_runs_in_another(kind: str, tmp_path: Path) -> None:
    """The planned size of the caches is that of their arrays."""
    checkpoint = _open(write_checkpoint(tmp_path, kind))
    assert checkpoint.skeleton.config["model_type"] == configuration(kind)["model_type"]
    assert checkpoint.skeleton.sizes.trained_context_tokens == 512
    assert checkpoint.skeleton.quantisation == "float32"
    assert checkpoint.skeleton.vocab_size == ROWS

    def write() -> list[int]:
        steps = generate_step(mx.array(PROMPT), checkpoint.skeleton.model, max_tokens=24)
        return [int(token) for token, _ in steps]

    written = in_thread(write)
    assert len(set(written)) > 8
    logits = in_thread(lambda: _logits(checkpoint.skeleton.model))
    assert logits.shape == (len(PROMPT), ROWS)
    assert 1 < logits.std() < 12
    caches = make_prompt_cache(checkpoint.skeleton.model)
    checkpoint.skeleton.model(mx.array([[65]]), cache=caches)
    parts = [part for cache in caches for part in getattr(cache, "caches", (cache,))]
    keeping = [part for part in parts if isinstance(part, KVCache) or "KV" in type(part).__name__]
    shapes = [array.shape for part in keeping for array in (part.keys, part.values)]
    assert checkpoint.skeleton.sizes.kv_elements_per_token == sum(
        shape[0] * shape[1] * shape[3] for shape in shapes
    )


@pytest.mark.long
@pytest.mark.parametrize("name", QUANTISATIONS)
def test_quantised_models_compute_in_float32_on_the_cpu(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", dtype="bfloat16", quantisation=QUANTISATIONS[name])
    checkpoint = _open(path)
    assert checkpoint.skeleton.quantisation == name
    assert checkpoint.widened
    assert checkpoint.dtype == mx.float32
    assert checkpoint.skeleton.model(mx.array([PROMPT])).dtype == mx.float32
    assert checkpoint.skeleton.parameters == sum(array.size for array in _dense_llama(tmp_path).values())
    assert np.isfinite(in_thread(lambda: _logits(checkpoint.skeleton.model))).all()


def _dense_llama(tmp_path: Path) -> dict[str, Any]:
    weights: Any = mx.load(str(write_checkpoint(tmp_path / "dense", "llama") / "model.safetensors"))
    return dict(weights)


def test_mixed_quantisation_names_the_most_common_kind(tmp_path: Path) -> None:
    # mlx-lm quantises the routers of experts to 8 bits.
    path = write_checkpoint(tmp_path, "qwen3_moe", quantisation=("affine", 4, 32))
    assert _open(path).skeleton.quantisation == "4-bit affine, group 32 (mixed)"


def test_16_bit_weights_are_not_widened_beyond_the_memory_limit(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", dtype="float16")
    wide = _open(path)
    assert (wide.skeleton.quantisation, wide.dtype) == ("float16", mx.float32)
    narrow = _open(path, memory_bytes=wide.weight_bytes // 2 + 1000)
    assert (narrow.skeleton.quantisation, narrow.dtype) == ("float16", mx.float16)
    assert not narrow.widened
    assert narrow.weight_bytes * 2 == wide.weight_bytes
    context_bytes = wide.skeleton.sizes.kv_elements_per_token * 512 * mx.float32.size
    assert _open(path, memory_bytes=wide.weight_bytes + context_bytes - 1000).dtype == mx.float16
    assert _open(path, memory_bytes=wide.weight_bytes + context_bytes).dtype == mx.float32


def test_a_model_beyond_the_memory_limit_fails_before_loading(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: Any = mx.load(str(llama / "model.safetensors"))
    size = sum(array.nbytes for array in weights.values())
    monkeypatch.setattr(model_skeleton, "mlx_lm_utils", lambda: pytest.fail("looked at the weights"))
    with raises(MemoryBudgetError, "tiny"):
        _open(llama, memory_bytes=size - 1)


def test_progress_goes_from_0_to_1(llama: Path) -> None:
    seen: list[tuple[str, float]] = []

    def progress(what: str, fraction: float) -> bool:
        seen.append((what, fraction))
        return True

    _open(llama, progress)
    fractions = [fraction for _, fraction in seen]
    assert {what for what, _ in seen} == {"loading tiny"}
    assert fractions[0] == 0
    assert fractions[-1] == 1
    assert fractions == sorted(fractions)
    assert len(fractions) > 5


@pytest.mark.parametrize("after", [0.0, 0.3])
def test_progress_returning_false_cancels(llama: Path, after: float) -> None:
    asked: list[float] = []

    def progress(what: str, fraction: float) -> bool:
        asked.append(fraction)
        return fraction < after

    with raises(CancelledError, "tiny"):
        _open(llama, progress)
    assert asked[-1] < 0.9


def test_an_adapter_changes_the_logits(llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", llama)
    plain, adapted = _open(llama), _open(llama, adapters=(Adapter(str(adapter)),))
    assert adapted.weight_bytes > plain.weight_bytes
    assert adapted.skeleton.file_bytes > plain.skeleton.file_bytes
    moved = np.abs(_logits(plain.skeleton.model) - in_thread(lambda: _logits(adapted.skeleton.model)))
    assert moved.max() > 0.1


def test_an_adapter_of_another_model_is_rejected(tmp_path: Path, llama: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", write_checkpoint(tmp_path / "lfm2", "lfm2"))
    with raises(ModelFileError, "adapter"):
        _open(llama, adapters=(Adapter(str(adapter)),))


def test_broken_adapters(tmp_path: Path, llama: Path) -> None:
    with raises(ModelFileError, "nowhere", "adapter_config.json", code="adapter_unusable"):
        _open(llama, adapters=(Adapter(str(tmp_path / "nowhere")),))
    adapter = write_adapter(tmp_path / "adapter", llama)
    weights = adapter / "adapters.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with raises(ModelFileError, "truncated"):
        _open(llama, adapters=(Adapter(str(adapter)),))
    weights.unlink()
    with raises(ModelFileError, "adapters.safetensors", code="adapter_unusable"):
        _open(llama, adapters=(Adapter(str(adapter)),))
    (adapter / "adapter_model.safetensors").touch()
    with raises(ModelFileError, "PEFT", code="adapter_unusable"):
        _open(llama, adapters=(Adapter(str(adapter)),))
    with raises(ModelFileError, "adapter_config.json", code="adapter_unusable"):
        _open(llama, adapters=(Adapter(str(llama)),))


_ALONE = """
import resource, socket, sys
def refuse(*_, **__):
    raise AssertionError("the network was asked")
socket.socket.connect = socket.getaddrinfo = refuse
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 3000))
from edgespec.model.base import LoadOptions
from edgespec.backends.mlx.weight_loading import load_model
load_model(sys.argv[1], "tiny", LoadOptions(), None)
# mlx-lm would set these limits to 2048 and 4096, or fail without the permission.
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2048, 3000)
"""


@pytest.mark.long
def test_loading_is_silent_offline_and_leaves_the_limits(tmp_path: Path) -> None:
    # A padding token beyond the vocabulary makes transformers warn.
    path = write_checkpoint(tmp_path, "llama", config={"pad_token_id": 10**6})
    ran = subprocess.run(
        [sys.executable, "-c", _ALONE, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


_WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from edgespec.model.base import LoadOptions
from edgespec.backends.mlx.build_info import build_info
from edgespec.backends.mlx.weight_loading import load_model
from edgespec.errors import BackendMissingError
try:
    load_model(sys.argv[2], "tiny", LoadOptions(), None)
except BackendMissingError as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.parametrize("module", ["mlx.core", "mlx_lm.utils"])
def test_without_mlx_the_error_names_the_extra(module: str, llama: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT, module, str(llama)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "scripts/setup mlx" in ran.stdout
    assert ran.stdout.count("\n") == 1
