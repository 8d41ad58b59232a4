"""Run the plain chat: load the model, read messages and commands, handle signals, and save the chat."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgespec.chat.saved_chat import ModelReferences, Setting
from edgespec.chat.store import ChatStore
from edgespec.errors import EdgespecError
from edgespec.tui import plain_commands
from edgespec.tui.archive import Archive
from edgespec.tui.commands import table
from edgespec.tui.ending import ChatEnd, EndWatch, resume_value
from edgespec.tui.plain import PlainChat
from edgespec.tui.plain_console import write
from edgespec.tui.texts import notices, rounding_warning, sentences, sharing_note, welcome_line
from edgespec.tui.worker import Load, LoadOther, ModelThread, PlanModel, load_named, plan_named

if TYPE_CHECKING:
    from edgespec.api.sharing.base import ChatModel
    from edgespec.api.sharing.chat_sharing import ChatSharing

_QUIT_SECONDS = 5.0


def run_plain_chat(
    load: Load,
    *,
    models: ModelReferences,
    load_other: LoadOther = load_named,
    plan_other: PlanModel = plan_named,
    changed: Mapping[str, Any] | None = None,
    fallback_note: str = "",
    system: str | None = None,
    settings: Mapping[str, Setting] | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: str | None = None,
    store: ChatStore | None = None,
    tools: bool = False,
    sharing: ChatSharing | None = None,
) -> ChatEnd:
    """Run the plain chat until the user quits or the input ends. See `ChatApp` for the arguments.

    Raises:
        CancelledError: Loading was cancelled.
        ChatFileError: A chat could not be saved.
        EdgespecError: Loading failed.
    """
    store = store if store is not None else ChatStore()
    thread, archive = ModelThread(load, sharing), Archive(store)
    chat: PlainChat | None = None

    def save() -> None:
        if chat is not None:
            chat.save_turn()

    def leave() -> bool:
        if chat is not None:
            chat.console.leaving = True
        thread.cancel_load()
        thread.cancel()
        _interrupt_main()
        return True

    def stop() -> bool:
        if chat is not None:
            chat.tools.close()
        thread.close()
        return thread.join(_QUIT_SECONDS)

    with EndWatch(save, leave, stop) as watch:
        try:
            write(sys.stderr, f"Loading {models.target}.\n")
            chat = PlainChat(
                thread,
                _loaded(thread),
                archive,
                load_other=load_other,
                plan_other=plan_other,
                models=models,
                changed={} if changed is None else changed,
                is_fallback=bool(fallback_note),
                system=system,
                settings=settings or {},
            )
            # From now on, Ctrl-C stops the reply. Other signals still end the chat.
            signal.signal(signal.SIGINT, chat.console.on_interrupt)
            chat.remember_models()
            if fallback_note:
                chat.console.note(fallback_note)
            _converse(chat, resume, overrides or {}, tools=tools)
        finally:
            save()
            if not stop():
                sys.stdout.flush()
                # A normal exit would wait for the model thread, which is still running.
                os._exit(130)
    archive.check_saved()
    return ChatEnd(watch.signalled, resume_value(chat.current_chat, store))


def _loaded(thread: ModelThread) -> ChatModel:
    """Load the model. Ctrl-C and other signals cancel loading."""
    signal.signal(signal.SIGINT, lambda _number, _frame: thread.cancel_load())
    return thread.start().result()


def _converse(chat: PlainChat, resume: str | None, overrides: Mapping[str, Any], *, tools: bool) -> None:
    """Read messages and commands until the input ends or the user quits.

    Args:
        chat: The chat.
        resume: The ID or title of the saved chat to open, `last` for the newest, or None for a new chat.
        overrides: Settings, or the system prompt, that replace those of the saved chat.
        tools: Whether to start the MCP servers immediately.
    """
    console, runtime = chat.console, chat.runtime
    console.note(f"{welcome_line(runtime)}. Type /help for the commands, /quit to end.")
    chat.explain_drafting()
    if console.is_interactive:
        for notice in notices(runtime, "Type /model"):
            console.note(notice)
    else:
        for note in filter(None, (sharing_note(runtime), rounding_warning(runtime))):
            console.note(note)
    if resume is not None:
        chat.resume(resume, overrides)
    if tools:
        _take(chat, "/tools on")
    while not console.leaving and (text := console.read_message()) is not None:
        if text.strip():
            _take(chat, text)


def _take(chat: PlainChat, text: str) -> None:
    """Send a message or run a slash command. If that fails, print the error."""
    try:
        if (typed := table.read(text)) is None:
            chat.send(text.strip())
        else:
            plain_commands.run(chat, typed)
    except EdgespecError as error:
        chat.console.note(sentences(error.what, error.next_step))


def _interrupt_main() -> None:
    """Raise KeyboardInterrupt in the main thread, even while it waits for a line of input."""
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
