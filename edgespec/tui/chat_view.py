"""The chat view, which keeps the screen, the model thread and the saved chat in sync."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from time import monotonic, thread_time
from typing import TYPE_CHECKING

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message as Event
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from edgespec.chat.store import ChatStore, Setting
from edgespec.errors import ChatFileError
from edgespec.tui.archive import Archive
from edgespec.tui.history import History
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.preferences import Preferences
from edgespec.tui.texts import error_text, notices, speed_up_short, welcome_rows
from edgespec.tui.widgets.details import Details, details_content
from edgespec.tui.widgets.messages import Panel, ReplyMessage, UserMessage, Welcome
from edgespec.tui.widgets.prompt import PromptInput
from edgespec.tui.widgets.sidebar import Sidebar
from edgespec.tui.widgets.status import StatusFacts, StatusLine
from edgespec.tui.widgets.transcript import Transcript
from edgespec.tui.worker import Act, Ask, ChatState, ModelThread

if TYPE_CHECKING:
    from edgespec import MethodReport, Runtime, Stats

__all__ = ["ChatView"]

# Interval between screen updates.
_TICK_SECONDS = 1 / 25
# The details panel is updated once per this many screen updates, so that its numbers stay readable.
_TICKS_PER_DETAILS = 5
# Interval between memory measurements.
_MEMORY_SECONDS = 3.0
# Maximum share of CPU time spent drawing, and the longest pause between two screen updates.
_MAX_DRAWING_SHARE = 0.25
_MAX_PAUSE_SECONDS = 0.2


class ChatView(Screen[None]):
    """The chat screen without key bindings and commands, which `ChatScreen` adds."""

    class PreferencesChanged(Event):
        """The user changed the theme or the visible columns."""

    def __init__(
        self,
        thread: ModelThread,
        runtime: Runtime,
        store: ChatStore,
        preferences: Preferences,
        *,
        system: str | None,
        settings: Mapping[str, Setting],
        typed: str = "",
    ) -> None:
        super().__init__()
        self.runtime = runtime
        self.preferences = preferences
        self.first_system = system
        self.first_settings = dict(settings)
        self.current_chat = OpenChat(system, dict(settings))
        self.archive = Archive(store)
        self.history = History()
        self.editing = False
        self.transcript = Transcript(self._welcome(), id="transcript")
        self.prompt = PromptInput(self.history, id="prompt")
        self.sidebar = Sidebar(id="sidebar", compact=True)
        self._title = Static(id="title")
        self._details = Details(id="details")
        self._status = StatusLine(id="status")
        self._thread = thread
        self._job: Future[ChatState] | None = None
        self._reply: ReplyMessage | None = None
        self._after_reply: Callable[[], Awaitable[None]] | None = None
        self._typed = typed
        self._unsent = ""
        self._asked: Ask | None = None
        self._last_stats: Stats | None = None
        self._state = ChatState()
        self._memory_bytes = runtime.memory_bytes()
        self._ticks = 0
        self._drawn_at = self._spent_at = 0.0
        self._tick_timer: Timer | None = None
        self._panels: set[str] = set()
        self._width_class = ""

    def compose(self) -> ComposeResult:
        draft = self.runtime.draft
        models = self.runtime.target.name + (f" with draft model {draft.name}" if draft is not None else "")
        with Horizontal(id="header"):
            yield Static(Content.assemble(("edgespec", "bold"), "  ", (models, "$muted")), id="models")
            yield self._title
        with Horizontal(id="middle"):
            yield self.sidebar
            yield self.transcript
            yield self._details
        yield self.prompt
        yield self._status

    def on_mount(self) -> None:
        self._tick_timer = self.set_interval(_TICK_SECONDS, self._tick, pause=True)
        self.set_interval(_MEMORY_SECONDS, self._measure_memory)
        self._start(self._thread.open_chat(self.current_chat.system, ()))
        self.transcript.set_origin(self.preferences.origin)
        self.prompt.replace_text(self._typed)
        self.prompt.focus()

    async def show_chat(self, chat: OpenChat) -> None:
        """Show `chat` instead of the current chat."""
        self.current_chat = chat
        self._last_stats = None
        self.leave_edit()
        self.history.seed(entry.content for entry in chat.entries if entry.role == "user")
        self._start(self._thread.open_chat(chat.system, chat.messages))
        await self.transcript.show_chat(chat.entries, welcome=self._welcome())
        await self.refresh_sidebar()
        self.refresh_facts()
        self.prompt.focus()

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
                "Another program changed this chat. Your version was saved as a new chat."
            )
        await self.refresh_sidebar()
        return True

    async def refresh_sidebar(self) -> None:
        """Refresh the list of chats if it is visible."""
        if "sidebar" not in self._panels:
            return
        try:
            self.sidebar.show(await self.archive.list(), current=self.current_chat.id)
        except ChatFileError as error:
            await self.show_error(error)

    async def show_error(self, error: Exception) -> None:
        """Show an error in the conversation."""
        await self.transcript.add(Panel(*error_text(error), kind="error"))

    @property
    def writing(self) -> bool:
        """True while a reply is being generated."""
        return self._reply is not None

    @property
    def idle(self) -> bool:
        """True if the model thread is idle."""
        return self._job is None

    def stop_reply(self) -> None:
        """Stop the running reply."""
        self._thread.cancel()

    async def when_free(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run `action` now, or stop the running reply first and then run it."""
        if self.writing:
            self._after_reply = action
            self.stop_reply()
        else:
            await action()

    async def finish(self, timeout_seconds: float) -> None:
        """Stop the reply and wait until the chat is saved or the timeout expires. Called before quitting."""
        self._after_reply = None
        self.stop_reply()
        deadline = monotonic() + timeout_seconds
        while not self.idle and monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def take_turn(self, act: Act, text: str) -> None:
        """Show the user's message and start the reply."""
        transcript, entries = self.transcript, self.current_chat.entries
        last_user = max((i for i, entry in enumerate(entries) if entry.role == "user"), default=-1)
        first_replaced = {"send": len(entries), "regenerate": last_user + 1, "edit": last_user}[act]
        await transcript.remove_notes()
        await transcript.remove_messages(len(entries) - first_replaced)
        if act != "regenerate":
            await transcript.add(UserMessage(text))
        self._reply = await transcript.start_reply()
        self._asked = Ask(act, text, self.current_chat.system, dict(self.current_chat.settings))
        self._start(self._thread.ask(self._asked))
        self.refresh_facts()

    def _start(self, job: Future[ChatState]) -> None:
        self._job = job
        if self._tick_timer is not None:
            self._tick_timer.resume()

    async def _tick(self) -> None:
        # If drawing is slow, draw less often to leave the CPU to the model.
        now, spent = monotonic(), thread_time()
        pause = min((spent - self._spent_at) / _MAX_DRAWING_SHARE, _MAX_PAUSE_SECONDS)
        if now - self._drawn_at < pause:
            return
        self._drawn_at, self._spent_at = now, spent
        # Check whether the reply has ended before reading its chunks, so that no chunk is missed.
        job, reply = self._job, self._reply
        ended = job is not None and job.done()
        if reply is not None:
            await self._write_chunks(reply)
        if ended and job is not None and job is self._job:
            self._reply = None
            await self._end_job(job.result(), reply)
            if self._after_reply is not None:
                action, self._after_reply = self._after_reply, None
                await action()
            if self._job is job:
                self._job = None
        self._ticks += 1
        self.refresh_facts(details=ended or self._ticks % _TICKS_PER_DETAILS == 0)
        if self.idle and self._tick_timer is not None:
            self._tick_timer.pause()

    async def _write_chunks(self, reply: ReplyMessage) -> None:
        queue = self._thread.chunks
        if chunks := [queue.get_nowait() for _ in range(queue.qsize())]:
            await reply.write(chunks)
        else:
            reply.show_reading(self._thread.read_fraction)

    async def _end_job(self, state: ChatState, reply: ReplyMessage | None) -> None:
        self._state = state
        chat = self.current_chat
        if reply is not None:
            chat.follow(state.messages)
            if state.reply is not None:
                self._last_stats = state.reply.stats
            if state.reply is not None and chat.entries and chat.entries[-1].role == "assistant":
                entry = chat.entries[-1]
                await reply.finish(entry.content, state.reply)
                entry.chunks, entry.reply = tuple(reply.chunks), state.reply
                await self.transcript.prune()
            else:
                # The turn failed without a reply, so restore the conversation.
                await reply.finish(reply.text, state.reply)
                self._give_back_text()
                await self.transcript.show_chat(chat.entries, welcome=self._welcome())
        self.transcript.set_dropped(state.dropped_messages)
        if state.error is not None:
            await self.show_error(state.error)
        if reply is not None:
            await self.save()

    def _give_back_text(self) -> None:
        """Put a message that got no reply back into the input, so that the user can resend it."""
        ask, last = self._asked, self.current_chat.last_user_text
        if ask is None or ask.act == "regenerate" or self.prompt.text or last == ask.text:
            return
        self.editing = ask.act == "edit" and last is not None
        self._unsent = ""
        self.prompt.replace_text(ask.text)

    def leave_edit(self) -> None:
        """Stop editing the last message and restore the previous input text."""
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

    def _measure_memory(self) -> None:
        self._memory_bytes = self.runtime.memory_bytes()
        self.refresh_facts()

    @property
    def stats(self) -> Stats | None:
        """Statistics of the current or last reply."""
        stream = self._thread.stream if self.writing else None
        return self._last_stats if stream is None else stream.stats

    @property
    def method(self) -> MethodReport:
        """Drafting method of the current or last reply, or the default method before the first reply."""
        if self.writing:
            stream = self._thread.stream
            return self.runtime.method if stream is None else stream.method
        entry = self.current_chat.last_reply
        return self.runtime.method if entry is None or entry.reply is None else entry.reply.method

    def refresh_facts(self, *, details: bool = True) -> None:
        """Refresh the header, the status line, the hints and the details panel."""
        stats, method = self.stats, self.method
        used = self._state.context_used_tokens
        if self.writing and stats is not None and stats is not self._last_stats:
            used = max(used, stats.prompt_tokens + stats.generated_tokens)
        self._status.facts = StatusFacts(
            speed_up=speed_up_short(method),
            writing=self.writing,
            tokens_per_second=stats.tokens_per_second if stats else None,
            acceptance_rate=stats.acceptance_rate if stats else None,
            context_used_tokens=min(used, self.runtime.context_tokens),
            context_tokens=self.runtime.context_tokens,
            memory_bytes=self._memory_bytes,
            dropped_messages=self._state.dropped_messages,
        )
        self._title.update(Content(self.current_chat.shown_title))
        self._refresh_hints()
        if details and "details" in self._panels:
            entry = self.current_chat.last_reply
            reply = None if self.writing or entry is None else entry.reply
            self._details.show(
                partial(details_content, stats, method=method, reply=reply, memory_bytes=self._memory_bytes)
            )

    def _refresh_hints(self) -> None:
        prompt = self.prompt
        narrow = self._width_class == "-narrow"
        prompt.border_title = "Editing your last message" if self.editing else ""
        if self.editing:
            hint = "Esc cancels" if narrow else "Enter resends · Esc cancels"
        elif self.writing:
            hint = "Esc stops the reply"
        else:
            hint = "Enter sends · F1 help" if narrow else "Enter sends · Ctrl+J new line · F1 help"
        prompt.border_subtitle = hint
        prompt.set_class(self.writing, "-writing")
        prompt.set_class(self.editing, "-editing")

    def say(self, text: str) -> None:
        """Show a short message that disappears after a few seconds."""
        self.notify(text, timeout=4, markup=False)

    def on_resize(self, event: events.Resize) -> None:
        breakpoints = self.app.HORIZONTAL_BREAKPOINTS or []
        now = [name for least, name in breakpoints if least <= event.size.width][-1]
        if now == self._width_class:
            return
        self._width_class = now
        wanted = {name for name in ("sidebar", "details") if getattr(self.preferences, name)}
        if now == "-medium" and len(wanted) == 2:
            wanted = {"details"}
        self.call_later(self.show_panels, set() if now == "-narrow" else wanted)

    async def show_panels(self, panels: set[str]) -> None:
        """Show `panels` beside the conversation, or instead of it if the terminal is narrow."""
        self._panels = panels
        self.sidebar.display = "sidebar" in panels
        self._details.display = "details" in panels
        self.query_one("#middle").set_class(self._width_class == "-narrow" and bool(panels), "-covered")
        await self.refresh_sidebar()
        self.call_after_refresh(self.refresh_facts)

    async def toggle_panel(self, name: str) -> bool:
        """Show or hide the column `name`. Return True if it is now visible."""
        others = self._panels - {name} if self._width_class == "-wide" or name in self._panels else set()
        panels = others if name in self._panels else others | {name}
        if self._width_class != "narrow":
            self.preferences.details = "details" in panels
            self.preferences.sidebar = "sidebar" in panels
        await self.show_panels(panels)
        return name in panels
