"""Estimates from metadata match the sizes that libraries log, and hold under a hard memory limit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp import memory_estimate as estimate_module
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.backends.llamacpp.memory_estimate import (
    ContextBuffers,
    GgufMemoryEstimator,
    parse_buffers,
    simulate,
)
from edgespec.backends.llamacpp.native import captured_log
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.backends.replay import MAX_CHECKPOINTS, ReplayModel
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.model.base import LanguageModel, LoadOptions
from edgespec.store.reference import resolve
from tests.backends import tiny_models
from tests.backends.tiny_mtp_models import write_deepseek4
from tests.cases import first

WRITERS: list[Callable[[Path], Path]] = [
    tiny_models.write_llama,
    tiny_models.write_moe,
    tiny_models.write_mamba,
    tiny_models.write_gemma2,
    tiny_models.write_gemma3,
    tiny_models.write_jamba,
    tiny_models.write_lfm2,
    write_deepseek4,
]
_REAL = re.compile(r"(KV|RS|state) buffer size = *([\d.]+) MiB")
_WEIGHTS = re.compile(r"model buffer size = *([\d.]+) MiB")
# The library rounds each number to hundredths of a MiB, and pads each buffer.
_ROUNDING_BYTES = 3 * 2**20 // 100


def _near(planned: int, real: float) -> bool:
    return abs(planned - real) <= max(0.01 * real, _ROUNDING_BYTES)


def _taken(lines: list[str], pattern: re.Pattern[str]) -> float:
    return (
        sum(float(found[found.lastindex or 1]) for line in lines if (found := pattern.search(line))) * 2**20
    )


def _last_load(lines: list[str]) -> list[str]:
    """Return the log lines of the last context. Earlier ones only probe the model's capabilities."""
    starts = [i for i, line in enumerate(lines) if "n_seq_max" in line]
    return lines[starts[-1] :]


def _checkpoint_bytes(model: LanguageModel) -> int:
    """Return the size of the checkpoints of a model that keeps them in main memory."""
    if not isinstance(model, ReplayModel):
        return 0
    checkpoint = model._inner.checkpoint()
    return MAX_CHECKPOINTS * len(checkpoint.state) if isinstance(checkpoint.state, memoryview) else 0


def _check(path: Path, **options: object) -> None:
    how = LoadOptions(**options)  # type: ignore[arg-type]
    estimator = GgufMemoryEstimator(str(path), path.name)
    try:
        planned = estimator.estimate(how)
    finally:
        estimator.close()
    with captured_log() as lines:
        model = llamacpp.load(str(path), path.name, how)
        model.prefill([1, 2, 3])
    real = _last_load(lines)
    facts = model.facts
    cache_bytes = _taken(real, _REAL) + _checkpoint_bytes(model)
    model.close()
    assert planned.context_tokens == facts.context_tokens
    assert _near(planned.bytes_of("weights"), facts.weight_bytes)
    weights = lines[: lines.index(real[0])]
    assert _near(planned.bytes_of("weights"), _taken(weights, _WEIGHTS))
    assert _near(planned.bytes_of("cache"), cache_bytes)
    buffers = parse_buffers(real)
    attention = planned.bytes_of("compute") - buffers.compute_bytes
    assert (attention > 2**20) if how.flash_attention == "off" else _near(attention, 0)
    assert _near(facts.kv_bytes, cache_bytes)


@pytest.mark.long
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))
@pytest.mark.parametrize("context_tokens", [512, 40_000])
def test_planned_sizes_match_llama_cpp_for_each_architecture(
    write: Callable[[Path], Path], context_tokens: int, tmp_path: Path
) -> None:
    _check(write(tmp_path / "tiny.gguf"), context_tokens=context_tokens)


@pytest.mark.long
@pytest.mark.parametrize("kv_type", ["f32", "q8_0", "q8_0/f16", "q4_0"])
@pytest.mark.parametrize("context_tokens", first([2048, 131_072]))
def test_planned_sizes_match_llama_cpp_for_each_kv_type(kv_type: str, context_tokens: int) -> None:
    _check(resolve("demo").path, kv_type=kv_type, context_tokens=context_tokens)


def test_very_long_contexts_are_scaled_from_one_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single simulation must suffice, because the advice compares dozens of context lengths."""
    made: list[int] = []

    def counted(weights: object, plan: ContextPlan, options: LoadOptions, **rest: bool) -> ContextBuffers:
        made.append(plan.tokens)
        return simulate(weights, plan, options, **rest)

    monkeypatch.setattr(estimate_module, "simulate", counted)
    estimator = GgufMemoryEstimator(str(resolve("demo").path), "demo")
    try:
        first, *others = (
            estimator.estimate(LoadOptions(context_tokens=2**19 * times, kv_type=kv_type))
            for kv_type in ("f16", "q8_0")
            for times in (1, 2, 2000)
        )
    finally:
        estimator.close()
    assert made == [2**18] * 2
    assert others[0].bytes_of("cache") == 2 * first.bytes_of("cache")
    assert others[1].bytes_of("cache") == 2000 * first.bytes_of("cache")


@pytest.mark.parametrize("options", [{"max_branches": 64}, {"flash_attention": "off"}, {"mmap": False}])
def test_planned_sizes_match_llama_cpp_with_other_options(options: dict[str, object]) -> None:
    _check(resolve("demo").path, context_tokens=2048, **options)


@pytest.mark.parametrize("write", [tiny_models.write_llama, tiny_models.write_jamba])
def test_attention_weights_are_planned_without_flash_attention(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    """512 rows times 32,768 cells times two heads in f16, on top of llama.cpp's f32 buffer."""
    rest = {}
    for flash_attention in ("off", "on"):
        how = LoadOptions(context_tokens=32_768, flash_attention=flash_attention, kv_type="f16")
        estimator = GgufMemoryEstimator(str(write(tmp_path / "tiny.gguf")), "tiny")
        with captured_log() as lines:
            planned = estimator.estimate(how).bytes_of("compute")
        estimator.close()
        last = parse_buffers(_last_load(lines))
        rest[flash_attention] = planned - last.compute_bytes
    assert rest["off"] == 512 * 32_768 * 2 * 2
    assert rest["on"] == 0


