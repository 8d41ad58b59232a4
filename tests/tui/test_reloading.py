"""Changing how the model is loaded, within the chat."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

import edgespec
from edgespec.chat.saved_chat import ModelReferences
from edgespec.errors import OptionError
from edgespec.tui.worker import Load
from tests.raising import raises
from tests.tui.driving import driving, until
from tests.tui.scripted import ScriptedRuntime, loading

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
        await d.said("/set head lists them")
