"""The chat screen: its key bindings, and the actions that keys and slash commands trigger.

Messages are sent along with the files that they refer to. Edited messages are sent as new versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import ClassVar

from textual import events, on
from textual.binding import Binding, BindingType

from edgespec.chat.message import AttachedFile, Message
from edgespec.errors import AttachmentError, OptionError
from edgespec.tui import saved_chats, screen_commands, selection
from edgespec.tui.attachments import saved_files
from edgespec.tui.commands import table
from edgespec.tui.desktop import copy_text, edited
from edgespec.tui.input_syntax import find_references, missing_files
from edgespec.tui.screens.help import (
    CHAT_LIST_PART,
    COMMANDS_PART,
    MESSAGE_PART,
    MOST_USED,
    OTHER_KEYS,
    HelpScreen,
)
from edgespec.tui.selection import finish_edit
from edgespec.tui.texts import sentences
from edgespec.tui.turns import TurnScreen
from edgespec.tui.widgets.long_texts import MAX_INPUT_CHARACTERS
from edgespec.tui.widgets.prompt import PromptInput
from edgespec.tui.widgets.reply_markdown import ReplyMarkdown
from edgespec.tui.widgets.sidebar import Sidebar

# Pressing Ctrl+C twice within this many seconds quits the chat.
_TWICE_SECONDS = 2.0
# Seconds to wait before telling the user that files are still being read.
_NOTICE_SECONDS = 0.5


def _key(keys: str, action: str, help_text: str, group: Binding.Group) -> Binding:
    return Binding(keys, action, help_text, show=False, priority=True, group=group)


class ChatScreen(TurnScreen):
    """The complete chat screen, with key bindings and actions. The help page lists the bindings."""

    BINDINGS: ClassVar[list[BindingType]] = [
        _key("escape", "back", "stop the reply or cancel editing", MOST_USED),
        _key("ctrl+r", "command('regen')", "generate another reply", MOST_USED),
        _key("f3", "details", "show speed and memory use", MOST_USED),
        _key("ctrl+q", "app.quit", "quit; the chat is saved", MOST_USED),
        _key("ctrl+n", "command('new')", "start a new chat", MOST_USED),
        _key("f2,ctrl+b", "chats", "show the saved chats", MOST_USED),
        _key("f6,ctrl+s", "settings", "change the settings", MOST_USED),
        _key("f9", "models", "choose or download a model", MOST_USED),
        _key("f1", "help", "show this page", OTHER_KEYS),
        _key("f4,ctrl+t", "origin", "colour the words that were guessed correctly", OTHER_KEYS),
        _key("f5", "system", "change the system prompt", OTHER_KEYS),
        _key("f7", "thoughts", "show or hide the model's reasoning", OTHER_KEYS),
        _key("f8", "theme", "switch between light and dark", OTHER_KEYS),
        _key("ctrl+p", "edit_last", "edit your last message", OTHER_KEYS),
        _key("ctrl+y", "command('copy')", "copy the last reply", OTHER_KEYS),
        _key(
            "ctrl+o",
            "copy_code",
            "copy the last code block of the last reply; press again for the one before",
            OTHER_KEYS,
        ),
        _key("ctrl+g", "editor", "write your message in your text editor", OTHER_KEYS),
        _key("ctrl+l", "command('clear')", "start a new chat with the same settings", OTHER_KEYS),
        _key("ctrl+home", "earlier", "go to the top; press again to load older messages", OTHER_KEYS),
        _key("ctrl+end", "to_end", "go to the end", OTHER_KEYS),
        _key("ctrl+c", "interrupt", "copy the selection, or stop the reply; press twice to quit", OTHER_KEYS),
        Binding("question_mark", "help", show=False),
    ]

    _interrupted_at = -_TWICE_SECONDS
    # The last slash command that could not be run.
    _refused = ""

    @on(PromptInput.Sent)
    async def _prompt_sent(self, event: PromptInput.Sent) -> None:
        await self.send_text(event.text)

    async def send_text(self, text: str) -> None:
        """Send text as a message, or run it as a slash command. If it is blank, send a waiting message."""
        if not text.strip():
            await self.send_waiting()
            return
        typed = table.read(text)
        if typed is not None and self.editing is None:
            if self.holds_waiting and not self.is_leaving:
                # Another model is being loaded. A command waits too, because it may depend on the model or
                # load yet another one.
                self.waiting.add(text)
            else:
                await self._run_command(typed, text)
            return
        self.history.add(text)
        if self.editing is None and (self.writing or self.waiting.texts or self.holds_waiting):
            self.waiting.add(text)
            await self.send_waiting()
            return
        if self.writing:
            self.say_while_writing("The reply is not finished yet. Press Esc to stop it.")
            self.give_back(text, self.editing)
            return
        if self.holds_waiting:
            self.say("Another model is being loaded. Press Enter again afterwards.")
            self.give_back(text, self.editing)
            return
        if self.chips.reading:
            self.say("The files of your last message are still being read.")
            self.give_back(text, self.editing)
            return
        place, self.editing = self.editing, None
        await _send(self, text, place)

    async def send_typed(self, texts: Sequence[str]) -> None:
        """Send messages and run commands that were typed while a model was loading, in order."""
        for text in texts:
            if table.read(text) is None:
                self.history.add(text)
            self.waiting.add(text)
        await self.send_waiting()

    @on(TurnScreen.Free)
    async def send_waiting(self) -> None:
        """Send the oldest waiting message, unless another one is being sent or answered.

        Commands typed while a model was loading also wait. Any that precede the message are run first.
        """
        while self.waiting.texts and not (self.writing or self.chips.reading or self.holds_waiting):
            text = self.waiting.take(0)
            if (typed := table.read(text)) is None:
                await _send(self, text, None)
                break
            await self._run_command(typed, text)
        self.refresh_facts(details=False)

    async def _run_command(self, typed: table.Typed, text: str) -> None:
        try:
            await screen_commands.run(self, typed)
        except OptionError as error:
            refusal = sentences(error.what, error.next_step)
            await self.transcript.note(refusal)
            if text == self._refused:
                # The transcript ignores a repeated note, so show a short message as well.
                self.say(refusal)
            self._refused = text
            if self.give_back(text):
                # Select the text, so that typing replaces it and an arrow key keeps it for editing.
                self.prompt.select_all()
            return
        self.history.add(text)

    async def action_back(self) -> None:
        """Handle Esc: hide a list of paths or chats, stop the reply or editing, or close a side column."""
        if self.paths.display:
            self.paths.hide()
        elif self.sidebar.has_focus:
            # Close the list even during a reply, as its hint says.
            if self.sidebar.clear_query():
                return
            await self._hide_chats()
        elif self.writing:
            self.stop_reply()
        elif self.editing is not None:
            self.leave_edit()
        elif self._panels and (self._width_class == "-narrow" or not self.prompt.has_focus):
            await self.uncover()
            await self._hide_chats()
        self.clear_selection()
        self.prompt.focus()

    async def action_interrupt(self) -> None:
        """Handle Ctrl+C: copy the selection, stop the reply, clear the input or, if pressed twice, quit."""
        if selected := self.get_selected_text() or self.prompt.selected_text:
            self.say(await copy_text(self.app, selected, "selection"))
            self.clear_selection()
            self.prompt.move_cursor(self.prompt.cursor_location)
        elif self.writing:
            self.stop_reply()
        elif self.editing is not None:
            self.history.add(self.prompt.whole_text)
            self.leave_edit()
        elif self.prompt.text:
            self.history.add(self.prompt.whole_text)
            self.prompt.clear()
        elif monotonic() - self._interrupted_at < _TWICE_SECONDS:
            await self.run_action("app.quit")
        else:
            self._interrupted_at = monotonic()
            self.say("Press Ctrl+C again to quit. The chat is saved.")

    async def action_command(self, name: str) -> None:
        """Run a slash command without an argument."""
        await screen_commands.run_named(self, name)

    async def action_edit_last(self) -> None:
        """Copy the last message into the input so that the user can edit and resend it."""

        async def edit() -> None:
            place = self.current_chat.last_place("user")
            if place is None:
                self.say("There is no message to edit yet.")
            else:
                self.begin_edit(place)

        if self.editing is None:
            await self.when_free(edit)

    async def action_copy_code(self) -> None:
        self.say(await self.code_copier.copy_next(self.app, self.current_chat.last_reply))

    @on(ReplyMarkdown.CopyCode)
    async def _code_clicked(self, event: ReplyMarkdown.CopyCode) -> None:
        self.say(await copy_text(self.app, event.code.rstrip("\n"), "code block"))

    def action_editor(self) -> None:
        """Edit the text of the input in the user's editor. If the editor fails, leave the text unchanged."""
        try:
            text = edited(self.app, self.prompt.whole_text).removesuffix("\n")
        except OptionError as error:
            self.say(f"{error.what}. {error.next_step}.")
            return
        if len(text) > MAX_INPUT_CHARACTERS:
            self.say(
                f"The edited text was not used: it has {len(text):,} characters, but the input takes at most"
                f" {MAX_INPUT_CHARACTERS:,}."
            )
        elif text != self.prompt.whole_text:
            self.prompt.replace_text(text)
        self.prompt.focus()

    @on(Sidebar.Chosen)
    async def _chat_chosen(self, event: Sidebar.Chosen) -> None:
        # In a wide terminal, the list is a column. In a narrow one, it would cover a damaged chat's error.
        if self._width_class == "-narrow" or (self._width_class == "-medium" and not event.chat.problem):
            await self._hide_chats()
        await saved_chats.open_chat(self, event.chat)

    async def action_delete_chat(self) -> None:
        """Delete the chat highlighted in the list."""
        if (chat := self.sidebar.chat) is not None:
            await saved_chats.delete_chat(self, chat)

    def action_rename_chat(self) -> None:
        """Rename the chat highlighted in the list."""
        if (chat := self.sidebar.chat) is not None:
            self.run_worker(saved_chats.rename_chat(self, chat))

    async def action_pin_chat(self) -> None:
        """Pin or unpin the chat highlighted in the list."""
        if (chat := self.sidebar.chat) is not None:
            await saved_chats.pin_chat(self, chat)

    async def action_restore_chat(self) -> None:
        """Restore the chat that was deleted last."""
        await saved_chats.restore_in_list(self)

    async def action_chats(self) -> None:
        if "sidebar" in self._panels:
            await self._hide_chats()
            self.set_focus(self.prompt)
        else:
            await self.show_chats()
            self.post_message(self.PreferencesChanged())

    async def _hide_chats(self) -> None:
        """Hide the list of chats if it is visible, and remember that."""
        if "sidebar" in self._panels:
            await self.toggle_panel("sidebar")
            self.post_message(self.PreferencesChanged())

    def action_system(self) -> None:
        self.run_worker(screen_commands.edit_system(self))

    def action_settings(self) -> None:
        self.run_worker(screen_commands.edit_settings(self))

    def action_models(self) -> None:
        self.run_worker(screen_commands.pick_model(self))

    def action_help(self) -> None:
        """Show the help page, starting with the section on the focused widget."""
        part = ""
        if self.selected is not None:
            part = MESSAGE_PART
        elif self.sidebar.has_focus:
            part = CHAT_LIST_PART
        elif self.prompt.text.startswith("/"):
            part = COMMANDS_PART
        self.app.push_screen(HelpScreen(self.BINDINGS, part))

    async def action_details(self) -> None:
        await self.toggle_panel("details")
        self.post_message(self.PreferencesChanged())

    def action_origin(self) -> None:
        """Colour accepted draft tokens in this chat, or stop colouring them."""
        origin = not self.transcript.origin
        self.transcript.set_origin(origin)
        if origin and not any(entry.chunks for entry in self.current_chat.entries):
            self.say(
                "Starting with the next reply, colours will show which words came from accepted guesses."
            )

    def action_thoughts(self) -> None:
        if not self.transcript.toggle_thoughts():
            self.say("No reply in this chat includes the model's reasoning.")

    def action_theme(self) -> None:
        self.preferences.theme = "dark" if self.preferences.theme == "light" else "light"
        self.post_message(self.PreferencesChanged())

    async def action_earlier(self) -> None:
        """Scroll the conversation to the top. If it is already there, load older messages first."""
        if self.transcript.scroll_y == 0:
            await self.transcript.show_earlier()
        self.transcript.scroll_home(animate=False)

    async def action_show_earlier(self) -> None:
        await self.transcript.show_earlier()

    async def action_to_end(self) -> None:
        await self.transcript.show_end()

    async def action_page(self, pages: int) -> None:
        """Scroll the conversation by `pages` pages, up if negative."""
        await self.transcript.page(pages)

    async def action_select_message(self, step: int) -> None:
        await selection.select(self, step)

    async def action_undo(self) -> None:
        await selection.undo(self)

    async def action_message_action(self, action: str) -> None:
        await selection.run(self, action)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave Ctrl+R and Ctrl+P to the list of chats while it has focus.

        `u` is enabled only if `can_undo_all` is True.
        """
        if self.sidebar.has_focus and (action == "edit_last" or parameters == ("regen",)):
            return False
        if action == "undo":
            return self.can_undo_all
        return super().check_action(action, parameters)

    def on_key(self, event: events.Key) -> None:
        """If a character is typed while another widget has the focus, add it to the text input."""
        if (active := self.active_bindings.get(event.key)) is not None and active.node is self.focused:
            return
        if event.is_printable and event.character is not None and not self.prompt.has_focus:
            event.stop()
            self.prompt.focus()
            self.prompt.insert(event.character)


async def _send(screen: TurnScreen, text: str, place: int | None) -> None:
    """Send a message with its files. If `place` is given, send it as a new version of that message.

    If a file cannot be attached, nothing is sent and the text is put back into the input.
    """
    if _is_gone(screen, place):
        screen.say("The message you edited is gone. Press Enter to send your text as a new message.")
        screen.give_back(text)
        return
    entry = None if place is None else screen.current_chat.tree.messages[place]
    is_question = entry is None or entry.role == "user"
    references: Sequence[str] = find_references(text) if is_question else ()
    kept: tuple[AttachedFile, ...] = ()
    if entry is not None and is_question and entry.is_saved:
        kept, references = saved_files(entry.message, references)
    if references:
        # Reading can take seconds, so use a worker to keep the screen responsive.
        screen.run_worker(_send_with_files(screen, text, place, references, kept))
    else:
        await _send_message(screen, Message("user", text.strip(), files=kept), place)


async def _send_with_files(
    screen: TurnScreen,
    text: str,
    place: int | None,
    references: Sequence[str],
    kept: tuple[AttachedFile, ...],
) -> None:
    chat = screen.current_chat
    reading = asyncio.ensure_future(screen.chips.attachments(references))
    # If the program ends while the files are being read, the message stays in this list.
    screen.texts_being_read.append(text)
    if not (await asyncio.wait([reading], timeout=_NOTICE_SECONDS))[0]:
        screen.say("Reading the files…")
    try:
        attachments = await reading
        screen.texts_being_read.remove(text)
    except AttachmentError as error:
        screen.texts_being_read.remove(text)
        await screen.transcript.note(sentences(f"The message was not sent: {error.what}", error.next_step))
        screen.give_back_message(text, place)
        screen.post_message(screen.Free())
        return
    if screen.writing or chat is not screen.current_chat or _is_gone(screen, place):
        screen.give_back(text)
        screen.post_message(screen.Free())
        return
    files = (*kept, *(file for attachment in attachments for file in attachment.files))
    await _send_message(screen, Message("user", text.strip(), files=files), place)
    found = {attachment.path for attachment in attachments}
    if missing := [path for path in missing_files(references) if path not in found]:
        names = ", ".join(f"@{path}" for path in missing[:5])
        await screen.transcript.note(f"No file matches {names}, so this was sent as text.")


async def _send_message(screen: TurnScreen, message: Message, place: int | None) -> None:
    """Send a message, or send it as a new version of the message at `place`, and start the reply."""
    await screen.tool_use.answer_pending(screen.current_chat)
    if place is None:
        await screen.take_turn(screen.current_chat.send(message))
    else:
        await finish_edit(screen, place, message)


def _is_gone(screen: TurnScreen, place: int | None) -> bool:
    """Return whether an edited message has been deleted, or belongs to a version that is no longer open."""
    return place is not None and place not in screen.current_chat.tree.path
