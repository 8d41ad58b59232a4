"""The terminal chat's Textual app, which loads the model and shows the chat."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.filter import LineFilter
from textual.screen import Screen
from textual.widgets import ProgressBar, Static

from edgespec.chat.prompt_history import PromptHistory
from edgespec.chat.saved_chat import NO_MODELS, ModelReferences, Setting
from edgespec.chat.store import ChatStore
from edgespec.errors import CancelledError, ChatFileError, ConfigurationError, EdgespecError, OptionError
from edgespec.tools.tool import visible
from edgespec.tui.archive import Archive
from edgespec.tui.background import in_thread
from edgespec.tui.chat_screen import ChatScreen
from edgespec.tui.commands import table
from edgespec.tui.ending import ChatEnd, EndWatch, is_input_open, resume_value
from edgespec.tui.input_syntax import QUOTES, block_text, ends_block
from edgespec.tui.model_choice import ChosenLoadOptions, chooses_draft, load_chosen, references_after
from edgespec.tui.numbers import count, percent
from edgespec.tui.preferences import Preferences, preferences_path
from edgespec.tui.saved_chats import offer_unfinished, resume
from edgespec.tui.screens.help import HelpScreen
from edgespec.tui.texts import notices, rounding_warning, sentences, still_used_note, switched_note
from edgespec.tui.textual_guards import KeyOrder, NoControls, check_textual_variables, guard_input
from edgespec.tui.themes import DARK, find_theme
from edgespec.tui.widgets.files import dropped
from edgespec.tui.widgets.long_texts import MAX_INPUT_CHARACTERS, PastedTexts, too_long_text
from edgespec.tui.widgets.markdown_blocks import load_parsers
from edgespec.tui.widgets.prompt import History, WaitingMessages, references_to
from edgespec.tui.worker import Load, LoadOther, ModelThread, PlanModel, load_named, plan_named

if TYPE_CHECKING:
    from edgespec.api.sharing.chat_sharing import ChatSharing

_T = TypeVar("_T")
_TICK_SECONDS = 1 / 25
_QUIT_SECONDS = 5.0
# Python's thread switch interval during the chat, in seconds. The default of 5 ms can slow down small models.
_SWITCH_SECONDS = 5e-5
# Maximum number of lines and characters of typed text to show on the loading screen. Only the end of longer
# text is shown.
_SHOWN_LINES = 5
_SHOWN_CHARACTERS = 200
# Number of partial garbage collections before a full one, which takes about 100 ms. `Transcript` usually
# triggers a full collection earlier, while the user is not typing.
_FULL_COLLECTION_THRESHOLD = 1000
_NO_CONTROLS = NoControls()


def run_chat(load: Load, *, mouse: bool = True, **options: Any) -> ChatEnd:
    """Run the chat until the user quits.

    Args:
        load: Function that loads the model.
        mouse: Whether the chat handles the mouse. If not, the terminal handles text selection as usual.
        **options: The other arguments of `ChatApp`.

    Raises:
        CancelledError: Loading was cancelled.
        ChatFileError: A chat could not be saved.
        ConfigurationError: An environment variable of Textual has an invalid value.
        EdgespecError: Loading failed, or an internal error closed the chat.
    """
    check_textual_variables()
    app = ChatApp(load, **options)
    guard_input(app.driver_class)
    with EndWatch(app.save_turn, app.leave_soon, app.end_without_terminal, is_open=is_input_open) as watch:
        try:
            with quick_screen():
                app.run(mouse=mouse)
        finally:
            model_stopped = app.stop_model()
            app.save_turn()
            try:
                app.archive.finish_all_deletions()
            finally:
                sys.stderr.write(app.keep_typed() + app.downloads_note())
        if not model_stopped:
            for error in app.archive.unsaved.values():
                sys.stderr.write(f"error: {error}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            # A normal exit could hang, because the model's thread is still running.
            os._exit(130)
    app.archive.check_saved()
    if app.load_error is not None:
        raise app.load_error
    if app.return_code:
        raise EdgespecError(
            "the chat was closed by an internal error; your messages are saved",
            "report the traceback above, and run `edgespec chat --resume` to continue",
            code="internal_error",
        )
    resume = "" if app.chat is None else resume_value(app.chat.current_chat, app.store)
    return ChatEnd(watch.signalled, resume)


class ChatApp(App[None]):
    """The Textual app of the terminal chat.

    Args:
        load: Function that loads the model. Called in the model thread.
        load_other: Returns a function that loads another model, given a reference to it.
        plan_other: Plans another model, given a reference to it and load options.
        models: References to the models that the user chose, such as `8b-q4`.
        changed: Load options of the chat to resume that `load` has applied.
        fallback_note: Why the chat opens with other models than it should, or an empty string. If set, these
            models are not remembered for the next chat.
        system: System prompt for new chats.
        settings: Settings for new chats.
        overrides: Settings, or the system prompt, that replace those of the chat to resume.
        resume: Saved chat to open: its ID, part of its title, or `last` for the newest.
        store: The saved chats. Defaults to those in the user's data folder.
        light: Whether to use the light theme. Defaults to the last theme used.
        tools: Whether to start the MCP servers immediately.
        remember: Whether to save the history of prompts.
        sharing: Shares the model with other programs, or None to share nothing.

    Attributes:
        load_error: The error if loading failed, or None.
        chat: The chat screen, or None until the model is loaded.
        archive: The saved chats.
    """

    TITLE = "edgespec"
    CSS_PATH = "chat.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        # Textual's action suspends the process as a shell expects, and redraws the screen when it resumes.
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012 - the base class wants a list
        (0, "-narrow"),
        (64, "-medium"),
        (110, "-wide"),
    ]

    def __init__(
        self,
        load: Load,
        *,
        load_other: LoadOther = load_named,
        plan_other: PlanModel = plan_named,
        models: ModelReferences = NO_MODELS,
        changed: Mapping[str, Any] | None = None,
        fallback_note: str = "",
        system: str | None = None,
        settings: Mapping[str, Setting] | None = None,
        overrides: Mapping[str, Any] | None = None,
        resume: str | None = None,
        store: ChatStore | None = None,
        light: bool | None = None,
        tools: bool = False,
        remember: bool = True,
        sharing: ChatSharing | None = None,
    ) -> None:
        super().__init__()
        self.load_error: Exception | None = None
        self.model_thread = ModelThread(load, sharing)
        self._load_other, self._plan_other = load_other, plan_other
        self.store = store if store is not None else ChatStore()
        self.archive = Archive(self.store)
        self.chat: ChatScreen | None = None
        self.preferences = Preferences.read(self._preferences_path)
        if light is not None:
            self.preferences.theme = "light" if light else "dark"
        self._models = models
        # `load` removes options that cannot be used.
        self._changed: Mapping[str, Any] = {} if changed is None else changed
        self._fallback_note = fallback_note
        self._system = system
        self._settings = dict(settings or {})
        self._overrides = dict(overrides or {})
        self._resume = resume
        self._tools = tools
        self._remember = remember
        self._pasted = PastedTexts()
        self._loading = LoadingScreen(models.target, self._pasted)
        self._leaving = False
        self._is_typed_kept = False
        # Whether the user has been warned that quitting loses the messages of chats that cannot be saved.
        self._are_losses_known = False
        self._keys = KeyOrder(self, super().on_event)

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, (events.Key, events.Paste)) and not event.is_forwarded:
            await self._keys.add(event)
        else:
            await super().on_event(event)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Hand the terminal to another program, and take it back even if the `with` block raises.

        Textual's own context manager leaves the driver stopped after an exception, so the screen disappears
        and key presses no longer arrive.

        Raises:
            SuspendNotSupported: The terminal cannot be handed over.
        """
        failure: BaseException | None = None
        with super().suspend():
            try:
                yield
            except BaseException as error:
                failure = error
        if failure is not None:
            raise failure

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), _NO_CONTROLS]

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Return edgespec's colours, which the stylesheet needs before a theme is active."""
        return DARK.variables

    @cached_property
    def _history(self) -> History:
        return History(PromptHistory(self.store.folder.parent) if self._remember else None)

    @property
    def _preferences_path(self) -> Path:
        return preferences_path(self.store)

    def on_mount(self) -> None:
        self._show_theme()
        self.run_worker(self._load_model())

    async def on_unmount(self) -> None:
        self.model_thread.close()
        if self.chat is not None:
            await asyncio.to_thread(self.chat.tool_use.close)

    def on_chat_view_preferences_changed(self) -> None:
        """Apply changed preferences, and save them once the screen is drawn."""
        self._show_theme()
        self.call_after_refresh(self.preferences.write, self._preferences_path)

    def _show_theme(self) -> None:
        try:
            theme = find_theme(self.preferences.theme)
        except (ConfigurationError, OptionError) as error:
            theme = DARK
            self.notify(sentences(error.what, error.next_step), markup=False, timeout=10)
        if theme == self.current_theme:
            return
        self.register_theme(theme)
        if self.theme == theme.name:
            # The theme's name is unchanged, but its file was edited, so tell Textual to apply it again.
            self.mutate_reactive(ChatApp.theme)
        self.theme = theme.name

    async def _load_model(self) -> None:
        await self.push_screen(self._loading)
        Thread(target=load_parsers, daemon=True).start()
        runtime = await self._loaded(self.model_thread.start())
        if runtime is None:
            return
        self.chat = chat = ChatScreen(
            self.model_thread,
            runtime,
            self.archive,
            self.preferences,
            self._history,
            models=self._models,
            system=self._system,
            settings=self._settings,
            changed=dict(self._changed),
            take_typed=self._loading.take_typed,
            pasted=self._pasted,
            plan_model=self._plan_other,
            # Finding the models on this machine reads other programs' folders, which can be slow.
            notices=await in_thread(partial(notices, runtime)),
        )
        self._leaving = False
        if not self._fallback_note:
            self.preferences.remember(self._models, self._preferences_path)
        await self.switch_screen(chat)
        if self._resume is None:
            # A chat that is reopened shows its messages instead of the explanation.
            chat.mark_explained()
            chat.call_later(offer_unfinished, chat)
        else:
            chat.call_later(resume, chat, self._resume, self._overrides)
        if self._fallback_note:
            chat.call_later(chat.transcript.note, self._fallback_note)
        chat.call_later(chat.send_typed, self._loading.take_messages())
        if self._tools:
            chat.run_worker(chat.tool_use.start_servers())

    async def _loaded(self, loading: Future[_T]) -> _T | None:
        """Show the loading progress and return the result. On failure, quit and return None."""
        while not loading.done():
            self._loading.show(*self.model_thread.loading)
            await asyncio.sleep(_TICK_SECONDS)
        try:
            return loading.result()
        except Exception as error:
            self.load_error = error
            self.exit()
            return None

    def on_chat_view_model_chosen(self, event: ChatScreen.ModelChosen) -> None:
        if self.screen is not self._loading:
            self.run_worker(self._switch_model(event))

    async def _switch_model(self, chosen: ChatScreen.ModelChosen) -> None:
        """Continue the chat with another model. If loading fails, show the error and keep the old model."""
        chat, reference, changed = self.chat, chosen.reference, chosen.changed
        assert chat is not None
        self._loading = LoadingScreen(reference, self._pasted)
        await self.push_screen(self._loading)
        chat.holds_waiting = True
        while chat.writing:
            chat.stop_reply()
            await asyncio.sleep(_TICK_SECONDS)
        before = chat.runtime.target
        options = ChosenLoadOptions.of(chat.changed_load_options, changed, is_other=chosen.is_other)
        load = load_chosen(self._load_other, self._plan_other, reference, options)
        switched = await self._loaded(self.model_thread.switch(load))
        if switched is None:
            return
        note = ""
        if switched.failure is None:
            note = switched_note(before, switched.runtime, chat.changed_load_options, options)
            # Do this before the chat handles input again, because the next command may change these options.
            chat.models = references_after(self._models, reference, options)
            chat.current_chat.models = chat.models
            chat.changed_load_options = options.all
            is_other = switched.runtime.target.path != before.path
            if is_other or chooses_draft(reference, options, self.preferences):
                self._fallback_note = ""
            if not self._fallback_note:
                self.preferences.remember(chat.models, self._preferences_path)
        self._leaving = False
        loading = self._loading
        await self.pop_screen()
        messages = loading.take_messages()
        if switched.failure is not None:
            # The messages were meant for the other model.
            messages = [*chat.waiting.take_texts(), *messages]
        if messages and (switched.failure is not None or chat.prompt.text.strip()):
            chat.prompt.insert("\n\n".join(messages) + "\n")
            messages = []
        # Insert what was typed before the next keys reach the prompt.
        chat.prompt.insert(loading.take_typed().rstrip("\n"))
        is_loaded = switched.failure is None
        await chat.use_runtime(
            switched.runtime, is_saved=is_loaded, methods_error=options.methods_error if is_loaded else None
        )
        chat.holds_waiting = chat.is_leaving
        chat.call_later(chat.send_typed, messages)
        if switched.failure is None:
            # An empty chat already shows the warning in its welcome box.
            warning = rounding_warning(switched.runtime) if chat.current_chat.messages else ""
            await chat.transcript.note(f"{note} {warning}".rstrip())
        else:
            await chat.show_error(switched.failure)
            own, name = chat.current_chat.models, switched.runtime.target.name
            await chat.transcript.note(still_used_note(name, chat.models, own))
        if chosen.note:
            await chat.transcript.note(chosen.note)

    def action_cancel_load(self) -> None:
        """Stop loading the model. If called again, quit immediately."""
        if self._leaving:
            self.load_error = CancelledError("loading the model was cancelled")
            self.exit()
        self._leaving = True
        self._loading.show_stopping()
        self.model_thread.cancel_load()

    def action_help(self, part: str) -> None:
        """Show the help page on top of a dialog, starting at the heading `part`."""
        self.push_screen(HelpScreen(ChatScreen.BINDINGS, part))

    async def action_quit(self) -> None:
        """Stop the reply, save the chat and quit. If called again, quit immediately.

        If a chat cannot be saved, the first call only warns the user, because quitting would lose messages.
        """
        if self.screen is self._loading:
            self.action_cancel_load()
        elif self._leaving:
            self.exit()
        elif self._are_losses_known or not await self._lost_chats():
            self._leaving = True
            self._leave()
        else:
            self._are_losses_known = True
            lost = count(len(self.archive.unsaved), "chat")
            self.notify(
                f"{lost} could not be saved. To quit and lose the messages, press Ctrl+Q again.",
                severity="error",
                timeout=10,
                markup=False,
            )

    async def _lost_chats(self) -> bool:
        """Retry saving the unsaved chats. Return whether any of them still cannot be saved."""
        if self.chat is not None and self.archive.unsaved:
            with suppress(ChatFileError):
                await asyncio.to_thread(
                    self.archive.save, self.chat.current_chat, self.chat.runtime.target.name
                )
        return bool(self.archive.unsaved)

    # With `run_worker`, Python would warn that this coroutine was never awaited if the app exits before it
    # starts.
    @work(exclusive=True)
    async def _leave(self) -> None:
        if self.chat is not None:
            await self.chat.finish(_QUIT_SECONDS)
        await asyncio.to_thread(self.stop_model)
        self.exit()

    def keep_typed(self) -> str:
        """Save text that was typed but not sent before the chat ended.

        Returns:
            A message about the unsent text, or an empty string if nothing was typed.
        """
        if self._is_typed_kept:
            return ""
        self._is_typed_kept = True
        in_chat = [] if self.chat is None else self.chat.unsent_texts
        # The screen may already be gone, so only read what it contains.
        loading = "\n".join((*self._loading.waiting.texts, self._pasted.whole(self._loading.typed)))
        typed = [text for text in (*in_chat, loading) if text.strip()]
        # Print text that cannot be saved, so that the user can copy it.
        lost = [text for text in typed if not (self._remember and self._history.add(text.strip()))]
        notes = [f"What you typed was not sent: {visible(text.strip())}\n" for text in lost]
        if len(lost) < len(typed):
            notes.append("What you typed was not sent. Press Up in your next chat to get it back.\n")
        return "".join(notes)

    def downloads_note(self) -> str:
        """Return a note on the downloads that quitting has stopped, or an empty string if there are none."""
        if self.chat is None:
            return ""
        return "".join(
            f"The download of {each.reference} was stopped at {percent(each.fraction)}. To resume it, type"
            f" /model {each.reference} in your next chat.\n"
            for each in self.chat.downloads.unfinished
            if not each.ended.is_set()
        )

    def end_without_terminal(self) -> None:
        """Stop the model and save unsent text, because the terminal is closed. Called from another thread."""
        self.stop_model()
        self.keep_typed()

    def save_turn(self) -> None:
        """Save the reply in progress, if any. Can be called from any thread, even after the app has ended."""
        if self.chat is not None:
            self.chat.save_turn()

    def stop_model(self) -> bool:
        """Stop the reply and close the model. Return False if this takes longer than five seconds."""
        if self.chat is not None:
            # Call `begin_leaving` before stopping the reply, so that the reply is saved as unfinished.
            self.chat.begin_leaving()
            self.chat.tool_use.close()
        self.model_thread.close()
        return self.model_thread.join(_QUIT_SECONDS)

    def leave_soon(self) -> bool:
        """Ask the app to quit. Can be called from any thread. Return False if the app has not started yet."""
        return self.is_running and self.call_later(self._quit_now)

    async def _quit_now(self) -> None:
        # Loading cannot always be stopped quickly, so quit at once if the model is still loading.
        self._leaving = self._leaving or self.screen is self._loading
        # Skip the warning about unsaved chats, because the terminal may already be closed.
        self._are_losses_known = True
        await self.action_quit()


