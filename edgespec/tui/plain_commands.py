"""Run slash commands in the plain chat, and print their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import Any, TypeAlias

from edgespec.chat.saved_chat import SavedChat
from edgespec.chat.store import StoredChat
from edgespec.errors import CancelledError, EdgespecError, OptionError
from edgespec.tui.commands import table
from edgespec.tui.commands.results import (
    Action,
    Change,
    Context,
    Copy,
    Generate,
    Load,
    Nothing,
    Open,
    Problem,
    Question,
    Result,
    RunningRace,
    Table,
    Text,
    all_of,
)
from edgespec.tui.commands.setup import chosen_model
from edgespec.tui.downloads import Download
from edgespec.tui.model_choice import (
    ChosenLoadOptions,
    chooses_draft,
    load_chosen,
    models_here,
    options_to_open,
    references_after,
)
from edgespec.tui.numbers import count, percent
from edgespec.tui.open_chat import OpenChat, RunningTurn
from edgespec.tui.plain import PlainChat
from edgespec.tui.preferences import Preferences
from edgespec.tui.texts import (
    in_chat,
    missing_models_text,
    rounding_warning,
    sentences,
    still_used_note,
    switched_note,
)

_Do: TypeAlias = Callable[[PlainChat, str], None]

_WAIT_SECONDS = 0.1
# Fraction of a download between two progress reports.
_REPORTED_SHARE = 0.1


def run(chat: PlainChat, typed: table.Typed) -> None:
    """Run a typed slash command.

    Raises:
        OptionError: The command or its argument is invalid, or the plain chat does not have the command.
        EdgespecError: The command failed.
    """
    command = typed.command
    if command is None:
        raise table.unknown(typed)
    if command.instead:
        raise OptionError(
            f"/{command.name} is not available in the plain chat", command.instead, code="command_unavailable"
        )
    _show(chat, command.run(_context(chat, typed.argument)))


def _context(chat: PlainChat, argument: str) -> Context:
    return Context(
        argument=argument,
        chat=chat.current_chat,
        new_chat=OpenChat(chat.first_system, dict(chat.first_settings)),
        runtime=chat.runtime,
        model_name=chat.models.target,
        changed_load_options=chat.changed_load_options,
        model_paths=chat.model_paths,
        model_thread=chat.model_thread,
        method=chat.method,
        stats=chat.stats,
        writing=False,
        archive=chat.archive,
        tools=chat.tools,
        preferences=Preferences(),
        list_hint="Type /load for the list of chats",
    )


def _show(chat: PlainChat, result: Result) -> None:
    """Print a command's result, or perform the action that it requests. Raises EdgespecError."""
    for part in all_of(result):
        match part:
            case Text():
                _print(chat.console.note if part.is_hint else chat.console.answer, part.in_plain or part.text)
            case Table():
                for label, value in part.rows:
                    chat.console.answer(f"{label}: {value}")
            case Nothing():
                chat.console.note(sentences(part.reason, part.next_step))
            case Problem():
                chat.console.note(sentences(part.error.what, part.error.next_step))
            case Change():
                part.apply(chat.current_chat)
                chat.save()
                _print(chat.console.answer, part.in_plain or part.text)
            case Open(chat=StoredChat() as stored):
                _load_models_of(chat, chat.open(stored))
            case Open(chat=OpenChat() as new):
                chat.open_new(new, part.note)
            case Generate():
                _generate(chat, part)
            case Load():
                _switch_model(chat, part.reference, part.changed, is_other=part.is_other)
            case Copy():
                if not part.text:
                    raise OptionError(
                        "There is nothing to copy yet", "Send a message first", code="command_unavailable"
                    )
                chat.console.answer(part.text)
            case Question():
                _ask(chat, part)
            case RunningRace():
                _await_race(chat, part)
            case Action() if part.otherwise is not None:
                _show(chat, part.otherwise())
            case Action():
                ACTIONS[part.name](chat, part.value)


def _print(write: Callable[[str], None], text: str) -> None:
    if text:
        write(text)


def _generate(chat: PlainChat, generate: Generate) -> None:
    started = generate.start(chat.current_chat)
    if not isinstance(started, RunningTurn):
        started = chat.make_calls(started) if started else None
    if started is not None:
        chat.take_turn(started)


def _ask(chat: PlainChat, question: Question) -> None:
    if chat.console.ask(f"{question.question} Type yes or no.", ("yes", "no")) == "yes":
        _show(chat, question.then())
    else:
        chat.console.answer(question.declined)


def _await_race(chat: PlainChat, running: RunningRace) -> None:
    chat.console.note(f"Comparing replies without the speed-up and with the method {running.method}.")
    job, progress = running.race, running.progress
    reported = progress.description
    while not wait([job], _WAIT_SECONDS).done:
        if progress.description != reported:
            reported = progress.description
            chat.console.note(sentences(reported))
    chat.use_reloaded_model()
    try:
        race = job.result()
    except CancelledError as error:
        chat.console.note(sentences(error.what))
        return
    chat.console.answer("\n".join([race.chat_headline(), *map(in_chat, race.remarks())]))


