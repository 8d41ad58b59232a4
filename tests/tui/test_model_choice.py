"""Load options changed in a chat: how they are changed, and what other models and saved chats keep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from textual.widgets import Input

import edgespec
from edgespec import Preview, Runtime
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, ModelReferences, SavedChat, Setting, chat_from_json
from edgespec.chat.store import ChatStore
from edgespec.errors import ModelFileError, OptionError
from edgespec.options.option import Choice, Flag
from edgespec.store.catalogue import models_folder
from edgespec.store.download import Progress
from edgespec.tui.model_choice import (
    ChosenLoadOptions,
    kept_options,
    load_options_of,
    models_here,
    options_to_open,
    plan_kept,
    references_after,
)
from edgespec.tui.preferences import Preferences
from edgespec.tui.settings import ALL_LOAD_SETTINGS, with_load_setting
from edgespec.tui.worker import Load
from tests.raising import raises
from tests.tui.driving import driving, until
from tests.tui.scripted import ScriptedRuntime, facts, loading

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass
class Planner:
    """Plans a model that was trained for `trained` tokens, `room` of which fit in memory."""

    trained: int = 8192
    room: int = 8192
    refused: str = ""

    def __call__(self, _reference: str, options: Mapping[str, Any]) -> Preview:
        if self.refused in options:
            raise OptionError("not for this model", option=self.refused)
        fits = options.get("context", 0) <= self.room
        plan = SimpleNamespace(fits=fits, fits_without_streaming=fits)
        return cast("Preview", SimpleNamespace(plan=plan, trained_context_tokens=self.trained))


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"context": 4096, "kv_type": "q8_0", "memory": 1 << 32}, {"context", "kv_type", "memory"}),
        ({"draft": "demo-draft", "head": "demo-head", "mmproj": "own.gguf"}, set()),
        ({"draft": "none", "head": "none"}, {"draft", "head"}),
        ({"methods": ("lowbit",), "trust": True, "adapter": ("own.gguf",)}, {"trust"}),
    ],
)
def test_options_of_one_model_are_not_kept_for_another(changed: dict[str, Any], kept: set[str]) -> None:
    assert kept_options(changed) == {name: changed[name] for name in kept}


@pytest.mark.parametrize(
    ("planner", "kept"),
    [
        (Planner(), {"context": 4096, "kv_type": "q8_0"}),
        (Planner(trained=2048), {"kv_type": "q8_0"}),
        (Planner(trained=0), {"context": 4096, "kv_type": "q8_0"}),
        (Planner(room=2048), {"kv_type": "q8_0"}),
        (Planner(refused="kv_type"), {"context": 4096}),
    ],
)
def test_options_that_do_not_suit_a_model_are_left_out(planner: Planner, kept: dict[str, Any]) -> None:
    assert plan_kept(planner, "other", {"context": 4096, "kv_type": "q8_0"}, {"memory": 1})[1] == kept


def test_other_errors_of_a_plan_are_raised() -> None:
    def plan(_reference: str, _options: Mapping[str, Any]) -> Preview:
        raise ModelFileError("it is damaged", "download it again")

    with raises(ModelFileError, code="model_file_damaged"):
        plan_kept(plan, "other", {"context": 4096}, {})
    with raises(OptionError, code="option_invalid"):
        plan_kept(Planner(refused="memory"), "other", {"context": 4096}, {"memory": 1})


@pytest.mark.parametrize(
    ("own", "changed", "expected"),
    [
        (ModelReferences("demo"), {"context": 512}, None),
        (ModelReferences("demo", "none"), {}, {"draft": "none"}),
        (ModelReferences("demo", "auto", {"context": 512}), {"context": 512}, None),
        (
            ModelReferences("demo", "", {"context": 512}),
            {"context": 768, "kv_type": "f16"},
            {"draft": "auto", "context": 512, "kv_type": "f16"},
        ),
        (ModelReferences("demo", "", {"context": "many", "unknown": 3}), {}, None),
        (ModelReferences("demo", "", {"threads": 3}), {"threads": 3}, None),
    ],
)
def test_a_chat_is_loaded_again_only_for_options_that_it_names(
    own: ModelReferences, changed: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert options_to_open(own, ModelReferences("demo"), changed, is_other=False) == expected


async def test_changed_options_stay_when_another_model_is_loaded(tmp_path: Path) -> None:
    loads: list[tuple[Any, ...]] = []

    def load_other(*arguments: Any) -> Load:
        loads.append(arguments)
        return loading(ScriptedRuntime(target=facts(str(arguments[0]))))

    async with driving(
        loading(ScriptedRuntime()), tmp_path, load_other=load_other, plan_other=Planner(trained=2048)
    ) as d:
        await d.send("/set kv_type q8_0")
        await d.said("kv_type is now")
        await d.settled()
        await d.send("/context 4096")
        await d.said("context is now")
        await d.settled()
        await d.send("/model demo-draft")
        await d.said("This chat now uses demo-draft. For this model, context went back to the default.")
        await d.settled()
        assert d.chat.changed_load_options == {"kv_type": "q8_0"}
        assert d.chat.models == ModelReferences("demo-draft", "", {"kv_type": "q8_0"})
        assert loads[-1] == ("demo-draft", None, {"kv_type": "q8_0"})
        # The chat remembers its options, and restores them after a chat with other options.
        await d.say("Hello")
        first = d.chat.current_chat.id
        assert d.app.store.load(first).models == d.chat.models
        await d.say("/new")
        await d.send("/set kv_type f16")
        await d.said("kv_type is now")
        await d.settled()
        assert d.chat.changed_load_options == {"kv_type": "f16"}
        await d.send("/load Hello")
        await until(d.pilot, lambda: d.chat.changed_load_options.get("kv_type") == "q8_0")
        await d.settled()
        assert d.chat.current_chat.id == first


async def test_a_chat_without_its_draft_model_keeps_its_target(tmp_path: Path) -> None:
    messages = MessageTree.linear([Message("user", "Hello"), Message("assistant", "Hi")])
    models = ModelReferences("demo-draft", str(tmp_path / "gone.gguf"))
    ChatStore(tmp_path / "chats").save(
        SavedChat("one", messages, NOON, NOON, target="demo-draft", title="one", models=models)
    )
    new = ScriptedRuntime(target=facts("demo-draft"))
    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=lambda *_: loading(new)) as d:
        await d.send("/load one")
        await d.said("This chat now uses demo-draft.")
        await d.said(f"The draft model {tmp_path / 'gone.gguf'} was not found")
        await d.settled()
        assert d.chat.models == ModelReferences("demo-draft", "auto")


async def test_chats_that_differ_only_in_the_draft_model_load_their_own(tmp_path: Path) -> None:
    messages = MessageTree.linear([Message("user", "Hello"), Message("assistant", "Hi")])
    models = ModelReferences("demo", "none")
    ChatStore(tmp_path / "chats").save(
        SavedChat("one", messages, NOON, NOON, target="demo", title="one", models=models)
    )
    new = ScriptedRuntime(draft=None)
    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=lambda *_: loading(new)) as d:
        await d.send("/load one")
        await until(d.pilot, lambda: d.chat.runtime.draft is None, "the models of the chat")
        await d.settled()
        assert d.chat.models == models


async def test_models_that_stand_in_for_missing_ones_are_not_remembered(tmp_path: Path) -> None:
    def load_other(reference: str, *_: object) -> Load:
        return loading(ScriptedRuntime(target=facts(reference)))

    note = "The model that you used last, 8b, was not found."
    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=load_other, fallback_note=note) as d:
        await d.said(note)
        await d.send("/context 512")
        await d.said("context is now")
        await d.settled()
        assert d.app.preferences.target == ""
        await d.send("/model demo-draft")
        await d.said("This chat now uses demo-draft.")
        await d.settled()
        assert d.app.preferences.target == "demo-draft"


async def test_a_resumed_chat_uses_the_settings_of_the_command_line(tmp_path: Path) -> None:
    messages = MessageTree.linear([Message("user", "Hello"), Message("assistant", "Hi")])
    saved = SavedChat(
        "one", messages, NOON, NOON, system="Be long.", sampling={"temperature": 1.0, "top_k": 3}
    )
    ChatStore(tmp_path / "chats").save(saved)
    overrides = {"temperature": 0.0, "system": "Be brief."}
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="one", overrides=overrides) as d:
        await until(d.pilot, lambda: d.chat.current_chat.id == "one", "the chat")
        assert d.chat.current_chat.settings == {"temperature": 0.0, "top_k": 3}
        assert d.chat.current_chat.system == "Be brief."


# A valid value of each kind of option that is neither a choice nor a flag, as a user types it.
_TYPED = {
    "draft": "none",
    "memory": "8GiB",
    "context": "512",
    "headroom": "1GiB",
    "reserve": "1GiB",
    "parallel": "2",
    "threads": "2",
    "gpu_layers": "1",
    "experts": "3",
    "kv_type": "q8_0",
    "adapter": "{0}=0.5,{0}",
    "mmproj": "{0}",
    "workers": "192.168.1.20:50052",
    "prefix_cache_memory": "1GiB",
    "prefix_cache_disk": "1GiB",
    "draft_confidence": "0.5",
    "draft_branches": "3,2",
    "draft_window": "64",
    "draft_sinks": "2",
    "draft_gpu_layers": "1",
    "exit_layer": "2",
    "head": "{0}",
    "corpus": "{0}",
}


@pytest.mark.parametrize("name", ALL_LOAD_SETTINGS)
def test_a_saved_chat_keeps_each_load_option(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file.gguf"
    file.touch()
    kind = ALL_LOAD_SETTINGS[name].kind
    typed = kind.values[-1] if isinstance(kind, Choice) else "off" if isinstance(kind, Flag) else _TYPED[name]
    for text in (typed.format(file), "default"):
        changed = with_load_setting({}, name, text)
        models = references_after(
            ModelReferences("demo"), "demo", ChosenLoadOptions.of({}, changed, is_other=False)
        )
        messages = MessageTree.linear([Message("user", "Hello")])
        saved = SavedChat("one", messages, NOON, NOON, target="demo", models=models)
        read = chat_from_json(json.loads(saved.encoded())).models
        assert load_options_of(read) == {"draft": "auto", **changed}


@pytest.mark.parametrize("name", ["mmproj", "adapter", "corpus"])
def test_a_file_in_the_current_folder_is_found_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.gguf").touch()
    options = ChosenLoadOptions.of({}, with_load_setting({}, name, "file.gguf"), is_other=False)
    models = references_after(ModelReferences("demo"), "demo", options)
    monkeypatch.chdir("/")
    assert models_here(models) == models


def test_methods_that_were_loaded_for_a_chat_are_kept() -> None:
    options = ChosenLoadOptions.of({}, {"methods": ("lookahead",)}, is_other=False)
    models = references_after(ModelReferences("demo"), "demo", options)
    assert load_options_of(models)["methods"] == ("lookahead",)


@pytest.mark.parametrize("name", ["head", "mmproj", "adapter", "corpus"])
def test_a_file_that_is_gone_is_not_loaded(name: str, tmp_path: Path) -> None:
    file = tmp_path / "demo-head.gguf"
    shutil.copy(models_folder() / "demo-head-q8_0.gguf", file)
    given: Setting = [f"{file}=1"] if name == "adapter" else str(file)
    models = ModelReferences("demo", "none", {name: given, "context": 512})
    assert models_here(models) == models
    file.unlink()
    assert models_here(models) == ModelReferences("demo", "none", {"context": 512})


async def test_a_chat_opens_without_a_head_and_a_method_that_are_gone(tmp_path: Path) -> None:
    messages = MessageTree.linear([Message("user", "Hello"), Message("assistant", "Hi")])
    head = tmp_path / "gone.gguf"
    options: dict[str, Setting] = {"head": str(head), "methods": ["lowbit"]}
    chat = SavedChat(
        "one",
        messages,
        NOON,
        NOON,
        target="demo-draft",
        title="one",
        models=ModelReferences("demo-draft", "", options),
        sampling={"method": "lowbit"},
    )
    ChatStore(tmp_path / "chats").save(chat)

    def load_other(reference: str, changed: Mapping[str, Any]) -> Load:
        assert "head" not in changed
        if "methods" not in changed:
            return loading(ScriptedRuntime(target=facts(reference)))

        def fail(_progress: Progress) -> Runtime:
            raise OptionError("there is no draft model", option="method", code="draft_missing")

        return fail

    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=load_other) as d:
        await d.send("/load one")
        await d.said("This chat now uses demo-draft.")
        await d.said(f"The head {head} was not found")
        await d.said("/set head")
        await d.settled()
        assert d.chat.models == ModelReferences("demo-draft", "auto")
        assert d.chat.current_chat.settings == {}


async def test_a_chat_whose_model_cannot_be_loaded_keeps_it_until_the_next_reply(tmp_path: Path) -> None:
    messages = MessageTree.linear([Message("user", "Hello"), Message("assistant", "Hi")])
    store, models = ChatStore(tmp_path / "chats"), ModelReferences("demo-draft")
    store.save(SavedChat("one", messages, NOON, NOON, target="demo-draft", title="one", models=models))

    def load_other(*_: Any) -> Load:
        def fail(_progress: Progress) -> Runtime:
            raise ModelFileError("it is damaged", "download it again")

        return fail

    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=load_other) as d:
        await d.send("/load one")
        await d.said("For now, this chat uses demo.")
        await d.settled()
        saved = store.load("one")
        assert (saved.target, saved.models) == ("demo-draft", models)
        await d.say("Again")
        saved = store.load("one")
        assert (saved.target, saved.models) == ("demo", ModelReferences("demo"))


async def test_a_draft_model_chosen_for_a_missing_one_is_used_by_later_chats(tmp_path: Path) -> None:
    runtime, path = ScriptedRuntime(), tmp_path / "preferences.json"
    Preferences.read(path).remember(ModelReferences("demo", "/no/such/draft.gguf"), path)
    async with driving(
        loading(runtime), tmp_path, load_other=lambda *_: loading(runtime), fallback_note="It was not found."
    ) as d:
        await d.send("/context 768")
        await d.said("context is now")
        await d.settled()
        assert Preferences.read(path).draft == "/no/such/draft.gguf"
        await d.send("/draft demo-draft")
        await until(d.pilot, lambda: Preferences.read(path).draft == "demo-draft")
        await d.settled()


ASK = "How do I list files by size?"


def load_here(reference: str, changed: Mapping[str, Any] | None = None) -> Load:
    options = {"draft": "none", "context": 512, "measure_costs": False, "exactness": "off", **(changed or {})}
    return lambda progress: edgespec.load(reference, **options, progress=progress)


async def test_the_chat_goes_on_with_the_changed_options(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await d.say(ASK)
        messages = d.chat.current_chat.messages
        await d.send("/context 768")
        await d.said("context is now 768.")
        await d.settled()
        assert d.chat.current_chat.messages == messages
        await d.send("/draft demo-draft")
        await d.said("draft is now demo-draft.")
        await until(d.pilot, lambda: d.chat.runtime.draft is not None)
        await d.settled()
        assert d.chat.runtime.context_tokens == 768
        assert d.chat.models == ModelReferences("demo", "demo-draft", {"context": 768})
        await d.send("/set context default")
        await until(d.pilot, lambda: d.chat.runtime.context_tokens == 512)
        await d.settled()
        assert d.chat.runtime.draft is not None
        await d.say("And by date?")
        assert len(d.chat.current_chat.messages) == 4


async def test_a_draft_model_that_is_reset_is_not_used_by_later_chats(tmp_path: Path) -> None:
    runtime = ScriptedRuntime()
    async with driving(loading(runtime), tmp_path, load_other=lambda *_: loading(runtime)) as d:
        await d.send("/draft demo-draft")
        await until(d.pilot, lambda: d.app.preferences.draft == "demo-draft")
        await d.settled()
        await d.send("/draft default")
        await until(d.pilot, lambda: not d.app.preferences.draft, seconds=10)
        await d.settled()
        assert d.chat.models == ModelReferences("demo")


async def test_a_command_that_waited_for_the_model_keeps_the_options_before_it(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        switch = d.chat.use_runtime

        async def and_send(runtime: Any, **options: Any) -> None:
            await switch(runtime, **options)
            d.chat.use_runtime = switch  # type: ignore[method-assign]
            await d.chat.send_text("/draft demo-draft")

        d.chat.use_runtime = and_send  # type: ignore[method-assign]
        await d.send("/context 768")
        await until(d.pilot, lambda: d.chat.runtime.draft is not None)
        assert d.chat.runtime.context_tokens == 768


@pytest.mark.long
@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("/context many", "must be an integer"),
        ("/set context 5", "must be an integer"),
        ("/draft no-such-model", "no-such-model"),
        ("/set kv_type", "kv_type"),
        ("/set num_ctx", "context"),
    ],
)
async def test_nothing_is_loaded_for_a_value_that_is_missing_or_wrong(
    tmp_path: Path, typed: str, shown: str
) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        before = d.chat.runtime
        await d.send(typed)
        await d.said(shown)
        assert d.chat.runtime is before


async def test_the_settings_form_changes_the_options_too(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await d.press("f6")
        await d.pilot.pause()
        fields = {field.name: field for field in d.app.screen.query(Input)}
        assert {"draft", "context", "head", "kv_type", "memory"} <= fields.keys()
        assert fields["context"].placeholder == "512"
        fields["context"].value = "many"
        await d.press("ctrl+s")
        await d.sees("must be an integer")
        fields["context"].value, fields["temperature"].value = "768", "0.5"
        await d.press("ctrl+s")
        await until(d.pilot, lambda: d.chat.runtime.context_tokens == 768)
        await d.settled()
        assert d.chat.current_chat.settings == {"temperature": 0.5}
        await d.press("f6")
        await d.pilot.pause()
        fields = {field.name: field for field in d.app.screen.query(Input)}
        assert fields["context"].value == "768"
        fields["context"].value = ""
        await d.press("ctrl+s")
        await until(d.pilot, lambda: d.chat.runtime.context_tokens == 512)
        await d.settled()
        assert d.chat.changed_load_options == {}


async def test_an_unknown_draft_model_in_the_form_changes_nothing(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        before = d.chat.runtime
        await d.press("f6")
        await d.pilot.pause()
        fields = {field.name: field for field in d.app.screen.query(Input)}
        fields["draft"].value, fields["temperature"].value = "no-such-model", "0.5"
        await d.press("ctrl+s")
        await d.said("no-such-model")
        assert d.chat.runtime is before
        assert d.chat.current_chat.settings == {}


async def test_options_that_fail_leave_the_model_as_it_was(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await d.send("/set kv_type q9_9")
        await d.said("This chat still uses demo.")
        await d.settled()
        assert d.chat.changed_load_options == {}
        await d.say(ASK)
        assert len(d.chat.current_chat.messages) == 2


async def test_a_context_beyond_the_trained_one_comes_with_a_warning(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await d.say(ASK)
        trained = d.chat.runtime.target.trained_context_tokens
        await d.send(f"/context {trained * 2}")
        await d.said(f"context is now {trained * 2:,}.")
        await d.said(f"so consider /context {trained}.")
        await d.settled()


async def test_messages_after_a_changed_option_wait_for_the_model(tmp_path: Path) -> None:
    """Both were typed while the first model loaded."""
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await d.chat.send_typed(["/context 768", ASK])
        await until(d.pilot, lambda: len(d.chat.current_chat.entries) == 2, "the reply", seconds=30)
        await d.settled()
        assert d.chat.runtime.context_tokens == 768


async def test_a_method_that_was_not_loaded_loads_the_model_again(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        with raises(OptionError, code="method_unavailable"):
            d.chat.runtime.method_for("lookahead")
        await d.send("/set method lookahead")
        await d.said("The method lookahead is loaded.")
        await d.settled()
        assert d.chat.current_chat.settings == {"method": "lookahead"}
        await d.say(ASK)
        (reply,) = (entry.reply for entry in d.chat.current_chat.entries if entry.reply)
        assert reply.method.effective == "lookahead"


async def test_options_outside_the_settings_form_can_be_changed_too(tmp_path: Path) -> None:
    loads: list[Mapping[str, Any]] = []

    def load_other(_reference: str, changed: Mapping[str, Any]) -> Load:
        loads.append(changed)
        return loading(ScriptedRuntime())

    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=load_other) as d:
        for typed, shown in (
            ("/set mmproj auto", "mmproj is now off."),
            ("/set flash-attention off", "flash_attention is now off."),
            ("/set parallel default", "parallel is now 1."),
        ):
            await d.send(typed)
            await d.said(shown)
            await d.settled()
        assert loads[-1] == {"mmproj": "auto", "flash_attention": "off", "parallel": 1}
        await d.send("/set flash_attention")
        await d.said("flash_attention: off.")
        await d.send("/set threads")
        await d.said("not changed in this chat")


async def test_draft_and_head_without_a_value_list_the_choices(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await d.send("/draft")
        await d.said("demo-draft: 2.7 MiB, expected speed-up")
        assert "/set draft" not in d.transcript()
        await d.send("/set head")
        await d.said("demo-head")
        await d.send("/set head nonsense")
        await d.said("/set head lists the heads")


async def test_a_method_that_cannot_be_loaded_is_refused_with_the_reason_and_advice(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await d.send("/set method lowbit")
        await d.said("The setting method was removed.")
        shown = " ".join(d.transcript().split())
        assert (
            "there is no low-bit copy of demo. Run edgespec prepare lowbit demo in another terminal" in shown
        )
        assert "The model was loaded again." in shown
        assert d.chat.current_chat.settings == d.chat.changed_load_options == {}


async def test_a_change_of_the_context_shows_the_planned_memory(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await d.send("/context 768")
        await d.said("context is now 768. Planned memory: up to ")


async def test_without_known_draft_models_and_heads_the_chat_says_how_to_use_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.store.drafts.draft_options", lambda *_: [])
    monkeypatch.setattr("edgespec.store.heads.head_options", lambda *_: [])
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await d.say("/draft")
        await d.said("type /draft and its name or path")
        await d.say("/set head")
        await d.said("type /set head and the path of its folder")
