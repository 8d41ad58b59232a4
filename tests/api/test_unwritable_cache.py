"""With an unwritable cache folder, replies work, and a single note says what is slower."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import edgespec


@pytest.mark.long
@pytest.mark.parametrize(
    "place", ["a file in place of the folder", "a folder without permission", "/proc/cache"]
)
def test_one_note_says_that_nothing_is_saved(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    if place.startswith("/"):
        folder = Path(place)
    elif "file" in place:
        folder.write_text("")
    else:
        folder.mkdir()
        # Root may write anywhere, so this refuses it too.
        monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(folder))
    with edgespec.load("demo", "none", context=256, threads=1) as runtime:
        assert runtime.target.notice.count("measures the models again every time it starts") == 1
        assert f"because {folder}" in runtime.target.notice
        assert runtime.generate("Hi", max_tokens=4).tokens


def test_a_writable_folder_needs_no_note() -> None:
    with edgespec.load("demo", "none", context=256, threads=1) as runtime:
        assert "every time it starts" not in runtime.target.notice