def _quit(chat: PlainChat) -> None:
    chat.console.leaving = True


def _delete(chat: PlainChat) -> None:
    current = chat.current_chat
    place, path = current.last_place("user"), current.tree.path
    assert place is not None
    current.change_messages(current.tree.without(place))
    chat.save()
    deleted = count(len(path) - path.index(place), "message")
    chat.console.answer(f"Deleted {deleted}. Type /undo to restore them.")


def _undo(chat: PlainChat) -> None:
    current = chat.current_chat
    current.change_messages(current.tree.restored())
    chat.save()
    chat.console.answer(f"Restored. The chat has {count(len(current.entries), 'message')}.")


def _use_model(chat: PlainChat, reference: str) -> None:
    _show(chat, chosen_model(chat.runtime, reference))


def _download(chat: PlainChat, reference: str) -> None:
    """Download a model, printing the progress, and switch to it unless the user stopped the download."""
    chat.console.note(f"Downloading {reference}. Press Ctrl-C to stop.")
    download, reported = Download(reference), 0.0
    chat.console.interrupted.clear()
    chat.downloads.start(download)
    while not download.ended.wait(_WAIT_SECONDS):
        if chat.console.interrupted.is_set():
            download.cancelled.set()
        if download.fraction >= reported + _REPORTED_SHARE:
            reported = download.fraction
            chat.console.note(f"Downloaded {percent(reported)}.")
    if download.cancelled.is_set() and download.error is not None:
        chat.console.note(f"The download was stopped. To resume it, type /model {reference}")
        return
    if isinstance(download.error, EdgespecError):
        raise download.error
    if download.error is not None:
        raise EdgespecError(
            f"{reference} was not downloaded: {type(download.error).__name__}: {download.error}",
            "try again",
            code="internal_error",
        ) from download.error
    _use_model(chat, reference)


def _load_models_of(chat: PlainChat, saved: SavedChat) -> None:
    """Load the models of a chat that was opened, and tell the user which of them are missing."""
    target, here = chat.runtime.target.name, models_here(saved.models)
    if note := missing_models_text(saved, target, here):
        chat.console.note(note)
    options = None
    if here is not None:
        is_other = saved.target != target
        options = options_to_open(here, chat.models, chat.changed_load_options, is_other=is_other)
    if here is not None and options is not None:
        # The chat has its own load options, so those of the loaded model do not apply to it.
        _switch_model(chat, here.target, options, is_other=False)
    else:
        chat.remove_unsupported_method(chat.current_chat.settings)


def _switch_model(
    chat: PlainChat, reference: str, changed: Mapping[str, Any] | None = None, *, is_other: bool = True
) -> None:
    """Load another model. If loading fails or the user stops it, reload the old model.

    Args:
        chat: The chat.
        reference: A reference to the model.
        changed: Load options that the user has changed, or None when switching to another model.
        is_other: Whether this is another model. If so, it keeps the options changed before that suit it.
    """
    chat.console.note(f"Loading {reference}.")
    chat.console.interrupted.clear()
    before = chat.runtime.target
    options = ChosenLoadOptions.of(chat.changed_load_options, changed, is_other=is_other)
    job = chat.model_thread.switch(load_chosen(chat.load_other, chat.plan_other, reference, options))
    while not wait([job], _WAIT_SECONDS).done:
        if chat.console.interrupted.is_set():
            chat.console.interrupted.clear()
            chat.model_thread.cancel_load()
    switched = job.result()
    if switched.failure is None:
        chat.models = references_after(chat.first_models, reference, options)
        chat.current_chat.models = chat.models
    is_loaded = switched.failure is None
    chat.use_runtime(
        switched.runtime, is_saved=is_loaded, methods_error=options.methods_error if is_loaded else None
    )
    name = switched.runtime.target.name
    if switched.failure is None:
        note = switched_note(before, switched.runtime, chat.changed_load_options, options)
        chat.changed_load_options = options.all
        is_other = switched.runtime.target.path != before.path
        if is_other or chooses_draft(reference, options, chat.preferences):
            chat.is_fallback = False
        chat.remember_models()
        chat.console.answer(note)
        chat.explain_drafting()
        if warning := rounding_warning(switched.runtime):
            chat.console.note(warning)
        return
    if isinstance(switched.failure, EdgespecError):
        chat.console.note(sentences(switched.failure.what, switched.failure.next_step))
    else:
        chat.console.note(sentences(f"{reference} was not loaded: {switched.failure}"))
    chat.console.answer(still_used_note(name, chat.models, chat.current_chat.models))


ACTIONS: dict[str, _Do] = {
    "quit": lambda chat, _: _quit(chat),
    "delete": lambda chat, _: _delete(chat),
    "undo": lambda chat, _: _undo(chat),
    "use_model": _use_model,
    "download": _download,
    "switch": _switch_model,
    "start_tools": lambda chat, _: chat.tools.start_servers(),
    "stop_tools": lambda chat, _: chat.tools.stop_servers(),
    # The plain chat has no list of chats to update.
    "list_changed": lambda *_: None,
}
"""The plain chat's implementations of command actions, keyed by `Action.name`."""
