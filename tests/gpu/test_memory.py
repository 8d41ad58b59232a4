"""The plan matches the memory that the GPU's driver allocates. Uses the checks of scripts/check_gpu."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edgespec.backends.llamacpp.devices import Gpu
from scripts.gpu_checking.steps import create_plan_step, run_step

pytestmark = pytest.mark.gpu

_STEP_SECONDS = 240
# Margin for the logits, which are in main memory that the driver allocates, and for the driver's rounding.
_NEAR_MIB = 16


def api_of(card: Gpu) -> str:
    """Return the name of the API from llama.cpp's name of a GPU, such as `CUDA0`."""
    return card.name.rstrip("0123456789").lower()


@pytest.mark.parametrize("share", ["all", "half", "0"])
@pytest.mark.parametrize("model", ["demo", "SmolLM2"])
def test_planned_memory_is_measured(
    model: str,
    share: str,
    card: Gpu,
    demo_target: Path,
    demo_draft: Path,
    short_smollm2: Path,
    tmp_path: Path,
) -> None:
    pair = (str(demo_target), str(demo_draft)) if model == "demo" else (str(short_smollm2), "none")
    step = create_plan_step(api_of(card), share, *pair)
    result = run_step(step, step.name, sys.executable, tmp_path, os.environ, _STEP_SECONDS)
    assert result.status == "passed", (result.problem, result.figures, result.output)
    planned, measured = (float(result.figures[name].split()[0]) for name in ("planned", "measured"))
    # The step allows 64 MiB, which is more than these models need.
    assert abs(planned - measured) < _NEAR_MIB, result.figures
