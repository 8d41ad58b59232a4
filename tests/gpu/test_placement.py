"""Layers, KV caches and both models of a pair are where the options or the plan place them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import Runtime
from edgespec.backends.llamacpp.devices import Gpu
from edgespec.backends.llamacpp.native import captured_log
from edgespec.errors import MemoryBudgetError
from edgespec.model.formats.gguf_header import read_header
from tests.api.questions import HOWTO
from tests.backends.tiny_models import write_moe

pytestmark = pytest.mark.gpu

_MIB = 2**20
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_SIZE = re.compile(r"(\S+) +(model|KV|compute) buffer size = +([\d.]+) MiB")


@contextmanager
def loaded(target: Path, draft: str = "none", **options: Any) -> Iterator[tuple[Runtime, list[str]]]:
    """Load models, and collect what llama.cpp logs meanwhile."""
    method = "none" if draft == "none" else "model"
    with (
        captured_log() as lines,
        edgespec.load(
            str(target),
            draft,
            method=method,
            exactness="off",
            prefix_cache="none",
            measure_costs=False,
            **options,
        ) as runtime,
    ):
        yield runtime, lines  # fmt: skip


def last_load(lines: list[str]) -> list[str]:
    """Return the log lines since the last model was opened. The plan opens it earlier, without weights."""
    return lines[max(i for i, line in enumerate(lines) if "loaded meta data" in line) :]


def offloaded(lines: list[str]) -> list[tuple[int, int]]:
    """Return the number of GPU layers and of all layers for each model, in loading order."""
    return [(int(m[1]), int(m[2])) for line in lines if (m := _OFFLOADED.search(line))]


def sizes(lines: list[str], kind: str) -> dict[str, float]:
    """Return the size of the last buffer of a kind on each device, in MiB."""
    found = (match for line in lines if (match := _SIZE.search(line)) and match[2] == kind)
    return {match[1]: float(match[3]) for match in found}


def layers_of(path: Path) -> int:
    return int(str(read_header(path).architecture_value("block_count")))


def test_all_layers_run_on_the_gpu_by_default(target: Path, card: Gpu) -> None:
    with loaded(target, context=512) as (runtime, lines):
        assert runtime.generate(HOWTO, max_tokens=4).tokens
        assert offloaded(lines)[-1] == (layers_of(target) + 1, layers_of(target) + 1)
        assert set(sizes(lines, "KV")) == {card.name}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_layers_are_divided_between_the_gpu_and_the_cpu(target: Path, card: Gpu, share: float) -> None:
    layers = layers_of(target)
    on_gpu = round(layers * share)  # the output layer is one of them
    with loaded(target, context=512, gpu_layers=on_gpu) as (runtime, lines):
        assert runtime.generate(HOWTO, max_tokens=4).tokens
        assert offloaded(lines)[-1] == (on_gpu, layers + 1)
        cache = sizes(lines, "KV")
        assert cache[card.name] / sum(cache.values()) == pytest.approx((on_gpu - 1) / layers, abs=0.01)


def test_without_layers_the_gpu_is_not_used(target: Path, card: Gpu) -> None:
    with loaded(target, context=512, gpu_layers=0) as (runtime, lines):
        # llama.cpp runs prompts of 32 tokens or more on the GPU if it may use it at all.
        assert runtime.generate(HOWTO * 8, max_tokens=4).tokens
        assert not any(card.name in line for line in last_load(lines))


@pytest.mark.parametrize(("gpu_layers", "draft_gpu_layers"), [(None, 0), (0, None)])
def test_the_models_of_a_pair_run_on_different_devices(
    demo_target: Path, demo_draft: Path, gpu_layers: int | None, draft_gpu_layers: int | None
) -> None:
    draft_layers = layers_of(demo_draft) + 1 if draft_gpu_layers is None else 0
    options: dict[str, Any] = {"gpu_layers": gpu_layers, "draft_gpu_layers": draft_layers}
    with (
        loaded(demo_target, str(demo_draft), context=512, **options) as (runtime, lines),
        loaded(demo_target, context=512, gpu_layers=gpu_layers) as (alone, _),
    ):
        counts = {total: count for count, total in offloaded(lines)}
        assert counts.get(layers_of(demo_draft) + 1, 0) == draft_layers
        assert bool(counts.get(layers_of(demo_target) + 1)) == (gpu_layers is None)
        drafted = runtime.generate(HOWTO, max_tokens=24, seed=1)
        assert drafted.stats.accepted_tokens > 0
        assert drafted.tokens == alone.generate(HOWTO, max_tokens=24, seed=1).tokens


def budget_for(card: Gpu, free_bytes: int) -> dict[str, Any]:
    """Return the options that leave this much memory for edgespec on a GPU."""
    return {"reserve": f"{(card.free_bytes - free_bytes) // _MIB}MiB", "memory": "4GiB"}


def test_the_plan_chooses_how_many_layers_fit(demo_target: Path, card: Gpu) -> None:
    options: dict[str, Any] = budget_for(card, 20 * _MIB) | {
        "context": 2048,
        "kv_type": "f16",
        "headroom": "0",
    }
    plan = edgespec.plan(str(demo_target), "none", **options).plan
    assert plan.fits
    assert 0 < plan.planned_bytes("gpu") <= plan.budget_bytes("gpu") < 21 * _MIB
    with loaded(demo_target, **options) as (runtime, lines):
        on_gpu, all_layers = offloaded(lines)[-1]
        assert 0 < on_gpu < all_layers
        assert runtime.generate(HOWTO, max_tokens=4).tokens
        on_card = sum(sizes(lines, kind)[card.name] for kind in ("model", "KV", "compute"))
        assert on_card * _MIB <= plan.budget_bytes("gpu")


@pytest.mark.parametrize("count", [0, 3, 8])
def test_experts_are_where_the_option_says(tmp_path: Path, card: Gpu, count: int) -> None:
    path = write_moe(tmp_path / "moe.gguf", layers=8)
    shares = edgespec.plan(str(path), "none", context=512, experts=count).plan.experts
    assert shares is not None
    with (
        loaded(path, context=512, experts=count) as (runtime, lines),
        loaded(path, context=512, experts=0) as (alone, whole),
    ):
        on_card = sizes(last_load(lines), "model").get(card.name, 0)
        assert sizes(last_load(whole), "model")[card.name] - on_card == pytest.approx(
            shares.memory_bytes / _MIB, abs=0.02
        )
        replies = [each.generate(HOWTO, max_tokens=24, temperature=0).tokens for each in (runtime, alone)]
        assert len(replies[0]) == len(replies[1]) > 0


def test_layers_that_do_not_fit_are_an_error_before_loading(demo_target: Path, card: Gpu) -> None:
    options: dict[str, Any] = budget_for(card, 20 * _MIB) | {
        "context": 2048,
        "kv_type": "f16",
        "gpu_layers": 99,
    }
    with pytest.raises(MemoryBudgetError) as error, loaded(demo_target, **options):
        pass
    assert "--gpu-layers" in error.value.next_step
    assert "graphics card" in error.value.what


_ON_TWO_GPUS = """
import json, sys
import edgespec
from edgespec.backends.llamacpp.native import captured_log
options = {"method": "none", "exactness": "off", "prefix_cache": "none", "measure_costs": False}
with captured_log() as lines, edgespec.load(sys.argv[1], "none", context=512, **options) as runtime:
    tokens = runtime.generate(sys.argv[2], max_tokens=8, temperature=0.0).tokens
print(json.dumps({"tokens": tokens, "lines": lines}))
"""


def test_layers_are_divided_between_two_gpus(demo_target: Path, card: Gpu) -> None:
    if "llvmpipe" not in card.description:
        pytest.skip("only a device in software can be used twice")
    environment = os.environ | {"GGML_VK_VISIBLE_DEVICES": "0,0"}
    command = [sys.executable, "-c", _ON_TWO_GPUS, str(demo_target), HOWTO]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=240)
    result = json.loads(done.stdout)
    cache = sizes(result["lines"], "KV")
    assert set(cache) == {"Vulkan0", "Vulkan1"}
    # The output layer is on one of them, so that GPU has fewer layers with a cache.
    assert min(cache.values()) > sum(cache.values()) / 3
    with loaded(demo_target, context=512) as (runtime, _):
        assert runtime.generate(HOWTO, max_tokens=8, temperature=0.0).tokens == tuple(result["tokens"])
