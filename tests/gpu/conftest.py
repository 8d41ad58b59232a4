"""Fixtures for tests on a GPU. scripts/test_gpu runs them, on a software device if there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.backends.llamacpp.devices import Gpu, cards
from edgespec.loading import bit_exactness
from edgespec.loading.prepare.gguf_parts import GgufParts, write_gguf

# Number of layers: enough to split between the GPU and the CPU, and few enough for a software device.
_SMOLLM2_LAYERS = 4


@pytest.fixture(scope="session")
def card() -> Gpu:
    """The first GPU with its own memory."""
    found = cards()
    if not found:
        pytest.skip("llama.cpp finds no GPU with its own memory; run scripts/test_gpu")
    return found[0]


@pytest.fixture(scope="module", autouse=True)
def only_with_a_gpu(card: Gpu) -> None:
    """Skip all tests without a GPU."""


@pytest.fixture(scope="module", autouse=True)
def short_trial_on_slow_devices(card: Gpu) -> Iterator[None]:
    """On a software device, test only short contexts and narrow passes, because others take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        if "llvmpipe" in card.description:
            patch.setattr(bit_exactness, "LONG_TRIAL_SECONDS", 0.0)
            patch.setattr(bit_exactness, "LONG_TRIAL_STEPS", 0)
        yield


@pytest.fixture(scope="session")
def short_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 without its upper layers. It uses the kernels of the whole model, but writes nonsense."""
    path = tmp_path_factory.mktemp("short") / "short-smollm2-q4_1.gguf"
    parts = GgufParts([smollm2])
    tensors = parts.shared() | parts.layers(0, _SMOLLM2_LAYERS)
    write_gguf(path, parts.architecture, parts.metadata(0, _SMOLLM2_LAYERS), tensors)
    return path


@pytest.fixture(scope="session", params=["demo", "SmolLM2"])
def target(request: pytest.FixtureRequest, demo_target: Path) -> Path:
    """The two models that most tests use."""
    if request.param == "demo":
        return demo_target
    path: Path = request.getfixturevalue("short_smollm2")
    return path