def _promise(texts: Sequence[str]) -> str:
    """Say what will be done with the messages and commands that the user has entered during loading."""
    are_commands = [table.read(text) is not None for text in texts]
    one_by_one = " one after the other" if len(texts) > 1 else ""
    if all(are_commands):
        what = "These commands will run" if one_by_one else "This command will run"
    elif any(are_commands):
        what = "These messages and commands will be handled"
    else:
        what = "These messages will be sent" if one_by_one else "This message will be sent"
    return f"{what}{one_by_one} as soon as the model is loaded."


@contextmanager
def quick_screen() -> Iterator[None]:
    """Reduce UI delays caused by Python's thread switching and garbage collection."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(*thresholds[:2], _FULL_COLLECTION_THRESHOLD)
    # Exclude all existing objects, such as modules, from garbage collection. The model is loaded later, so
    # its memory can still be freed.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)


class LoadingScreen(Screen[None]):
    """Screen that shows the model name and loading progress, while collecting typed input.

    Args:
        name: The name of the model.
        pasted: The long pasted texts, which the chat's input also uses.

    Attributes:
        waiting: The messages and commands that the user has entered. They are sent in this order once the
            model is loaded.
        typed: The text that the user has typed but not yet sent.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c,ctrl+q", "app.cancel_load", "Cancel", show=False, priority=True),
    ]

    def __init__(self, name: str, pasted: PastedTexts) -> None:
        super().__init__()
        self.typed = ""
        self._model = name
        self._pasted = pasted
        self._bar = ProgressBar(total=1.0, show_eta=False, id="loading-bar")
        self._what = Static(Content("Starting"), id="loading-what")
        self._hint = Static(Content("Esc cancels"), id="loading-hint")
        self.waiting = WaitingMessages(id="loading-waiting")
        self._promise = Static(id="loading-promise")
        self._shown_text = Static(id="loading-text")
        self._promise.display = self._shown_text.display = False

    def compose(self) -> ComposeResult:
        heading = Static(Content.assemble(("edgespec", "bold"), "  ", (self._model, "$muted")))
        yield Vertical(
            heading,
            self._bar,
            self._what,
            self._hint,
            self.waiting,
            self._promise,
            self._shown_text,
            id="loading",
        )

    def show(self, description: str, fraction: float) -> None:
        """Show what is being loaded, and the completed fraction from 0 to 1."""
        self._bar.update(progress=fraction)
        self._what.update(Content(description))

    def on_key(self, event: events.Key) -> None:
        """Collect input typed during loading. Enter completes a message, and Up recalls the last one."""
        if event.is_printable and event.character is not None:
            self.typed += event.character
        elif event.key == "enter" and self.typed.strip() and not self._is_in_block:
            text, self.typed = self.typed, ""
            text = block_text(text.rstrip().split("\n")) if text.startswith(QUOTES) else text
            self.waiting.add(self._pasted.whole(text))
        elif event.key in ("enter", "ctrl+j", "shift+enter"):
            self.typed += "\n"
        elif event.key in ("backspace", "up") and not self.typed and self.waiting.texts:
            self.typed = self._pasted.folded(self.waiting.take(-1))
        elif event.key == "backspace":
            self.typed = self._pasted.without_last(self.typed)
        self._show_typed()

    @property
    def _is_in_block(self) -> bool:
        """Whether the text starts with triple quotes that are not closed yet. See `PromptInput`."""
        return self.typed.startswith(QUOTES) and not ends_block(self.typed.rstrip().split("\n"))

    async def on_paste(self, event: events.Paste) -> None:
        """Add pasted text and dropped files to the typed text, as the chat's input does."""
        if len(event.text) > MAX_INPUT_CHARACTERS:
            self.notify(too_long_text(len(event.text)), markup=False)
            return
        if paths := await dropped(event.text):
            self.typed += references_to(paths, self.typed, self.typed)
        elif self._pasted.is_long(event.text):
            self.typed += self._pasted.fold(event.text, None)
        else:
            self.typed += event.text
        self._show_typed()

    def _show_typed(self) -> None:
        """Show the end of the typed text, so that the user sees that it is not lost."""
        self._promise.update(Content.styled(_promise(self.waiting.texts), "$muted"))
        self._promise.display = bool(self.waiting.texts)
        shown = self.typed.rstrip("\n").split("\n")[-_SHOWN_LINES:]
        self._shown_text.update(Content("\n".join(shown)[-_SHOWN_CHARACTERS:]))
        self._shown_text.display = bool(self.typed)

    def take_messages(self) -> list[str]:
        """Return the messages that the user has entered, and clear them."""
        return self.waiting.take_texts()

    def take_typed(self) -> str:
        """Return the text typed so far and clear it."""
        typed, self.typed = self.typed, ""
        return typed

    def show_stopping(self) -> None:
        """Tell the user that loading will stop soon."""
        self._hint.update(Content("Stopping. Press Esc again to quit immediately."))