def test_vocabulary_estimate_includes_merges() -> None:
    """llama.cpp stores every token and every merge rule of the tokenizer."""
    path, size = resolve("demo").path, 8192
    estimator = GgufMemoryEstimator(str(path), "demo")
    planned = estimator.estimate(LoadOptions(context_tokens=512)).bytes_of("vocabulary")
    estimator.close()
    assert 250 * size < planned < 320 * size


@pytest.mark.long
@pytest.mark.parametrize(
    ("quantisation", "flash_attention"),
    [("Q8_0", "auto"), ("Q4_0", "off"), pytest.param("Q8_0", "off", marks=pytest.mark.long)],
)
def test_split_model_estimate_matches_llama_cpp(
    quantisation: str, flash_attention: str, demo_in_halves: Path, tmp_path: Path
) -> None:
    """Most CPUs repack Q4_0 weights, so both parts hold a copy of the shared tensors."""
    folder = demo_in_halves
    if quantisation == "Q4_0":
        path = tmp_path / "demo.gguf"
        quantise(resolve("demo").path, path, quantisation)
        folder = prepare_layerskip(path, exit_layer=4, to=tmp_path / "halves").folder
    how = LoadOptions(context_tokens=4096, flash_attention=flash_attention)
    estimator = GgufMemoryEstimator(str(folder), "demo", split=True)
    try:
        planned = estimator.estimate(how)
    finally:
        estimator.close()
    with captured_log() as lines:
        model = load_layerskip(str(folder), "demo", how)
    facts = model.facts
    model.close()
    assert _near(planned.bytes_of("cache"), _taken(lines, _REAL))
    assert _near(planned.bytes_of("cache"), facts.kv_bytes)
    assert _near(planned.bytes_of("weights"), facts.weight_bytes)
    said = [line for line in lines if _taken([line], _WEIGHTS)]  # nothing, where it was only looked into
    mapped = [line for line in said if "_Mapped" in line]
    own = [line for line in said if "_Mapped" not in line]
    assert not (mapped and own)
    shared = (folder / "shared.gguf").stat().st_size if mapped else 0
    assert _near(planned.bytes_of("weights"), _taken(mapped + own, _WEIGHTS) - shared)
    attention = planned.bytes_of("compute") - parse_buffers(lines).compute_bytes
    assert 0 <= attention < 2**20 + (0 if flash_attention == "auto" else 2**26)


_LIMITED = """
import json, resource, sys
import edgespec, psutil
from edgespec.backends.llamacpp.native import library

library()
limit = psutil.Process().memory_info().vms + int((sys.argv[4:] or [506])[0]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
path, context, kv_type = sys.argv[1], int(sys.argv[2]), sys.argv[3]
try:
    how = {"threads": 1, "method": "none", "prefix_cache": "none", "reserve_full_context": True}
    how |= {"measure_costs": False, "exactness": "off"}
    with edgespec.load(path, "none", context=context, kv_type=kv_type, **how) as runtime:
        reply = runtime.generate("hello " * 500, max_tokens=4, temperature=0.0, raw=True)
        print(json.dumps([runtime.plan.to_json(), reply.stats.generated_tokens, runtime.context_tokens]))
except edgespec.EdgespecError as error:
    print(json.dumps([type(error).__name__, error.what, error.next_step]))
"""


def _limited(context_tokens: int, kv_type: str = "auto") -> list[Any]:
    """Load the demo in a process with a limited address space, and return its result."""
    program = [sys.executable, "-c", _LIMITED, str(resolve("demo").path), str(context_tokens), kv_type]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is not kept elsewhere")
class TestHardLimit:
    @pytest.mark.parametrize("left", first(["20", "35"]))
    def test_too_little_memory_to_plan_is_an_error(self, left: str) -> None:
        program = [sys.executable, "-c", _LIMITED, str(resolve("demo").path), "1024", "auto", left]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        name, what, _ = json.loads(done.stdout)
        assert name == "MemoryBudgetError"
        assert "ulimit -v" in what

    def test_a_plan_that_fits_runs_under_the_limit(self) -> None:
        plan, generated, context = _limited(65_536)
        assert "address space" in plan["budget_from"]
        assert plan["fits"]
        assert [each["what"] for each in plan["decisions"]] == ["a KV cache of type q8_0"]
        assert generated == 4
        assert context == plan["context"] == 65_536

    def test_a_plan_that_does_not_fit_is_rejected_before_loading(self) -> None:
        kind, what, next_step = _limited(65_536, "f16")
        assert kind == "MemoryBudgetError"
        assert "a context of 65,536 tokens" in what
        least = int(next_step.partition("up to ")[2].split()[0])
        assert 32_768 <= least < 65_536
        # The process's own memory use differs slightly from run to run.
        plan, generated, _ = _limited(least - 1024, "f16")
        assert plan["fits"]
        assert plan["total_bytes"] > plan["budget_bytes"] * 0.95
        assert generated == 4
