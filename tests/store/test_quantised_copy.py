"""The copy of the default model that the first start makes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgespec.errors import CancelledError
from edgespec.store.prepared_builder import find_quantised, prepare_quantised
from edgespec.store.reference import resolve


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    return Path(shutil.copy(resolve("demo-draft").path, tmp_path / "model.gguf"))


def test_the_progress_says_what_is_done_and_how_long_it_takes(model: Path) -> None:
    said: list[str] = []

    def progress(description: str, fraction: float) -> bool:
        said.append(description)
        return True

    copy = prepare_quantised(model, "Q4_0", progress)
    assert copy == find_quantised(model, "Q4_0")
    assert copy.stat().st_size < model.stat().st_size
    making = [
        text for text in said if text.startswith("making a smaller and faster copy of the model (Q4_0)")
    ]
    assert "needed only once" in making[0]
    assert making[-1].endswith(" s left")


def test_a_copy_that_is_cancelled_is_not_used(model: Path) -> None:
    with pytest.raises(CancelledError):
        prepare_quantised(model, "Q4_0", lambda *_: False)
    assert find_quantised(model, "Q4_0") is None
