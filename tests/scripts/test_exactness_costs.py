"""Tests of the benchmark of the option exactness."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.backends.tiny_models import write_llama
from tests.scripts.running import run_script


@pytest.mark.long
@pytest.mark.parametrize(("options", "prompts"), [(["--every", "12"], 2), (["--long", "300"], 1)])
def test_every_setting_is_measured_with_and_without_drafting(
    options: list[str], prompts: int, tmp_path: Path
) -> None:
    target = write_llama(tmp_path / "tiny.gguf", context=2048)
    options = [str(target), "--tokens", "8", "--repeats", "1", *options, "--json"]
    (result,) = run_script("bench_exactness.py", *options)["models"]
    assert len(result["prompts"]) == prompts
    assert [load["requested"] for load in result["loads"]] == ["off", "auto", "bits"]
    # What `auto` chooses depends on the machine.
    assert [load["effective"] for load in result["loads"]][::2] == ["rounding", "bits"]
    assert all(load["first_load_seconds"] > 0 < load["next_load_seconds"] for load in result["loads"])
    rows = {(row["method"], row["setting"]): row for row in result["rows"]}
    assert list(rows) == [*product(("none", "auto"), ("off", "auto", "bits"))]
    for (_, setting), row in rows.items():
        # Due to rounding, the mean of a single ratio only approximately equals the ratio.
        assert row["worst"][1] * 0.999 <= row["ratio"] <= row["best"][1] * 1.001
        assert (row["ratio"] == 1) == (setting == "off")
        assert row["milliseconds_per_token"] > 0 < row["first_token_seconds"]
