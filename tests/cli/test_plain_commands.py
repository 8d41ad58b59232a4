"""The commands, files and tools of the plain chat."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, ModelReferences, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.chat.template import ChatTemplate
from edgespec.errors import ModelFileError, TemplateError
from edgespec.store.download import Progress
from edgespec.store.installed import RecommendedSetting
from edgespec.tools.server_config import servers_path
from edgespec.tui import plain_commands, screen_commands
from edgespec.tui.commands import table
from edgespec.tui.commands.results import Change, Command, Context, Result, Table
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.plain_console import PlainConsole
from edgespec.tui.plain_run import run_plain_chat
from edgespec.tui.preferences import Preferences
from edgespec.tui.worker import Load
from tests.backends.tiny_models import write_llama
from tests.cases import first
from tests.cli.conftest import ROOT
from tests.tui.driving import driving
from tests.tui.scripted import METHOD, Script, ScriptedRuntime, facts, loading
from tests.tui.tool_servers import configure, force_calls

WITH_TOOLS: dict[str, Any] = {"settings": {"temperature": 0.0, "max_tokens": 60}, "tools": True}
CODE = "Use this:\n\n```sh\nls -S\n```\n\nor\n\n```sh\ndu\n```"


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a separate configuration folder without presets and servers."""
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "config").mkdir()
    return tmp_path / "config"


