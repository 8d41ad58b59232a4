"""`edgespec chats` works on the same chats as the terminal chat."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from edgespec.chat.message import Message
from edgespec.chat.prompt_history import PromptHistory
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.system.files import data_folder
from tests.cli.conftest import Run, json_of, one_line_error

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
FILES = (Message("user", "How do I list files?"), Message("assistant", "Use `ls -S`."))
TREES = (Message("user", "How tall are trees?"), Message("assistant", "Pines reach 80 metres."))


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatStore:
    """Create three chats: an old pinned one, a newer one, and a damaged file."""
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    store = ChatStore()
    store.save(SavedChat("files", MessageTree.linear(FILES), NOON, NOON, pinned=True))
    later = NOON + timedelta(days=1)
    store.save(SavedChat("trees", MessageTree.linear(TREES), NOON, later, unfinished=True))
    (store.folder / "broken.json").write_text("{")
    return store


def test_the_list_begins_with_pinned_chats_and_shows_damaged_files(run: Run) -> None:
    chats = json_of(run("chats", "list", "--json"))["chats"]
    assert [chat["id"] for chat in chats] == ["files", "broken", "trees"]
    assert [chat["pinned"] for chat in chats] == [True, False, False]
    assert "not valid JSON" in chats[1]["problem"]
    assert (chats[2]["messages"], chats[2]["unfinished"]) == (2, True)
    assert chats[2]["updated"] == "2026-03-02T12:00:00+00:00"
    heads, *rows = run("chats", "list").stdout.splitlines()
    assert heads.split() == ["ID", "TITLE", "CHANGED"]
    assert rows[0].startswith("files   How do I list files? (pinned)  ")
    assert rows[1].startswith("broken  broken.json (unreadable)")
    assert "(unfinished)" in rows[2]


def test_search_shows_the_matching_line(run: Run) -> None:
    (found,) = json_of(run("chats", "search", "METRES", "pines", "--json"))["chats"]
    assert (found["id"], found["line"]) == ("trees", "Pines reach 80 metres.")
    assert "Pines reach 80 metres." in run("chats", "search", "metres").stdout
    assert json_of(run("chats", "search", "oaks", "--json")) == {"chats": []}
    assert run("chats", "search", "oaks").stdout == ""


def test_show_prints_markdown_or_the_file(run: Run, store: ChatStore) -> None:
    text = (
        "# How tall are trees?\n\n**You:**\n\nHow tall are trees?\n\n**Model:**\n\nPines reach 80 metres.\n"
    )
    for name in ("trees", "HOW TALL"):
        assert run("chats", "show", name).stdout == text
    assert json_of(run("chats", "show", "last", "--json")) == store.load("trees").to_json()
    for name in ("show", "export", "delete"):
        one_line_error(run("chats", name, "oaks"), 1, "'oaks'", code="chat_not_found")
    one_line_error(run("chats", "show", "broken"), 1, code="chat_file_damaged")


def test_an_exported_chat_can_be_imported(
    run: Run, store: ChatStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exported = json_of(run("chats", "export", "trees", "chat.json", "--json"))
    assert exported == {
        "id": "trees", "title": "How tall are trees?", "path": str(tmp_path / "chat.json"),
    }  # fmt: skip
    imported = json_of(run("chats", "import", "chat.json", "--json"))
    (added,) = imported["ids"]
    assert imported["left_out"] == {}
    assert store.load(added).messages == TREES
    assert run("chats", "export", "files").exit_code == 0
    assert (tmp_path / "How do I list files.md").read_text("utf-8").endswith("Use `ls -S`.\n")
    one_line_error(run("chats", "export", "files"), 2, "already exists", code="output_exists")
    one_line_error(run("chats", "export", "files", "chat.pdf"), 2, "format", code="option_invalid")
    one_line_error(run("chats", "import", "missing.json"), 1, "cannot read", code="chat_file_unreadable")


def test_a_chat_is_exported_to_standard_output(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = run("chats", "show", "trees").stdout
    assert run("chats", "export", "trees", "-").stdout == text
    exported = json_of(run("chats", "export", "trees", "-", "--json"))
    assert (exported["id"], exported["path"], exported["text"]) == ("trees", None, text)
    assert not list(tmp_path.glob("*.md"))
    assert not (tmp_path / "-").exists()


def test_an_import_that_fails_in_the_middle_keeps_the_chats_before(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    chat = {"name": "T", "chat_messages": [{"uuid": "1", "sender": "human", "text": "Q"}]}
    path.write_text(f"[{json.dumps(chat)}, {{")
    message = one_line_error(run("chats", "import", str(path)), 1)
    assert message.startswith("only the first 1 chats were imported: chats.json is not a chat export")
    assert "T" in [each["title"] for each in json_of(run("chats", "list", "--json"))["chats"]]


def test_delete_asks_and_also_deletes_traces(
    run: Run, store: ChatStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    PromptHistory(data_folder()).add("How tall are trees?")
    one_line_error(run("chats", "delete", "trees"), 2, "--yes", code="confirmation_needed")
    one_line_error(run("chats", "delete", "how", "--yes"), 2, "'how'", code="ambiguous")
    monkeypatch.setattr("edgespec.cli.chats.is_terminal", lambda stream: True)
    assert run("chats", "delete", "trees", input="n\n").exit_code != 0
    assert store.load("trees").messages == TREES
    assert run("chats", "delete", "trees", input="y\n").stdout == "Deleted “How tall are trees?”.\n"
    assert not list(data_folder().glob("*.jsonl"))
    assert json_of(run("chats", "delete", "broken", "--yes", "--json"))["deleted"] == "broken"
    assert [path.name for path in store.folder.glob("*.json")] == ["files.json"]
