"""The chat view: the layout of the chat screen, its panels and its status line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message as Event
from textual.reactive import Reactive
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Collapsible, Static

from edgespec.chat.saved_chat import ModelReferences, Setting
from edgespec.errors import ChatFileError
from edgespec.tui.archive import Archive
from edgespec.tui.background import CallThread
from edgespec.tui.commands import table
from edgespec.tui.desktop import CodeCopier
from edgespec.tui.downloads import Downloads
from edgespec.tui.input_syntax import QUOTES
from edgespec.tui.open_chat import OpenChat, version_label
from edgespec.tui.preferences import Preferences
from edgespec.tui.texts import (
    drafter_names,
    drafting_explanation,
    error_text,
    exactness_for,
    speed_up_short,
    welcome_line,
)
from edgespec.tui.tool_access import ToolAccess
from edgespec.tui.widgets.details import Details, SpeedHistory, StatusFacts, StatusLine, details_content
from edgespec.tui.widgets.files import FileChips, PathList
from edgespec.tui.widgets.long_texts import PastedTexts
from edgespec.tui.widgets.messages import MessageWidget, Panel, Welcome, message_key_hint
from edgespec.tui.widgets.prompt import History, PromptInput, WaitingMessages
from edgespec.tui.widgets.sidebar import Sidebar, chat_list_hint
from edgespec.tui.widgets.transcript import Transcript
from edgespec.tui.worker import ChatState, ModelThread, PlanModel

if TYPE_CHECKING:
    from edgespec import MethodReport, Stats
    from edgespec.api.sharing.base import ChatModel

_MEMORY_SECONDS = 3.0


class _Row(Horizontal):
    # Draw only the background. By default, Textual also draws the borders and padding row by row, which takes
    # longer and has no visible effect because the child widgets cover them.
    BLANK = True


class ChatView(Screen[None]):
    """The widgets of the chat screen. Subclasses generate replies and handle keys."""

    # See `_Row`.
    BLANK = True
    # By default, Textual first focuses the hidden list of chats, so the input would briefly show its keys.
    AUTO_FOCUS = "#prompt"
    # Avoid Textual's default of redrawing the whole screen whenever the focus moves.
    focused: Reactive[Widget | None] = Reactive(None, repaint=False)
    # Set by `TurnScreen`.
    tool_use: ToolAccess

    class PreferencesChanged(Event):
        """Posted when the user changes the theme or the visible columns."""

    @dataclass
    class ModelChosen(Event):
        """Posted when the user chooses a model on this machine, or changes how it is loaded.

        Attributes:
            reference: A reference to the model.
            changed: Load options that the user has changed in the chat, or None when switching to another
                model.
            is_other: Whether this is another model. If so, it keeps the options changed before that suit it.
            note: A note to show once the model is loaded.
        """

        reference: str
        changed: Mapping[str, Any] | None = None
        is_other: bool = False
        note: str = ""

    def __init__(
        self,
        thread: ModelThread,
        runtime: ChatModel,
        archive: Archive,
        preferences: Preferences,
        history: History,
        *,
        models: ModelReferences,
        system: str | None,
        settings: Mapping[str, Setting],
        changed: Mapping[str, Any],
        take_typed: Callable[[], str],
        pasted: PastedTexts,
        plan_model: PlanModel,
        notices: Sequence[str],
    ) -> None:
        super().__init__()
        self.runtime = runtime
        self.models = models
        self.changed_load_options = changed
        # Paths of the models that this program has loaded.
        self.model_paths = [runtime.target.path]
        self.plan_model = plan_model
        self.preferences = preferences
        self.first_system = system
        self.first_settings = dict(settings)
        self.current_chat = OpenChat(system, dict(settings))
        self.archive = archive
        self.history = history
        self.code_copier = CodeCopier()
        self.downloads = Downloads()
        self.editing: int | None = None
        self.calling_tools = False
        self._notices = notices
        self.transcript = Transcript(self.current_chat, self._welcome(), id="transcript")
        files = CallThread()
        self.paths = PathList(files, id="paths", compact=True)
        self.chips = FileChips(files, runtime, id="chips")
        self.waiting = WaitingMessages(id="waiting")
        self.prompt = PromptInput(
            self.history,
            self.paths,
            self.chips,
            self.waiting,
            pasted,
            archive.store.folder.parent,
            id="prompt",
        )
        self.sidebar = Sidebar(id="sidebar")
        self._models = Static(id="models")
        self._title = Static(id="title")
        self._details = Details(id="details")
        self._status = StatusLine(id="status")
        self.model_thread = thread
        self._take_typed = take_typed
        self.speeds = SpeedHistory()
        self._last_stats: Stats | None = None
        self._state = ChatState()
        self._memory_bytes = runtime.memory_bytes()
        # The input's current title and subtitle. Setting them redraws the input, so they are set only when
        # they change.
        self._hints = "", ""
        self._panels: set[str] = set()
        self._width_class = ""

    def compose(self) -> ComposeResult:
        with _Row(id="header"):
            yield self._models
            yield self._title
        with _Row(id="middle"):
            yield self.sidebar
            yield self.transcript
            yield self._details
        yield self.waiting
        yield self.paths
        yield self.chips
        yield self.prompt
        yield self._status

    def on_mount(self) -> None:
        self.set_interval(_MEMORY_SECONDS, self._measure_memory)
        # Remove trailing line breaks from text that the user typed while the model was loading.
        self.prompt.replace_text(self._take_typed().rstrip("\n"))
        self.prompt.focus()

    @property
    def explanation(self) -> str:
        """The explanation of drafting in an empty chat. Empty if it was shown before or does not apply."""
        is_needed = not (self.preferences.knows_drafting or self.current_chat.messages)
        return drafting_explanation(self.runtime) if is_needed else ""

    def mark_explained(self) -> None:
        """If this chat shows the explanation of drafting, record that later chats need not show it."""
        if self.explanation:
            self.preferences.knows_drafting = True
            self.post_message(self.PreferencesChanged())

    def _welcome(self) -> Welcome:
        return Welcome(welcome_line(self.runtime), self.explanation, self._notices)

    async def refresh_sidebar(self) -> None:
        """Refresh the list of chats if it is visible."""
        if "sidebar" not in self._panels:
            return
        try:
            self.sidebar.show(await asyncio.to_thread(self.archive.list), current=self.current_chat.id)
        except ChatFileError as error:
            await self.show_error(error)

    async def show_error(self, error: Exception) -> None:
        await self.transcript.add(Panel(*error_text(error), kind="error"))

    @property
    def writing(self) -> bool:
        """True while a reply is being generated or its tool calls are running."""
        return self.current_chat.turn is not None or self.calling_tools

    def _measure_memory(self) -> None:
        self._memory_bytes = self.runtime.memory_bytes()
        self.refresh_facts()

    @property
    def stats(self) -> Stats | None:
        """Statistics of the current or last reply."""
        stream = self.model_thread.stream if self.writing else None
        return self._last_stats if stream is None else stream.stats

    @property
    def method(self) -> MethodReport:
        """Drafting method of the current or last reply, or the default method before the first reply."""
        if self.writing:
            stream = self.model_thread.stream
            return self.runtime.method if stream is None else stream.method
        entry = self.current_chat.last_reply
        # There are no statistics if another model or an earlier run of edgespec generated the last reply.
        if self._last_stats is None or entry is None or entry.reply is None:
            return self.runtime.method
        return entry.reply.method

    def refresh_facts(self, *, details: bool = True) -> None:
        """Refresh the header, the status line, the hints and the details panel."""
        stats, method = self.stats, self.method
        used = self._state.context_used_tokens
        if self.writing and stats is not None and stats is not self._last_stats:
            used = max(used, stats.prompt_tokens + stats.generated_tokens)
        self._status.facts = StatusFacts(
            speed_up=speed_up_short(method, stats),
            writing=self.writing,
            tokens_per_second=stats.tokens_per_second if stats else None,
            acceptance_rate=stats.acceptance_rate if stats and method.effective != "none" else None,
            context_used_tokens=min(used, self.runtime.context_tokens),
            context_tokens=self.runtime.context_tokens,
            memory_bytes=self._memory_bytes,
            dropped_messages=self._state.dropped_messages,
            tools=len(self.tool_use.tools),
            downloads=self.downloads.status,
        )
        drafters = drafter_names(self.runtime)
        names = " and ".join(f"{label.lower()} {name}" for label, name in drafters)
        models = self.runtime.target.name + (f" with {names}" if names else "")
        for line, content in (
            (self._models, Content.assemble(("edgespec", "bold"), "  ", (models, "$muted"))),
            (self._title, Content(self.current_chat.shown_title)),
        ):
            # Each update of a `Static` lays out the whole screen again, so skip unnecessary ones.
            if line.content != content:
                line.update(content)
        self._refresh_hints()
        if details and "details" in self._panels:
            entry = self.current_chat.last_reply
            reply = None if self.writing or entry is None else entry.reply
            self._details.show(
                partial(
                    details_content,
                    stats,
                    rates=self.speeds.rates(),
                    method=method,
                    drafters=drafters,
                    reply=reply,
                    memory_bytes=self._memory_bytes,
                    loss_limits=self.runtime.loss_limits,
                    exactness=exactness_for(self.runtime, self.current_chat.settings),
                )
            )

    def _refresh_hints(self) -> None:
        prompt = self.prompt
        narrow = self._width_class == "-narrow"
        editing = self.editing is not None
        role = "" if self.editing is None else self.current_chat.tree.messages[self.editing].role
        names = {"user": "Editing your message", "assistant": "Editing the reply"}
        title = names.get(role, "Editing the message" if role else "")
        if (message := self.selected) is not None:
            label = "" if message.place is None else version_label(self.current_chat.tree, message.place)
            title = f"Version {label}" if label else ""
            hint = message_key_hint(prompt.size.width - 2, versions=bool(label), fold=message.fold_hint)
        elif self.can_undo_all:
            hint = "u undoes · Esc back"
        elif self.sidebar.has_focus:
            hint = chat_list_hint(narrow=narrow)
        elif self.paths.display:
            hint = "Enter chooses · Esc closes the list"
        elif editing:
            enter = "Enter resends" if role == "user" else "Enter saves"
            hint = "Esc cancels" if narrow else f"{enter} · Esc cancels"
        elif typed := table.hint(prompt.text, prompt.size.width - 2):
            hint = typed
        elif prompt.is_in_block:
            hint = f"{QUOTES} and Enter send" if narrow else f"A line with only {QUOTES} sends the message"
        elif self.writing:
            hint = "Esc stops the reply"
            if not narrow and prompt.text:
                hint += " · Enter sends this next"
            elif not narrow and self.waiting.texts:
                hint += " · Up takes your message back"
        elif self.waiting.texts and not prompt.text:
            hint = "Enter sends the waiting message" + ("" if narrow else " · Up takes it back")
        else:
            hint = "Enter sends · F1 help" if narrow else "Enter sends · Ctrl+J new line · F1 help"
        if (title, hint) != self._hints:
            self._hints = title, hint
            prompt.border_title, prompt.border_subtitle = title, Content(hint)
        prompt.set_class(self.writing, "-writing")
        prompt.set_class(editing, "-editing")

    @property
    def selected(self) -> MessageWidget | None:
        """The selected message, or None."""
        return self.focused if isinstance(self.focused, MessageWidget) else None

    @property
    def can_undo_all(self) -> bool:
        """True while the transcript has focus after the user has deleted all messages."""
        tree = self.current_chat.tree
        return self.transcript.has_focus and not tree.path and bool(tree.deleted)

    @on(events.DescendantFocus)
    @on(PromptInput.Changed)
    def _input_changed(self) -> None:
        self._refresh_hints()
        self.prompt.follow_references()

    @on(Collapsible.Toggled)
    @on(PathList.Toggled)
    def _hints_changed(self) -> None:
        self._refresh_hints()

    @on(PromptInput.SelectionChanged)
    def _cursor_moved(self) -> None:
        self.prompt.follow_references()

    @on(PathList.Chosen)
    def _path_chosen(self, event: PathList.Chosen) -> None:
        self.prompt.choose_path(event.path)

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
        """Show the named panels next to the conversation, or in its place in a narrow terminal."""
        self._panels = panels
        await self.refresh_sidebar()
        self.sidebar.display = "sidebar" in panels
        self._details.display = "details" in panels
        self.query_one("#middle").set_class(self._width_class == "-narrow" and bool(panels), "-covered")
        self.call_after_refresh(self.refresh_facts)

    async def uncover(self) -> None:
        """In a narrow terminal, close the panel that covers the conversation."""
        if self._width_class == "-narrow" and self._panels:
            await self.show_panels(set())

    async def toggle_panel(self, name: str) -> bool:
        """Show or hide a panel, `sidebar` or `details`. Return True if it is now visible."""
        others = self._panels - {name} if self._width_class == "-wide" or name in self._panels else set()
        panels = others if name in self._panels else others | {name}
        if self._width_class != "-narrow":
            self.preferences.details = "details" in panels
            self.preferences.sidebar = "sidebar" in panels
        await self.show_panels(panels)
        return name in panels

    async def show_chats(self, query: str = "") -> None:
        """Show and focus the list of chats that match `query`."""
        if "sidebar" not in self._panels:
            await self.toggle_panel("sidebar")
        self.sidebar.filter(query)
        # `focus` would take effect only after the list has been drawn.
        self.set_focus(self.sidebar)
