"""What was read belongs to this very model and way of running it; anything else reads it again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.assembly.keeping import Keeping
from edgespec.errors import OptionError
from edgespec.files import sample_of
from edgespec.memory.kept import Worth

PROMPT = "How do I list files by size? " * 4
OPTIONS: dict[str, Any] = {"draft": "none", "method": "none", "threads": 1, "context": 512, "keep": "disk"}


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(Worth, "pays", lambda _self, tokens, _bytes: tokens > 0)


def held(target: Path, **options: Any) -> int:
    """How much of the prompt need not be read."""
    with edgespec.load(str(target), **{**OPTIONS, **options}) as runtime:
        return runtime.generate(PROMPT, max_tokens=4, seed=1).stats.cached_prompt_tokens


def test_only_the_same_model_run_in_the_same_way_goes_on(demo_target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(demo_target, copy)
    assert held(copy) == 0
    assert held(copy) > 20
    for options in ({"kv_type": "q8_0"}, {"flash_attention": "off"}, {"threads": 2}, {"keep": "memory"}):
        assert held(copy, **options) == 0
    assert held(copy, context=256) > 20
    # One byte of the weights, somewhere.
    with copy.open("r+b") as file:
        file.seek(-123_457, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert held(copy) == 0
    assert held(copy) > 20


@pytest.mark.skipif(os.name != "posix", reason="where it is the time the file was made")
def test_weights_that_were_changed_with_their_time_set_back_are_others(
    demo_target: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(demo_target, copy)
    assert held(copy) == 0
    before, sample = copy.stat(), sample_of(copy)
    with copy.open("r+b") as file:
        file.seek(-450_000, os.SEEK_END)
        file.write(bytes(64))
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (copy.stat().st_size, copy.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert sample_of(copy) == sample
    assert held(copy) == 0


def test_none_writes_nothing(demo_target: Path, tmp_path: Path) -> None:
    for place in ("none", "memory"):
        held(demo_target, keep=place)
    assert not list((tmp_path / "data").rglob("*.kept"))


def test_a_place_or_size_that_makes_no_sense_is_refused() -> None:
    for wrong in (("cloud", None, None), ("disk", "much", None), ("disk", None, "-1")):
        with pytest.raises(OptionError):
            Keeping.read(*wrong)
    assert Keeping.read("disk", "1GiB", 5) == Keeping("disk", 1 << 30, 5)
