"""The chat's widgets and turns. Keeps the screen, the model thread and the saved chat in sync."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message as Event
from textual.screen import Screen
from textual.timer import Timer

from edgespec.chat.store import ChatStore, Setting
from edgespec.errors import ChatFileError
from edgespec.tui.archive import Archive
from edgespec.tui.commands import Typed
from edgespec.tui.history import History
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.preferences import Preferences
from edgespec.tui.texts import error_text, notices, speed_up_short, welcome_rows
from edgespec.tui.turns import Turns
from edgespec.tui.widgets.details import Details, details_content
from edgespec.tui.widgets.header import Header
from edgespec.tui.widgets.messages import Panel, ReplyMessage, UserMessage, Welcome
from edgespec.tui.widgets.prompt import PromptInput
from edgespec.tui.widgets.sidebar import Sidebar
from edgespec.tui.widgets.status import StatusFacts, StatusLine
from edgespec.tui.widgets.transcript import Transcript
from edgespec.tui.worker import Act, Ask, ChatOpened, ModelThread, TurnEnded

if TYPE_CHECKING:
    from edgespec import MethodReport, Stats
    from edgespec.tui.model import RuntimeLike

__all__ = ["ChatView"]

# Interval between screen updates.
_TICK_SECONDS = 1 / 25
# Number of ticks between updates of the details panel. Numbers that change with every token are hard to read.
_TICKS_PER_DETAILS = 5
# Interval between memory measurements.
_MEMORY_SECONDS = 3.0
# Maximum share of time spent drawing, and the longest pause between two updates.
_MAX_DRAWING_SHARE = 0.25
_MAX_PAUSE_SECONDS = 0.2


# Runs a typed slash command on the chat screen. If it returns False, the text stays in the input.
RunCommand = Callable[[Any, Typed], Awaitable[bool]]


class ChatView(Screen[None]):
    """The chat screen without key bindings and commands, which `ChatScreen` adds."""

    class PreferencesChanged(Event):
        """The user changed the theme or the visible columns."""

    def __init__(
        self,
        thread: ModelThread,
        runtime: RuntimeLike,
        store: ChatStore,
        preferences: Preferences,
        *,
        system: str | None,
        settings: Mapping[str, Setting],
        run_command: RunCommand,
        typed: str = "",
    ) -> None:
        super().__init__()
        self.run_command = run_command
        self.runtime = runtime
        self.preferences = preferences
        self.first_system = system
        self.first_settings = dict(settings)
        self.current_chat = OpenChat(system, dict(settings))
        self.archive = Archive(store)
        self.turns = Turns(thread, on_opened=self._chat_opened, on_ended=self._turn_ended)
        self.history = History()
        self.editing = False
        self.transcript = Transcript(self._welcome(), id="transcript")
        self.prompt = PromptInput(self.history, id="prompt")
        self.sidebar = Sidebar(id="sidebar")
        self._header = Header(id="header")
        self._details = Details(id="details")
        self._status = StatusLine(id="status")
        self._typed = typed
        self._unsent = ""
        self._asked: Ask | None = None
        self._last_stats: Stats | None = None
        self._context_used_tokens = 0
        self._dropped_messages = 0
        self._memory_bytes = runtime.memory_bytes()
        self._ticks = 0
        self._drawn_at = self._spent_at = 0.0
        self._tick_timer: Timer | None = None
        self._panels: set[str] = set()
        self._width_class = ""

    def compose(self) -> ComposeResult:
        """Create the header, the columns, the input and the status line."""
        yield self._header
        with Horizontal(id="middle"):
            yield self.sidebar
            yield self.transcript
            yield self._details
        yield self.prompt
        yield self._status

    def on_mount(self) -> None:
        """Open an empty chat."""
        draft = self.runtime.draft
        self._header.models = self.runtime.target.name + (
            f" with helper {draft.name}" if draft is not None else ""
        )
        self._tick_timer = self.set_interval(_TICK_SECONDS, self._tick, pause=True)
        self.set_interval(_MEMORY_SECONDS, self._measure_memory)
        self.turns.open_chat(self.current_chat.system, self.current_chat.messages)
        self._run_timer()
        self.transcript.set_origin(self.preferences.origin)
        self.prompt.replace_text(self._typed)
        self.prompt.focus()

    # The open chat

    async def show_chat(self, chat: OpenChat) -> None:
        """Show `chat` in place of the open chat."""
        self.current_chat = chat
        self._last_stats = None
        self.leave_edit()
        self.history.seed(entry.content for entry in chat.entries if entry.role == "user")
        self.turns.open_chat(chat.system, chat.messages)
        self._run_timer()
        await self.transcript.show_chat(chat.entries, welcome=self._welcome())
        self.refresh_facts()

    def _welcome(self) -> Welcome:
        return Welcome(welcome_rows(self.runtime), notices(self.runtime))

    async def save(self) -> bool:
        """Save the chat and refresh the list of chats. On failure, show the error and return False."""
        try:
            got_new_id = await self.archive.save(self.current_chat, self.runtime.target.name)
        except ChatFileError as error:
            await self.show_error(error)
            return False
        if got_new_id:
            await self.transcript.note(
                "Another program changed this chat. Your version is saved as a new chat."
            )
        await self.refresh_sidebar()
        return True

    async def refresh_sidebar(self) -> None:
        """Refresh the list of chats if it is visible."""
        if "sidebar" not in self._panels:
            return
        try:
            chats = await self.archive.list()
        except ChatFileError as error:
            await self.show_error(error)
            return
        self.sidebar.show(chats, current=self.current_chat.id)

    async def show_error(self, error: Exception) -> None:
        """Show an error in the transcript."""
        title, body = error_text(error)
        await self.transcript.add(Panel(title, body, kind="error"))

    async def finish(self, timeout_seconds: float) -> None:
        """Stop the reply before quitting. The chat is saved when the reply ends."""
        await self.turns.finish(timeout_seconds)

    # A turn

    async def take_turn(self, act: Act, text: str) -> None:
        """Show the message in the transcript and start the reply."""
        transcript, entries = self.transcript, self.current_chat.entries
        await transcript.remove_notes()
        if act == "send":
            gone = 0
        else:
            last = "user" if act == "edit" else "assistant"
            places = [place for place, entry in enumerate(entries) if entry.role == last]
            gone = len(entries) - places[-1] if places else 0
            if act == "regenerate" and entries[-1].role == "user":
                gone = 0
        if gone:
            await transcript.remove_messages(gone)
        if act != "regenerate":
            await transcript.add(UserMessage(text))
        reply = await transcript.start_reply()
        options = dict(self.current_chat.settings)
        self._asked = Ask(act, text, self.current_chat.system, options)
        self.turns.begin(self._asked, reply)
        self._run_timer()
        self.refresh_facts()

    async def _chat_opened(self, event: ChatOpened) -> None:
        self._context_used_tokens = event.context_used_tokens
        self._dropped_messages = event.dropped_messages
        self.transcript.set_dropped(event.dropped_messages)
        if event.error is not None:
            await self.show_error(event.error)

    async def _turn_ended(self, event: TurnEnded, reply: ReplyMessage) -> None:
        chat, transcript = self.current_chat, self.transcript
        chat.follow(event.messages)
        self._context_used_tokens = event.context_used_tokens
        self._dropped_messages = event.dropped_messages
        answered = bool(chat.entries) and chat.entries[-1].role == "assistant" and event.reply is not None
        if event.reply is not None:
            self._last_stats = event.reply.stats
        if answered:
            entry = chat.entries[-1]
            await reply.finish(entry.content, event.reply)
            entry.chunks, entry.reply = tuple(reply.chunks), event.reply
            await transcript.prune()
        else:
            # The turn produced no reply, so rebuild the transcript from the conversation.
            await reply.finish(reply.text, event.reply)
            self._give_back_text()
            await transcript.show_chat(chat.entries, welcome=self._welcome())
        transcript.set_dropped(event.dropped_messages)
        if event.error is not None:
            await self.show_error(event.error)
        await self.save()
        self.refresh_facts()

    def _give_back_text(self) -> None:
        """Restore a message that got no reply to the input so that the user can resend it."""
        ask = self._asked
        if ask is None or ask.act == "regenerate" or self.prompt.text:
            return
        if self.current_chat.last_user_text == ask.text:
            return
        self.editing = ask.act == "edit" and self.current_chat.last_user_text is not None
        self._unsent = ""
        self.prompt.replace_text(ask.text)

    def leave_edit(self) -> None:
        """Stop editing the last message and restore the text that was in the input before."""
        if self.editing:
            self.editing = False
            self.prompt.replace_text(self._unsent)
            self.refresh_facts()

    async def begin_edit(self) -> None:
        """Copy the last message into the input for editing."""
        text = self.current_chat.last_user_text
        if text is None:
            self.say("There is no message to edit yet.")
            return
        self._unsent = self.prompt.text
        self.editing = True
        self.prompt.replace_text(text)
        self.prompt.focus()
        self.refresh_facts()

    async def when_free(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run `action` now, or once the running reply has been stopped."""
        await self.turns.when_free(action)

    # Header, status line and details

    async def _tick(self) -> None:
        # If drawing is slow, draw less often, because the model needs the CPU cores.
        now, spent = monotonic(), thread_time()
        pause = min((spent - self._spent_at) / _MAX_DRAWING_SHARE, _MAX_PAUSE_SECONDS)
        if now - self._drawn_at < pause:
            return
        self._drawn_at, self._spent_at = now, spent
        await self.turns.tick()
        self._ticks += 1
        self.refresh_facts(details=self._ticks % _TICKS_PER_DETAILS == 0)
        if self.turns.idle and self._tick_timer is not None:
            self._tick_timer.pause()

    def _run_timer(self) -> None:
        if self._tick_timer is not None:
            self._tick_timer.resume()

    def _measure_memory(self) -> None:
        self._memory_bytes = self.runtime.memory_bytes()
        self.refresh_facts()

    @property
    def stats(self) -> Stats | None:
        """Stats of the current or last reply."""
        return self.turns.live_stats or self._last_stats

    @property
    def method(self) -> MethodReport:
        """Drafting method of the current or last reply, or the default method before the first reply."""
        if live := self.turns.live_method:
            return live
        entry = self.current_chat.last_reply
        if self.turns.writing or entry is None or entry.reply is None:
            return self.runtime.method
        return entry.reply.method

    def refresh_facts(self, *, details: bool = True) -> None:
        """Refresh the header, the status line, the hints and the details panel."""
        stats, method = self.stats, self.method
        writing = self.turns.writing
        used = self._context_used_tokens
        if writing and stats is not None and stats is not self._last_stats:
            used = max(used, stats.prompt_tokens + stats.generated_tokens)
        self._status.facts = StatusFacts.of(
            stats,
            speed_up=speed_up_short(method),
            writing=writing,
            context_used_tokens=min(used, self.runtime.context_tokens),
            context_tokens=self.runtime.context_tokens,
            memory_bytes=self._memory_bytes,
            dropped_messages=self._dropped_messages,
        )
        self._header.chat_title = self.current_chat.shown_title
        self._refresh_hints()
        if details and "details" in self._panels:
            entry = self.current_chat.last_reply
            reply = None if writing or entry is None else entry.reply
            self._details.show(
                partial(
                    details_content,
                    stats,
                    method=method,
                    reply=reply,
                    memory_bytes=self._memory_bytes,
                    loss_limits=self.runtime.loss_limits,
                )
            )

    def _refresh_hints(self) -> None:
        prompt = self.prompt
        narrow = self._width_class == "narrow"
        prompt.border_title = "Editing your last message" if self.editing else ""
        if self.editing:
            hint = "Esc cancels" if narrow else "Enter sends it again · Esc cancels"
        elif self.turns.writing:
            hint = "Esc stops the reply"
        else:
            hint = "Enter sends · F1 help" if narrow else "Enter sends · Ctrl+J new line · F1 help"
        prompt.border_subtitle = hint
        prompt.set_class(self.turns.writing, "-writing")
        prompt.set_class(self.editing, "-editing")

    def say(self, text: str) -> None:
        """Show a short message that disappears after a few seconds."""
        self.notify(text, timeout=4, markup=False)

    # The columns

    def on_resize(self, event: events.Resize) -> None:
        """Choose the visible columns to suit the terminal width."""
        width = event.size.width
        now = "narrow" if width < 64 else "medium" if width < 110 else "wide"
        if now == self._width_class:
            return
        self._width_class = now
        wanted = {name for name in ("sidebar", "details") if getattr(self.preferences, name)}
        if now == "medium" and len(wanted) == 2:
            wanted = {"details"}
        self.call_later(self.show_panels, set() if now == "narrow" else wanted)

    async def show_panels(self, panels: set[str]) -> None:
        """Show `panels` beside the conversation, or in place of it if the terminal is narrow."""
        self._panels = panels
        self.sidebar.display = "sidebar" in panels
        self._details.display = "details" in panels
        self.query_one("#middle").set_class(self._width_class == "narrow" and bool(panels), "-covered")
        await self.refresh_sidebar()
        self.call_after_refresh(self.refresh_facts)

    async def toggle_panel(self, name: str) -> bool:
        """Show or hide a column. Return True if it is now visible."""
        panels = set(self._panels)
        if name in panels:
            panels.remove(name)
        elif self._width_class == "wide":
            panels.add(name)
        else:
            panels = {name}
        if self._width_class != "narrow":
            self.preferences.details = "details" in panels
            self.preferences.sidebar = "sidebar" in panels
        await self.show_panels(panels)
        return name in panels
