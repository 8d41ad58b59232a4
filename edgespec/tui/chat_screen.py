"""The chat screen with its key bindings and the actions that keys and slash commands trigger."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import ClassVar

from textual import events, on, work
from textual.binding import Binding, BindingType

from edgespec.chat.store import Setting, StoredChat
from edgespec.errors import ChatFileError, OptionError
from edgespec.tui import commands
from edgespec.tui.chat_view import ChatView
from edgespec.tui.clipboard import copy_with_desktop_tool
from edgespec.tui.open_chat import OpenChat, code_blocks
from edgespec.tui.resuming import LAST, chosen
from edgespec.tui.screens.confirm import ConfirmScreen
from edgespec.tui.screens.help import HelpScreen
from edgespec.tui.screens.settings import SettingsScreen
from edgespec.tui.screens.system import SystemScreen
from edgespec.tui.settings import accepted
from edgespec.tui.texts import not_set
from edgespec.tui.widgets.prompt import PromptInput
from edgespec.tui.widgets.sidebar import Sidebar
from edgespec.tui.widgets.transcript import Transcript
from edgespec.tui.worker import Act

__all__ = ["ChatScreen"]

# Pressing Ctrl+C twice within this time quits.
_TWICE_SECONDS = 2.0


def _key(keys: str, action: str, description: str) -> Binding:
    # Priority is needed because the text input would otherwise handle some of these keys itself.
    return Binding(keys, action, description, show=False, priority=True)


class ChatScreen(ChatView):
    """The chat view with key bindings and actions."""

    BINDINGS: ClassVar[list[BindingType]] = [
        _key("f1", "help", "Help"),
        _key("f2,ctrl+b", "chats", "Chats"),
        _key("f3", "details", "Details"),
        _key("f4,ctrl+t", "origin", "Colours"),
        _key("f5", "system", "System prompt"),
        _key("f6,ctrl+s", "settings", "Settings"),
        _key("f8", "theme", "Light or dark"),
        _key("ctrl+n", "new_chat", "New chat"),
        _key("ctrl+l", "clear", "Clear"),
        _key("ctrl+r", "regenerate", "Write again"),
        _key("ctrl+p", "edit_last", "Edit last"),
        _key("ctrl+y", "copy_reply", "Copy reply"),
        _key("ctrl+o", "copy_code", "Copy code"),
        _key("ctrl+c", "interrupt", "Stop"),
        _key("escape", "back", "Stop"),
        _key("ctrl+home", "earlier", "To the top"),
        _key("ctrl+end", "to_end", "To the end"),
        Binding("question_mark", "help", "Help", show=False),
    ]

    _interrupted_at = -_TWICE_SECONDS

    @on(PromptInput.Sent)
    async def _prompt_sent(self, event: PromptInput.Sent) -> None:
        text = event.text
        if not text.strip():
            return
        typed = commands.read(text)
        if typed is not None and not self.editing:
            if await self.run_command(self, typed):
                self.history.add(text)
                if self.prompt.text == text:
                    self.prompt.clear()
            return
        if self.turns.writing:
            self.say("The reply is not finished yet. Press Esc to stop it.")
            return
        act: Act = "edit" if self.editing else "send"
        self.history.add(text)
        self.editing = False
        self.prompt.clear()
        await self.take_turn(act, text.strip())

    # Replies

    async def action_back(self) -> None:
        """Do the first of these that applies: stop the reply, stop editing, or close a side column."""
        if self.turns.writing:
            self.turns.stop()
        elif self.editing:
            self.leave_edit()
        elif self._panels and (self._width_class == "narrow" or not self.prompt.has_focus):
            panels = set() if self._width_class == "narrow" else self._panels - {"sidebar"}
            await self.show_panels(panels)
        self.clear_selection()
        self.prompt.focus()

    async def action_interrupt(self) -> None:
        """Copy the selection, stop the reply or clear the input. If none applies, a second press quits."""
        selected = self.get_selected_text() or self.prompt.selected_text
        if selected:
            await self.copy(selected, "selection")
            self.clear_selection()
            self.prompt.move_cursor(self.prompt.cursor_location)
        elif self.turns.writing:
            self.turns.stop()
        elif self.prompt.text:
            self.history.add(self.prompt.text)
            self.leave_edit()
            self.prompt.clear()
        elif monotonic() - self._interrupted_at < _TWICE_SECONDS:
            await self.app.run_action("quit")
        else:
            self._interrupted_at = monotonic()
            self.say("Press Ctrl+C again to quit. The chat is saved.")

    async def action_regenerate(self) -> None:
        """Generate the last reply again."""
        if not self.current_chat.entries and not self.turns.writing:
            self.say("There is no reply to generate again yet.")
            return

        async def again() -> None:
            if self.current_chat.last_user_text is not None:
                await self.take_turn("regenerate", "")

        await self.when_free(again)

    async def action_edit_last(self) -> None:
        """Copy the last message into the input so that the user can edit and resend it."""
        if not self.editing:
            await self.when_free(self.begin_edit)

    async def action_copy_reply(self) -> None:
        """Copy the last reply as Markdown."""
        entry = self.current_chat.last_reply
        await self.copy(entry.content.strip() if entry is not None else "", "last reply")

    async def action_copy_code(self) -> None:
        """Copy the last code block of the last reply."""
        entry = self.current_chat.last_reply
        blocks = code_blocks(entry.content) if entry is not None else []
        await self.copy(blocks[-1].rstrip("\n") if blocks else "", "code block")

    async def copy(self, text: str, name: str) -> None:
        """Copy `text` to the clipboard and confirm it with a message that calls it `name`."""
        if not text:
            self.say(f"Nothing to copy: there is no {name} yet.")
            return
        self.app.copy_to_clipboard(text)
        await asyncio.to_thread(copy_with_desktop_tool, text)
        self.say(f"Copied the {name}.")

    # Chats

    async def action_new_chat(self) -> None:
        """Start a new chat with the system prompt and settings that edgespec was started with."""
        await self.when_free(self._new_chat)

    async def _new_chat(self) -> None:
        await self.show_chat(OpenChat(self.first_system, dict(self.first_settings)))
        await self.refresh_sidebar()
        self.prompt.focus()

    async def action_clear(self) -> None:
        """Start a new chat with the same system prompt and settings. The current chat remains saved."""
        await self.when_free(self._clear)

    async def _clear(self) -> None:
        await self.show_chat(OpenChat(self.current_chat.system, dict(self.current_chat.settings)))
        await self.refresh_sidebar()
        self.prompt.focus()

    async def save_as(self, title: str) -> None:
        """Save the chat, and rename it if `title` is not empty."""
        if not self.current_chat.entries:
            self.say("Nothing to save: the chat is empty.")
            return
        self.current_chat.title = " ".join(title.split())[:80] or self.current_chat.title
        if await self.save():
            self.refresh_facts()
            self.say(f"Saved as {self.current_chat.shown_title!r}.")

    async def open_by_title(self, title: str) -> bool:
        """Open the newest chat whose title contains `title`. Return False if there is none."""
        if await self._open_chosen(title):
            return True
        await self.transcript.note(f"No saved chat has {title!r} in its title. Press F2 for the list.")
        return False

    async def resume(self, wanted: str) -> None:
        """Open the last chat, or the chat with the given id or title. Show a note if there is none."""
        if not await self._open_chosen(wanted):
            missing = "no saved chat yet" if wanted == LAST else f"no saved chat {wanted!r}"
            await self.transcript.note(f"There is {missing}. This is a new chat. Press F2 for the list.")

    async def _open_chosen(self, wanted: str) -> bool:
        try:
            found = chosen(await self.archive.list(), wanted)
        except ChatFileError as error:
            await self.show_error(error)
            return True
        if found is not None:
            await self.open_chat(found)
        return found is not None

    @on(Sidebar.Opened)
    async def _chat_chosen(self, event: Sidebar.Opened) -> None:
        if self._width_class != "wide" and not event.chat.problem:
            await self.show_panels(self._panels - {"sidebar"})
        await self.open_chat(event.chat)

    async def open_chat(self, chat: StoredChat) -> None:
        """Open a saved chat. Show an error if its file is damaged."""

        async def opened() -> None:
            try:
                saved = await self.archive.load(chat.id)
            except ChatFileError as error:
                await self.show_error(error)
                return
            settings, problems = accepted(saved.sampling)
            await self.show_chat(OpenChat.opened(saved, settings))
            await self.refresh_sidebar()
            for problem in problems:
                await self.transcript.note(f"Ignored a setting of this chat: {problem}.")
            if (other := saved.target) and other != self.runtime.target.name:
                await self.transcript.note(
                    f"This chat was written with {other}. Start with --target {other} to use that model."
                )
            self.prompt.focus()

        await self.when_free(opened)

    @on(Sidebar.DeleteWanted)
    @work
    async def _delete_wanted(self, event: Sidebar.DeleteWanted) -> None:
        chat = event.chat
        if not await self.app.push_screen_wait(
            ConfirmScreen(f"Delete “{chat.title}”? This cannot be undone.", "Delete")
        ):
            return
        try:
            await self.archive.delete(chat.id)
        except ChatFileError as error:
            await self.show_error(error)
            return
        if chat.id == self.current_chat.id:
            await self.when_free(self._new_chat)
        await self.refresh_sidebar()
        self.sidebar.focus_list()

    async def action_chats(self) -> None:
        """Show or hide the list of chats."""
        if await self.toggle_panel("sidebar"):
            self.sidebar.focus_list()
        else:
            self.prompt.focus()
        self.post_message(self.PreferencesChanged())

    async def show_chats(self) -> None:
        """Show the list of chats and focus it."""
        if "sidebar" not in self._panels:
            await self.toggle_panel("sidebar")
        self.sidebar.focus_list()

    # System prompt and settings

    @work
    async def action_system(self) -> None:
        """Edit the system prompt."""
        text = await self.app.push_screen_wait(SystemScreen(self.current_chat.system or ""))
        if text is not None:
            await self.set_system(text or None)

    async def set_system(self, text: str | None) -> None:
        """Set the system prompt, starting with the next message."""
        if text == self.current_chat.system:
            return
        self.current_chat.system = text
        await self.transcript.note(
            "The system prompt applies from your next message on."
            if text
            else "The system prompt is removed."
        )
        await self.save()

    @work
    async def action_settings(self) -> None:
        """Edit the settings of the chat."""
        settings = await self.app.push_screen_wait(SettingsScreen(self.current_chat.settings))
        if settings is not None and settings != self.current_chat.settings:
            await self.set_settings(settings, "The settings apply from your next message on.")

    async def set_settings(self, settings: dict[str, Setting], note: str) -> bool:
        """Apply the settings from the next message on and show `note`. Return False if they are invalid."""
        try:
            if "method" in settings:
                self.runtime.method_for(str(settings["method"]))
        except OptionError as error:
            await self.transcript.note(not_set(error))
            return False
        self.current_chat.settings = settings
        await self.transcript.note(note)
        await self.save()
        return True

    # View

    def action_help(self) -> None:
        """Show the help screen with keys and commands."""
        self.app.push_screen(HelpScreen())

    async def action_details(self) -> None:
        """Show or hide the details panel."""
        await self.toggle_panel("details")
        self.post_message(self.PreferencesChanged())

    def action_origin(self) -> None:
        """Switch replies between tokens coloured by origin and rendered Markdown."""
        self.preferences.origin = not self.preferences.origin
        self.transcript.set_origin(self.preferences.origin)
        if self.preferences.origin and not any(entry.chunks for entry in self.current_chat.entries):
            self.say("The next replies show which words were guessed right.")
        self.post_message(self.PreferencesChanged())

    def action_theme(self) -> None:
        """Switch between the light and the dark theme."""
        self.preferences.light = not self.preferences.light
        self.post_message(self.PreferencesChanged())

    async def action_earlier(self) -> None:
        """Scroll to the top, or show older messages if already there."""
        if self.transcript.scroll_y == 0:
            await self.transcript.show_earlier()
        self.transcript.scroll_home(animate=False)

    def action_to_end(self) -> None:
        """Scroll to the end and keep following the reply."""
        self.transcript.to_end()

    # Events of the widgets

    @on(PromptInput.HelpWanted)
    def _help_wanted(self) -> None:
        self.action_help()

    @on(PromptInput.EndOfInput)
    async def _end_of_input(self) -> None:
        await self.app.run_action("quit")

    @on(PromptInput.Scroll)
    def _scroll(self, event: PromptInput.Scroll) -> None:
        if event.pages < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    def on_key(self, event: events.Key) -> None:
        """Forward a character typed outside the text input to it."""
        if event.is_printable and event.character is not None and not self.prompt.has_focus:
            event.stop()
            self.prompt.focus()
            self.prompt.insert(event.character)

    @on(Transcript.EarlierWanted)
    async def _earlier_wanted(self) -> None:
        await self.transcript.show_earlier()
