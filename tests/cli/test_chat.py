"""`edgespec chat`: what it hands to the terminal chat."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import edgespec
import edgespec.tui.app
import edgespec.tui.plain_run
from edgespec.api.sharing import client
from edgespec.api.sharing.chat_sharing import ChatSharing
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import NO_MODELS, MessageTree, ModelReferences, SavedChat, Setting
from edgespec.chat.store import ChatStore
from edgespec.cli import chat
from edgespec.errors import EdgespecError, ModelFileError, OptionError
from edgespec.options.load_options import LOAD_OPTIONS
from edgespec.options.option import Flag
from edgespec.options.reply_options import REPLY_OPTIONS
from edgespec.tui.ending import ChatEnd
from edgespec.tui.preferences import Preferences, preferences_path
from tests.cli.conftest import Run, one_line_error
from tests.raising import raises


class Opened:
    """Stands for the terminal chat: remembers how it was opened."""

    def __init__(self) -> None:
        self.load: Any = None
        self.options: dict[str, Any] = {}
        self.end = ChatEnd()

    def __call__(self, load: Any, **options: Any) -> ChatEnd:
        self.load, self.options = load, options
        return self.end


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A terminal, and a chat that only takes notes."""
    notes = Opened()
    monkeypatch.setattr(chat, "is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(edgespec.tui.app, "run_chat", notes)
    return notes


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of the last call of `load`, which loads nothing."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(edgespec, "load", lambda **given: options.update(given))
    monkeypatch.setattr(ChatSharing, "_share", lambda *_: None)
    # Other test processes may have loaded the model.
    monkeypatch.setattr(client, "find_shared", lambda *_: None)
    return options


@pytest.mark.parametrize("terminal", ["dumb", ""])
def test_terminal_that_cannot_draw_gets_the_plain_chat(
    run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch, terminal: str
) -> None:
    plain = Opened()
    monkeypatch.setattr(edgespec.tui.plain_run, "run_plain_chat", plain)
    monkeypatch.setenv("TERM", terminal)
    result = run("chat", "--target", "8b-q4")
    assert result.exit_code == 0, result.output
    assert opened.load is None
    for name in ("load_other", "plan_other", "sharing"):
        assert plain.options.pop(name)
    asked: dict[str, Any] = {
        "models": ModelReferences("8b-q4", "auto"),
        "changed": {},
        "fallback_note": "",
        "system": None,
        "settings": {},
        "overrides": {},
        "resume": None,
        "tools": False,
    }
    assert plain.options == asked


def test_plain_can_be_asked_for(run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Opened()
    monkeypatch.setattr(edgespec.tui.plain_run, "run_plain_chat", plain)
    assert run("chat", "--plain").exit_code == 0
    assert opened.load is None
    assert plain.load is not None


def test_a_pipe_gets_the_plain_chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Opened()
    monkeypatch.setattr(edgespec.tui.plain_run, "run_plain_chat", plain)
    assert run("chat").exit_code == 0
    assert plain.load is not None


def test_model_options_go_to_load(run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: dict[str, Any] = {}
    monkeypatch.setattr(edgespec, "load", lambda **options: loaded.update(options))
    result = run(
        "chat", "--target", "8b-q4", "--draft", "none", "--context", "4096", "--method", "ngram", "--no-mmap"
    )
    assert result.exit_code == 0, result.output
    opened.load(print)
    assert loaded["progress"] is print
    assert (loaded["target"], loaded["draft"], loaded["context"]) == ("8b-q4", "none", 4096)
    assert (loaded["method"], loaded["mmap"]) == ("ngram", False)
    assert opened.options["models"] == ModelReferences("8b-q4", "none")


def test_only_the_settings_that_were_written_are_set(run: Run, opened: Opened) -> None:
    run("chat")
    for name in ("load_other", "plan_other", "sharing"):
        assert opened.options.pop(name)
    assert opened.options == {
        "models": ModelReferences("demo", "auto"),
        "changed": {},
        "fallback_note": "",
        "system": None,
        "settings": {},
        "overrides": {},
        "resume": None,
        "light": None,
        "mouse": True,
        "tools": False,
        "remember": True,
    }
    run(
        "chat",
        "--temperature",
        "0.5",
        "--seed",
        "0",
        "--stop",
        "X",
        "-n",
        "9",
        "--system",
        "Be brief.",
        "--light",
    )
    assert opened.options["settings"] == {"temperature": 0.5, "seed": 0, "stop": ["X"], "max_tokens": 9}
    assert opened.options["system"] == "Be brief."
    assert opened.options["light"] is True


def test_every_reply_option_becomes_a_setting(run: Run, opened: Opened, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "string"}', "utf-8")
    names = {name for name, option in REPLY_OPTIONS.items() if option.in_chat} - set(LOAD_OPTIONS)
    flags = {name for name in names if isinstance(REPLY_OPTIONS[name].kind, Flag)}
    values = {name: [] if name in flags else ["1"] for name in names} | {"thinking": ["on"]}
    given = (word for name in names for word in (f"--{name.replace('_', '-')}", *values[name]))
    result = run("chat", "--schema", str(schema), *given)
    assert result.exit_code == 0, result.stderr
    assert set(opened.options["settings"]) == {"schema", *names}
    assert opened.options["settings"]["schema"] == '{"type": "string"}'


def test_absurd_settings_are_refused_before_the_chat_opens(run: Run, opened: Opened) -> None:
    one_line_error(run("chat", "--temperature", "-3"), 2, "from 0", code="option_invalid")
    assert opened.load is None


def test_a_model_that_does_not_load_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_chat(*args: object, **options: object) -> None:
        raise ModelFileError("it is damaged", "get another")

    monkeypatch.setattr(chat, "is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(edgespec.tui.app, "run_chat", run_chat)
    assert one_line_error(run("chat"), 1) == "it is damaged; get another"


def _save(store: ChatStore, *titles: str) -> None:
    now, messages = datetime.now(UTC), MessageTree.linear([Message("user", "Hello")])
    for number, title in enumerate(titles):
        store.save(SavedChat(f"2026-{number}", messages, now, now, title=title))


def test_a_chat_to_go_on_with_is_the_last_or_a_named_one(
    run: Run, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    _save(ChatStore(), "Red apples")
    for words, wanted in ((["--resume"], "last"), (["--resume", "apples"], "apples"), ([], None)):
        assert run("chat", *words, "--draft", "none").exit_code == 0
        assert opened.options["resume"] == wanted


@pytest.mark.parametrize("words", [["--plain"], ["--target", "demo"], ["demo"], []])
def test_a_chat_that_does_not_exist_is_an_error_that_names_similar_ones(
    run: Run, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    chat = ("chat", *words, "--resume")
    one_line_error(run(*chat, "files by sise"), 1, "there are no saved chats yet", code="chat_not_found")
    _save(ChatStore(), "How do I list files by size?", "Red apples", "Other files by date")
    error = one_line_error(run(*chat, "files by sise"), 1, "'files by sise'", code="chat_not_found")
    assert "did you mean 'How do I list files by size?'" in error
    assert "apples" not in error
    assert "edgespec chats list" in one_line_error(run(*chat, "zebra"), 1, code="chat_not_found")
    assert opened.load is None


@pytest.mark.parametrize("command", ["chat", "run"])
def test_a_model_can_be_named_without_an_option(run: Run, opened: Opened, command: str) -> None:
    assert run(command, "8b-q4").exit_code == 0
    assert opened.options["models"].target == "8b-q4"
    assert run(command, "8b-q4", "--no-mouse", "-n", "40").exit_code == 0
    assert opened.options["settings"]["max_tokens"] == 40
    assert run(command, "8b-q4", "--target", "1b-q4").exit_code == 2


class TestRememberedModels:
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatStore:
        monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
        monkeypatch.delenv("EDGESPEC_TARGET")
        return ChatStore()

    def _remember(self, store: ChatStore, target: str, draft: str = "auto") -> None:
        path = preferences_path(store)
        Preferences.read(path).remember(ModelReferences(target, draft), path)

    def test_a_new_chat_opens_the_models_of_the_last_one(
        self, run: Run, opened: Opened, store: ChatStore
    ) -> None:
        self._remember(store, "demo-draft", "none")
        run("chat")
        assert opened.options["models"] == ModelReferences("demo-draft", "none")
        run("chat", "--draft", "auto")
        assert opened.options["models"] == ModelReferences("demo-draft", "auto")
        run("chat", "demo")
        assert opened.options["models"] == ModelReferences("demo", "auto")

    def test_a_model_that_was_removed_is_not_downloaded_again(
        self, run: Run, opened: Opened, store: ChatStore
    ) -> None:
        for gone in ("70b-q4", "/no/such/model.gguf"):
            self._remember(store, gone)
            run("chat")
            assert opened.options["models"].target == "demo"
            assert gone in opened.options["fallback_note"]

    def test_a_model_is_opened_without_a_draft_model_that_is_gone(
        self, run: Run, opened: Opened, store: ChatStore
    ) -> None:
        self._remember(store, "demo-draft", "/no/such/draft.gguf")
        run("chat")
        assert opened.options["models"] == ModelReferences("demo-draft", "auto")
        assert "/no/such/draft.gguf" in opened.options["fallback_note"]
        run("chat", "--draft", "none")
        assert opened.options["models"] == ModelReferences("demo-draft", "none")
        assert not opened.options["fallback_note"]

    def test_a_saved_chat_opens_with_its_load_options(
        self, run: Run, opened: Opened, store: ChatStore, loaded: dict[str, Any]
    ) -> None:
        now = datetime.now(UTC)
        options: dict[str, Setting] = {"context": 768, "kv_type": "f16", "memory": "much", "unknown": 1}
        models = ModelReferences("demo", "none", options)
        messages = MessageTree.linear([Message("user", "Hello")])
        store.save(SavedChat("2026-a", messages, now, now, title="one", target="demo", models=models))
        run("chat", "--resume", "one", "--kv-type", "f32")
        assert opened.options["changed"] == {"context": 768}
        assert opened.options["models"] == ModelReferences("demo", "none", {"context": 768})
        opened.load(lambda *_: True)
        assert (loaded["draft"], loaded["context"], loaded["kv_type"]) == ("none", 768, "f32")
        models = ModelReferences("demo", "none", {"exactness": "off"})
        store.save(SavedChat("2026-a", messages, now, now, title="one", target="demo", models=models))
        run("chat", "--resume", "one", "--exact")
        assert opened.options["changed"] == {}

    def test_a_saved_chat_opens_without_the_files_that_are_gone(
        self, run: Run, opened: Opened, store: ChatStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ChatSharing, "_share", lambda *_: None)
        monkeypatch.setattr(client, "find_shared", lambda *_: None)
        loads: list[dict[str, Any]] = []

        def load(**options: Any) -> None:
            loads.append(options)
            if options.get("methods"):
                raise OptionError("there is no draft model", option="method", code="draft_missing")

        monkeypatch.setattr(edgespec, "load", load)
        now = datetime.now(UTC)
        options: dict[str, Setting] = {
            "head": "/no/head.gguf",
            "mmproj": "/no/mmproj.gguf",
            "threads": 2,
            "methods": ["lowbit"],
        }
        models = ModelReferences("demo", "/no/draft.gguf", options)
        messages = MessageTree.linear([Message("user", "Hello")])
        store.save(SavedChat("2026-a", messages, now, now, title="one", target="demo", models=models))
        run("chat", "--resume", "one")
        note = opened.options["fallback_note"]
        assert all(text in note for text in ("/no/head.gguf", "/no/mmproj.gguf", "/no/draft.gguf"))
        assert all(text in note for text in ("/draft", "/set head", "/set mmproj"))
        assert "--" not in note
        assert opened.options["changed"] == {"threads": 2, "methods": ("lowbit",)}
        opened.load(lambda *_: True)
        assert (loads[-1]["draft"], loads[-1]["threads"]) == ("auto", 2)
        assert not loads[-1].get("methods")
        assert opened.options["changed"] == opened.options["models"].options == {"threads": 2}
        run("chat", "--resume", "one", "--head", "none", "--draft", "none", "--mmproj", "none")
        assert not opened.options["fallback_note"]

    def test_a_damaged_model_does_not_lock_the_user_out(
        self, run: Run, opened: Opened, store: ChatStore, tmp_path: Path
    ) -> None:
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(b"GGUF and nothing else")
        self._remember(store, str(damaged))
        run("chat")
        with raises(EdgespecError, "edgespec chat MODEL", code="model_file_damaged"):
            opened.load(lambda *_: True)
        run("chat", str(damaged))
        with pytest.raises(EdgespecError) as caught:
            opened.load(lambda *_: True)
        assert "edgespec chat MODEL" not in str(caught.value)

    def test_the_settings_name_the_models_of_new_chats(
        self, run: Run, opened: Opened, store: ChatStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._remember(store, "demo-draft", "none")
        monkeypatch.setenv("EDGESPEC_TARGET", "demo")
        run("chat")
        assert opened.options["models"].target == "demo"

    def test_a_saved_chat_opens_its_own_models(self, run: Run, opened: Opened, store: ChatStore) -> None:
        now = datetime.now(UTC)
        messages = MessageTree.linear([Message("user", "Hello")])
        for name, models in (("2026-a", ModelReferences("demo-draft", "none")), ("2026-b", NO_MODELS)):
            store.save(SavedChat(name, messages, now, now, title=name, models=models))
        self._remember(store, "demo")
        run("chat", "--resume", "2026-a")
        assert opened.options["models"] == ModelReferences("demo-draft", "none")
        run("chat", "--resume", "2026-b")
        assert opened.options["models"].target == "demo"


def test_settings_named_on_the_command_line_replace_those_of_a_resumed_chat(
    run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_TOP_K", "7")
    run("chat", "--resume", "--temperature", "0", "--system", "Be brief.", "--method", "none")
    assert opened.options["overrides"] == {"temperature": 0.0, "system": "Be brief.", "method": "none"}
    assert opened.options["settings"] == {"temperature": 0.0, "top_k": 7}


def test_a_folder_with_the_name_of_a_model_does_not_replace_it(
    run: Run, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "auto", "own.gguf"):
        (tmp_path / name).mkdir()
    run("chat", "demo")
    assert opened.options["models"] == ModelReferences("demo", "auto")
    run("chat", "./own.gguf")
    assert opened.options["models"].target == str(tmp_path / "own.gguf")


def test_options_kept_from_another_model_go_to_load_and_plan(
    run: Run, opened: Opened, loaded: dict[str, Any]
) -> None:
    run("chat", "--target", "demo", "--context", "512", "--head", "none")
    opened.options["load_other"]("demo-draft", None, {"context": 768})(lambda *_: True)
    assert (loaded["target"], loaded["context"]) == ("demo-draft", 768)
    assert "head" not in loaded
    assert opened.options["plan_other"]("demo-draft", {"context": 768}).plan.context_tokens == 768


def test_quitting_prints_how_to_continue_the_chat(
    run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_EDGESPEC_CHAT_COMMAND", "scripts/chat")
    assert run("chat").stdout == ""
    opened.end = ChatEnd(resume="last")
    assert run("chat").stdout == "To continue this chat: scripts/chat --resume\n"
    opened.end = ChatEnd(resume="2026-a")
    assert run("chat", "--target", "8b-q4").stdout == "To continue this chat: scripts/chat --resume 2026-a\n"
    opened.end = ChatEnd(signalled=True, resume="last")
    assert (run("chat").exit_code, run("chat").stdout) == (130, "")


def test_where_texts_are_kept_goes_to_load(run: Run, opened: Opened, loaded: dict[str, Any]) -> None:
    run("chat")
    opened.load(print)
    assert (loaded["prefix_cache"], loaded["prefix_cache_memory"], loaded["prefix_cache_disk"]) == (
        "disk",
        None,
        None,
    )
    run("chat", "--prefix-cache", "none", "--prefix-cache-memory", "1GiB", "--prefix-cache-disk", "2GB")
    opened.load(print)
    assert (loaded["prefix_cache"], loaded["prefix_cache_memory"], loaded["prefix_cache_disk"]) == (
        "none",
        "1GiB",
        "2GB",
    )
    one_line_error(run("chat", "--prefix-cache", "cloud"), 2, "is not one of", code="option_invalid")


def test_exactness_chosen_in_the_chat_replaces_exact(
    run: Run, opened: Opened, loaded: dict[str, Any]
) -> None:
    run("chat", "--target", "demo", "--exact")
    for changed, exact in (({"exactness": "off"}, False), ({"context": 512}, True)):
        opened.options["load_other"]("demo", changed)(lambda *_: True)
        assert loaded["exact"] == exact
        assert loaded | changed == loaded
