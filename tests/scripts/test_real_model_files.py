"""scripts/real_models makes each file once, and again if the file or its source has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.real_model_files.__main__ import Recipe, build, recipes


class Kitchen:
    """Recipes for a source, a copy of it and a folder made from the copy. Records what is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[str] = []
        self.recipes = [
            Recipe("source", (), self._file),
            Recipe("inner/copy", ("source",), self._file),
            Recipe("tree", ("inner/copy",), self._folder),
        ]

    def _file(self, _folder: Path, path: Path) -> None:
        self.made.append(path.name.removeprefix(".").removesuffix(".partial"))
        path.write_text(f"{len(self.made)}")

    def _folder(self, _folder: Path, path: Path) -> None:
        path.mkdir()
        (path / "weights").write_text("1")
        self.made.append("tree")

    def build(self) -> list[str]:
        self.made.clear()
        build(self.folder, self.recipes)
        return list(self.made)


@pytest.fixture
def kitchen(tmp_path: Path) -> Kitchen:
    return Kitchen(tmp_path)


def test_a_second_run_makes_nothing(kitchen: Kitchen, capsys: pytest.CaptureFixture[str]) -> None:
    assert kitchen.build() == ["source", "copy", "tree"]
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert kitchen.build() == []
    assert capsys.readouterr().out == ""
    assert {path.name for path in kitchen.folder.iterdir()} == {"source", "inner", "tree", "made.json"}


def test_what_was_lost_or_changed_is_made_again(kitchen: Kitchen) -> None:
    kitchen.build()
    (kitchen.folder / "tree" / "weights").unlink()
    assert kitchen.build() == ["tree"]
    (kitchen.folder / "inner" / "copy").write_text("damaged")
    assert kitchen.build() == ["copy", "tree"]
    (kitchen.folder / "source").unlink()
    assert kitchen.build() == ["source", "copy", "tree"]
    os.utime(kitchen.folder / "source", (1, 1))
    assert kitchen.build() == ["source", "copy", "tree"]
    (kitchen.folder / "made.json").write_text("not JSON")
    assert kitchen.build() == ["source", "copy", "tree"]


def test_an_interrupted_run_leaves_no_file_with_a_final_name(kitchen: Kitchen) -> None:
    def fail(_folder: Path, path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(kitchen.folder, [Recipe("source", (), fail)])
    assert not (kitchen.folder / "source").exists()
    assert kitchen.build() == ["source", "copy", "tree"]


@pytest.mark.parametrize("padded", [False, True])
def test_each_file_comes_after_those_it_is_made_from(padded: bool) -> None:
    done: set[str] = set()
    for recipe in recipes(padded=padded):
        assert done.issuperset(recipe.inputs)
        done.add(recipe.name)
    assert ("padded/smollm2-q4_k_m.gguf" in done) == padded
    assert {"gemma3-270m-q4_k_m.gguf", "smollm2-hf", "smollm2-mlx-4bit"} <= done
