"""`edgespec delete-data` deletes the given kind of data and nothing else."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.chat.prompt_history import PromptHistory
from edgespec.store.saved_arrays import SavedArrays
from edgespec.system.facts import Facts
from edgespec.system.files import data_folder
from tests.cli.conftest import Run, json_of, one_line_error

KINDS = {".replies", ".npz", ".json", ".kept", ".jsonl"}


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a remembered reply, learned statistics, cached prefixes, and a chat."""
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    with edgespec.load("demo", "none", context=256, threads=1, remember=True, prefix_cache="disk") as runtime:
        runtime.generate("How do I list files?" * 9, max_tokens=8, seed=1, method="suffix")
    PromptHistory(data_folder()).add("How do I list files?")
    SavedArrays("online", "a model").save({"layers": np.arange(3)})
    chat = data_folder() / "chats" / "one.json"
    chat.parent.mkdir()
    chat.write_text("{}")
    return data_folder()


def suffixes_in(folder: Path) -> set[str]:
    return {path.suffix for path in folder.rglob("*") if path.suffix in KINDS}


def test_asks_for_confirmation_in_a_terminal_if_no_kind_is_named(
    run: Run, own_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.cli.delete_data.is_terminal", lambda stream: True)
    assert run("delete-data", input="n\n").exit_code != 0
    assert suffixes_in(own_data) == KINDS
    assert run("delete-data", "replies").exit_code == 0
    assert suffixes_in(own_data) == KINDS - {".replies"}
    assert run("delete-data", input="y\n").exit_code == 0
    assert suffixes_in(own_data) == {".json"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "left"),
    [
        ([], {".json"}),
        (["replies"], KINDS - {".replies"}),
        (["learned"], KINDS - {".npz"}),
        (["prefix-cache"], KINDS - {".kept"}),
        (["history"], KINDS - {".jsonl"}),
    ],
)
def test_deletes_the_named_kind_only(run: Run, own_data: Path, what: list[str], left: set[str]) -> None:
    assert suffixes_in(own_data) == KINDS
    assert json_of(run("delete-data", *what, "--json"))["freed_bytes"] > 0
    assert suffixes_in(own_data) == left
    assert run("delete-data", *what).stdout.endswith(": 0 B freed.\n")


def kinds_of_facts() -> set[str]:
    with closing(sqlite3.connect(Facts().path)) as database:
        return {kind for (kind,) in database.execute("SELECT kind FROM facts")}


@pytest.mark.long
def test_measurements_are_deleted_but_not_facts_about_files(run: Run) -> None:
    with edgespec.load("demo", context=256, threads=1, method="auto") as runtime:
        runtime.generate("How do I list files?", max_tokens=8)
    about_files = {"model", "shared tokens", "trial"}
    assert kinds_of_facts() - about_files >= {"classes", "costs", "drafting"}
    assert run("delete-data", "learned").exit_code == 0
    assert kinds_of_facts()
    assert kinds_of_facts() <= about_files


def test_reports_files_that_cannot_be_deleted(run: Run, own_data: Path) -> None:
    file = next(own_data.rglob("*.npz"))
    file.unlink()
    file.mkdir()
    one_line_error(run("delete-data", "learned"), 1, code="file_not_written")
    one_line_error(run("delete-data", "chats"), 2, "is not one of", code="option_invalid")