class Chat:
    """The plain chat in this process. `test_plain_chat.py` runs the command."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        self.scripts: list[Script] = []
        self.runtime = ScriptedRuntime(self.scripts)
        self.load: Load = loading(self.runtime)
        self.load_other: Load = loading(
            ScriptedRuntime([Script("From the other model.")], facts("demo-draft"))
        )

    def typed(self, lines: list[str], *replies: str | Script, **options: Any) -> tuple[str, str]:
        """Type the lines. Return what the chat printed to stdout and stderr."""
        self.scripts[:] = (each if isinstance(each, Script) else Script(each) for each in replies)
        script = self._folder / "typed"
        script.write_text("\n".join([*lines, ""]), "utf-8")
        before = signal.getsignal(signal.SIGINT)
        with script.open(encoding="utf-8") as stdin:
            self._monkeypatch.setattr(sys, "stdin", stdin)
            try:
                run_plain_chat(
                    self.load,
                    models=ModelReferences("demo"),
                    store=ChatStore(self._folder / "chats"),
                    load_other=lambda *_: self.load_other,
                    **options,
                )
            finally:
                signal.signal(signal.SIGINT, before)
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err
        return out, err


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """A chat with scripted replies."""
    monkeypatch.chdir(tmp_path)
    return Chat(tmp_path, monkeypatch, capsys)


def load_demo(progress: Progress) -> edgespec.Runtime:
    return edgespec.load("demo", threads=1, measure_costs=False, progress=progress)


def saved(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text("utf-8")) for path in sorted((folder / "chats").glob("*.json"))]


def test_help_lists_the_commands_that_work_and_the_others_say_what_to_use(chat: Chat) -> None:
    others = [command for command in table.COMMANDS if command.instead]
    out, err = chat.typed(["/help", *(f"/{command.name}" for command in others)])
    listed = [line.split()[0].strip("/:") for line in out.splitlines() if line.startswith("/")]
    assert listed == [command.name for command in table.COMMANDS if not command.instead]
    for command in others:
        assert f"/{command.name} is not available in the plain chat. {command.instead}" in err


def _stamp(context: Context) -> Result:
    """A command that both chats know only from the table."""

    def apply(chat: OpenChat) -> None:
        chat.title = context.argument

    return Table("Stamp", [("stamped", context.runtime.target.name)]), Change(apply, "It is stamped.")


async def test_a_command_is_added_in_one_place(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command("stamp", "[text]", "stamp the title of this chat", _stamp, ("seal",))
    monkeypatch.setattr(table, "COMMANDS", (*table.COMMANDS, command))
    out, err = chat.typed(["hello", "/seal in wax", "/load wax", "/help", "/stmp"], "Hi.")
    assert "stamped: demo\nIt is stamped.\n" in out
    assert "Opened “in wax”." in err
    assert "\n/stamp [text]: stamp the title of this chat\n" in out
    assert "Did you mean /stamp?" in err
    async with driving(chat.load, tmp_path, resume="last", size=(80, 80)) as d:
        await d.write("/sta")
        await d.sees("/stamp [text] · stamp the title of this chat")
        await d.press("tab")
        await d.write("twice")
        await d.press("enter")
        await d.said("It is stamped.")
        assert "stamped" in d.transcript()
        assert d.chat.current_chat.title == "twice"
        await d.press("f1")
        await d.sees("/stamp [text]")


def test_both_chats_do_the_same_actions() -> None:
    assert plain_commands.ACTIONS.keys() <= screen_commands.ACTIONS.keys()


def test_a_title_that_no_chat_has_leaves_the_chat_open(chat: Chat, tmp_path: Path) -> None:
    out, err = chat.typed(["one", "/load pines", "two"], "First.", "Second.")
    assert out == "First.\nSecond.\n"
    assert "No saved chat has 'pines' in its title. Type /load for the list of chats." in err
    (found,) = saved(tmp_path)
    assert len(found["messages"]) == 4


def test_the_system_prompt_is_set_by_both_commands(chat: Chat) -> None:
    out, _ = chat.typed(["/set system Be brief.", "/set system", "/system none"])
    assert out == "System prompt: Be brief.\nSystem prompt: Be brief.\nSystem prompt: none\n"


def test_copy_prints(chat: Chat, tmp_path: Path) -> None:
    lines = ["/copy", "sizes", "/copy", "/copy code", "/copy code 1", "/copy code 3", "/copy chat", "/copy x"]
    out, err = chat.typed(lines, CODE)
    assert out == f"{CODE}\n{CODE}\ndu\nls -S\n**You:**\n\nsizes\n\n**Model:**\n\n{CODE}\n"
    assert "There is nothing to copy yet." in err
    assert "There is no code block 3. The last reply has 2 code blocks." in err
    assert "Unknown argument 'x' for /copy." in err


def test_chats_are_exported_imported_and_found(chat: Chat, tmp_path: Path) -> None:
    lines = ["/export", "sizes", "/export one.json", "/export one.json", "/import one.json", "/import"]
    lines += ["/search OAKS", "/search pines", "/pin", "/load", "/load sizes"]
    out, err = chat.typed(lines, "Pines are tall.")
    assert f"Exported this chat to {tmp_path / 'one.json'}.\n" in out
    assert "Imported 1 chat from one.json. Type /load for the list of chats.\n" in out
    assert out.count("sizes (now, 2 messages): Pines are tall.\n") == 2
    assert "sizes (pinned, now, 2 messages)\n" in out
    for text in (
        "There is nothing to export: the chat is empty.",
        "The file one.json already exists.",
        "/import needs the path of a file.",
        "No chat contains “OAKS”.",
        "Opened “sizes”.",
    ):
        assert text in err
    assert len(saved(tmp_path)) == 2


def test_messages_are_deleted_restored_and_forked(chat: Chat, tmp_path: Path) -> None:
    lines = ["/fork", "/delete", "/undo", "/pin", "one", "two", "/delete", "/undo", "/delete", "/fork"]
    out, err = chat.typed(lines, "First.", "Second.")
    assert "Deleted 2 messages. Type /undo to restore them.\nRestored. The chat has 4 messages." in out
    assert "This is a new chat with 2 messages from “one”, which is unchanged." in out
    for text in ("nothing to fork", "no message to delete", "nothing to restore", "nothing to pin"):
        assert text in err
    assert [len(each["messages"]) for each in saved(tmp_path)] == [2, 2]
    assert sorted(each["title"] for each in saved(tmp_path)) == ["one", "one (fork)"]


def test_presets_are_saved_and_used(chat: Chat, tmp_path: Path, config: Path) -> None:
    lines = ["/preset", "/preset nope", "/system Be brief.", "/set temperature 0", "/preset save short"]
    lines += ["/preset save short", "perhaps", "no", "/new", "/show", "/preset", "/preset short", "/system"]
    out, err = chat.typed(lines)
    assert "There are no presets yet. Type /preset save NAME" in out
    assert f"Saved the preset short in {config / 'presets' / 'short.toml'}." in out
    assert "The preset was not saved." in out
    before, _, after = out.partition("\nshort\n")
    assert "system prompt: none" in before
    assert "The preset short takes effect with your next message." in after
    assert "System prompt: Be brief." in after
    assert "There is no preset 'nope'." in err
    assert "Replace the existing preset short? Type yes or no.\nType yes or no." in err


def test_reasoning_is_turned_off_only_if_the_model_can(chat: Chat) -> None:
    out, err = chat.typed(["/think", "/think off"])
    assert "Reasoning: auto, the model's default." in out
    assert "Reasoning cannot be turned on or off for the model demo." in err
    source = (
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
    )
    chat.runtime.template = ChatTemplate(source, "", "")
    out, _ = chat.typed(["/think off", "/think"])
    chat.runtime.template.close()
    assert "From your next message on, the model will be asked not to reason.\nReasoning: off." in out


def test_files_are_attached(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Pines are tall.")
    (tmp_path / "data.bin").write_bytes(bytes(range(256)))
    chat.load = load_demo
    lines = ["/set max_tokens 4", "What is in @notes.txt?", "And in @data.bin?", "And in @missing.txt?"]
    _, err = chat.typed(lines)
    assert "Attached notes.txt (" in err
    assert "The message was not sent: data.bin" in err
    assert "No file matches @missing.txt, so this is sent as text." in err
    (found,) = saved(tmp_path)
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"] * 2
    assert found["messages"][0]["files"][0]["text"] == "Pines are tall."


def test_paths_may_be_quoted_and_values_contain_equals_signs(chat: Chat, tmp_path: Path) -> None:
    lines = ["sizes", '/export "one two.json"', "/import 'one two.json'"]
    lines += ["/set stop a=b", "/set seed=5", "/set top_k = 6", "/set parameter temperature 0.5", "more"]
    out, _ = chat.typed(lines)
    assert f"{tmp_path / 'one two.json'}.\n" in out
    assert "Imported 1 chat" in out
    (settings,) = (each["sampling"] for each in saved(tmp_path) if each["sampling"])
    assert settings == {"stop": ["a=b"], "seed": 5, "top_k": 6, "temperature": 0.5}


def test_options_that_are_reset_are_not_used_by_later_chats(chat: Chat, tmp_path: Path) -> None:
    chat.load_other = loading(ScriptedRuntime())
    chat.typed(["/draft demo-draft", "/draft default", "hello"])
    assert saved(tmp_path)[0]["models"] == {"target": "demo", "draft": ""}


def test_a_method_that_the_new_model_lacks_is_removed_from_new_chats_too(chat: Chat, tmp_path: Path) -> None:
    chat.typed(["/model demo-draft", "one", "/new", "two"], settings={"method": "lowbit", "seed": 1})
    assert [each["sampling"] for each in saved(tmp_path)] == [{"seed": 1}, {"seed": 1}]


def test_a_chosen_model_is_saved_with_the_chat(chat: Chat, tmp_path: Path) -> None:
    chat.typed(["one", "/model demo-draft"])
    (chat_file,) = saved(tmp_path)
    assert (chat_file["target"], chat_file["models"]["target"]) == ("demo-draft", "demo-draft")


def test_the_model_is_switched(chat: Chat, tmp_path: Path) -> None:
    path = ROOT / "models" / "demo-draft-q8_0.gguf"
    out, err = chat.typed(["one", f"/model {path}", "two", "/model nope", "/model"], "First.")
    assert out.startswith("First.\nThis chat now uses demo-draft.\nFrom the other model.\n")
    assert "There is no model named nope." in err
    listed = out.partition("On this machine:\n")[2]
    assert listed.startswith("demo: 12.0 MiB, draft model demo-draft\n")
    listed, _, to_download = listed.partition("Models to download that fit in memory: ")
    assert "smollm2" not in listed
    assert to_download.endswith(").\n")
    assert len(saved(tmp_path)[0]["messages"]) == 4


def test_a_chat_that_is_opened_loads_its_own_model(chat: Chat, tmp_path: Path) -> None:
    path = ROOT / "models" / "demo-draft-q8_0.gguf"
    chat.typed(["one", f"/model {path}", "two"], "First.")
    out, err = chat.typed(["/load one"], "First.")
    assert f"Loading {path}." in err
    assert out.endswith("This chat now uses demo-draft.\n")


def test_a_chat_whose_model_is_missing_says_so(chat: Chat, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    tree = MessageTree.linear([Message("user", "Question"), Message("assistant", "Answer")])
    store = ChatStore(tmp_path / "chats")
    models = ModelReferences("/no/such/model.gguf")
    store.save(SavedChat("one", tree, now, now, target="large", title="one", models=models))
    for lines, options in ((["/load one"], {}), ([], {"resume": "one"})):
        _, err = chat.typed(lines, **options)
        assert "This chat used large, and now uses demo." in err
    models = ModelReferences("demo", "/no/such/draft.gguf")
    store.save(SavedChat("two", tree, now, now, target="demo", title="two", models=models))
    _, err = chat.typed(["/load two"])
    assert "The draft model /no/such/draft.gguf was not found" in err


def test_a_model_opened_by_path_stays_listed(chat: Chat, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "own.gguf")
    chat.runtime.target = replace(chat.runtime.target, path=str(path))
    out, _ = chat.typed(["/model", "/model demo-draft", "/model"])
    before, _, after = out.partition("This chat now uses demo-draft.")
    assert f"{path}: in use, " in before
    assert f"{path}: " in after
    assert f"{path}: in use" not in after


def test_the_mark_of_a_stopped_reply_survives_a_restart(chat: Chat, tmp_path: Path) -> None:
    reply = Message("assistant", "Half of", ended_early="cancelled")
    now = datetime.now(UTC)
    tree = MessageTree.linear([Message("user", "Question"), reply])
    ChatStore(tmp_path / "chats").save(SavedChat("stopped", tree, now, now))
    out, err = chat.typed(["/continue"], " the answer.", resume="last")
    assert "This reply was stopped. Type /continue to finish it." in err
    assert out == "Half of\n the answer.\n"
    (found,) = saved(tmp_path)
    assert "ended_early" not in found["messages"][-1]


def test_show_names_the_source_of_recommended_settings(chat: Chat) -> None:
    chat.runtime.recommended_sampling["top_k"] = RecommendedSetting(20, "the model's files")
    out, _ = chat.typed(["/show", "/set top_k"])
    assert out.count("top_k: 20 (default, from the model's files)") == 2


def test_a_model_that_cannot_be_loaded_leaves_the_old_one(chat: Chat) -> None:
    def refuse(progress: Progress) -> edgespec.Runtime:
        raise ModelFileError("the file is damaged", "download it again")

    chat.load_other = refuse
    path = ROOT / "models" / "demo-draft-q8_0.gguf"
    out, err = chat.typed([f"/model {path}", "one"], "First.")
    assert out == "This chat still uses demo.\nFirst.\n"
    assert "The file is damaged. Download it again." in err


def test_a_chat_whose_model_cannot_be_loaded_keeps_it_until_the_next_reply(
    chat: Chat, tmp_path: Path
) -> None:
    def refuse(progress: Progress) -> edgespec.Runtime:
        raise ModelFileError("the file is damaged", "download it again")

    chat.load_other = refuse
    now = datetime.now(UTC)
    tree = MessageTree.linear([Message("user", "Question"), Message("assistant", "Answer")])
    models = ModelReferences("demo-draft", "none")
    store = ChatStore(tmp_path / "chats")
    store.save(SavedChat("one", tree, now, now, target="demo-draft", title="one", models=models))
    out, _ = chat.typed(["/load one"])
    assert "For now, this chat uses demo." in out
    (chat_file,) = saved(tmp_path)
    assert (chat_file["target"], chat_file["models"]["target"]) == ("demo-draft", "demo-draft")
    chat.typed(["/load one", "Again"], "A reply.")
    (chat_file,) = saved(tmp_path)
    assert (chat_file["target"], chat_file["models"]) == ("demo", {"target": "demo", "draft": ""})


def test_a_draft_model_chosen_for_a_missing_one_is_used_by_later_chats(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        PlainConsole, "is_interactive", property(lambda _: True, lambda *_: None), raising=False
    )
    path = tmp_path / "preferences.json"
    Preferences.read(path).remember(ModelReferences("demo", "/no/such/draft.gguf"), path)
    chat.load_other = loading(ScriptedRuntime())
    chat.typed(["/context 768"], fallback_note="It was not found.")
    assert Preferences.read(path).draft == "/no/such/draft.gguf"
    chat.typed(["/draft demo-draft"], fallback_note="It was not found.")
    assert Preferences.read(path).draft == "demo-draft"


def test_a_method_that_a_resumed_chat_cannot_use_is_removed(chat: Chat, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    tree = MessageTree.linear([Message("user", "Question"), Message("assistant", "Answer")])
    store = ChatStore(tmp_path / "chats")
    store.save(SavedChat("one", tree, now, now, title="one", sampling={"method": "lowbit", "seed": 1}))
    chat.typed(["Again"], resume="one")
    assert saved(tmp_path)[0]["sampling"] == {"seed": 1}


@pytest.fixture
def forced(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    chat.load = load_demo
    return force_calls(monkeypatch)


@pytest.mark.parametrize(
    ("answers", "calls", "questions", "results"),
    [
        (["maybe", "yes", "no"], 2, 2, ["returned", "failed. The user does not allow this call."]),
        pytest.param(["chat"], 2, 1, ["returned"], marks=pytest.mark.long),
        (["always"], 2, 1, ["returned"]),
    ],
)
def test_a_tool_is_called_after_a_typed_answer(
    chat: Chat,
    forced: list[str],
    tmp_path: Path,
    answers: list[str],
    calls: int,
    questions: int,
    results: list[str],
) -> None:
    configure("good", "hostile_server.py", "polite")
    forced += ["good_act"] * calls
    out, err = chat.typed(["/tools", "Is red warm?", *answers], **WITH_TOOLS)
    assert "The model can now call" in out
    assert "Server good: on, " in out
    assert "  act: " in out
    assert err.count("wants to call the tool act of the server good with these arguments:\n{\n") == questions
    for result in results:
        assert f"Tool good_act {result}" in err
    assert ("Type yes, chat, always, no or stop." in err) == ("maybe" in answers)
    (found,) = saved(tmp_path)
    roles = [message["role"] for message in found["messages"]]
    assert roles == ["user", *["assistant", "tool"] * calls, "assistant"]
    assert ("allow = " in servers_path().read_text()) == (answers == ["always"])


@pytest.mark.parametrize(
    "answers",
    first([["stop", "/continue", "yes"], ["stop", "Never mind."], []]),
)
def test_a_stopped_call_is_not_made(
    chat: Chat, forced: list[str], tmp_path: Path, answers: list[str]
) -> None:
    configure("good", "hostile_server.py", "polite")
    forced.append("good_act")
    _, err = chat.typed(["Is red warm?", *answers], **WITH_TOOLS)
    assert "Tool good_act failed. The user stopped the reply before this call was made." in err
    (found,) = saved(tmp_path)
    roles = [message["role"] for message in found["messages"]]
    assert roles[:3] == ["user", "assistant", "tool"]
    assert len(roles) == (3 if not answers else 6 if "/continue" in answers else 5)


def test_a_refused_message_leaves_no_chat(chat: Chat, tmp_path: Path) -> None:
    _, err = chat.typed(["hello"], Script(error=TemplateError("no template", "choose another model")))
    assert "No template." in err
    assert not ChatStore(tmp_path / "chats").list(), "the next chat must not offer to finish the reply"


def test_drafting_is_explained_once_on_a_terminal(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    explained = "A small draft model guesses the next words"
    line = "demo · context 1,024 tokens · speed-up: draft model demo-draft"
    assert explained not in chat.typed([])[1]
    # The console sets this attribute when it is created.
    terminal = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(PlainConsole, "is_interactive", terminal, raising=False)
    first, second = chat.typed([])[1], chat.typed([])[1]
    assert line in first
    assert explained in first
    assert line in second
    assert explained not in second


def test_a_speed_up_that_is_not_used_is_not_mentioned_under_replies(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = replace(METHOD, effective="none", reason="guessing does not save time")
    monkeypatch.setattr("tests.tui.scripted.LIVE", live)
    assert "speed-up" not in chat.typed(["hello"], "Hi.")[1].splitlines()[-1]
    assert "guessing does not save time" in chat.typed(["hello", "/why"], "Hi.")[0]
