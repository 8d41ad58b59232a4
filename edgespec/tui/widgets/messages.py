"""The transcript's widgets: messages, replies, tool calls and panels, and the keys for the selected message.

Reasoning and tool calls are folded to one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from time import monotonic
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Region, Size
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Collapsible, Static
from textual.widgets._collapsible import CollapsibleTitle

from edgespec.chat.message import Message
from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.options.methods import sources_text
from edgespec.tools.tool import ToolResult, Veto, visible
from edgespec.tui.numbers import count, percent, seconds_text
from edgespec.tui.open_chat import ChatEntry
from edgespec.tui.tool_access import readable_arguments
from edgespec.tui.widgets.files import file_chips
from edgespec.tui.widgets.image_preview import ImagePreview
from edgespec.tui.widgets.long_texts import hidden_note, limited_chunks, limited_markdown, limited_text
from edgespec.tui.widgets.reply_markdown import GUESSED_STYLE, OWN_STYLE, OriginColours, ReplyMarkdown

if TYPE_CHECKING:
    from edgespec import AttachedFile, TextChunk

_COPY_CHAT = "type /copy chat to copy the whole chat"
_WHOLE_THOUGHTS = "the chat file contains the whole text"
_COPY_REPLY = "type /copy to copy the last reply, or /copy chat to copy the whole chat"
_LEGEND = Content.assemble(
    ("■ ", GUESSED_STYLE), "guessed correctly   ", ("■ ", OWN_STYLE), "from the model itself"
)
_ENDINGS = {
    "cancelled": "stopped",
    "length": "stopped: the reply reached its maximum length. Type /continue to extend it.",
    "context_full": "stopped: the context is full",
}
# Maximum length, in characters, of the arguments and of an error message in the folded line.
_MAX_ARGUMENTS = 60
_MAX_PROBLEM = 100
# Labels for calls that the user refused or stopped.
_VETOES: dict[Veto, str] = {"refused": "not allowed", "stopped": "stopped"}


class _MessageKey(NamedTuple):
    """A key for the selected message. The screen runs its action.

    Attributes:
        key: Textual's name of the key.
        action: Name of the action that the key triggers.
        label: The key and the action in the hint line. Empty if the hint line does not show them.
        help: Description on the help page.
    """

    key: str
    action: str
    label: str
    help: str


MESSAGE_KEYS = (
    _MessageKey("e", "edit", "e edit", "edit it; Enter saves a new version"),
    _MessageKey("r", "rerun", "r re-run", "generate another reply"),
    _MessageKey("g", "go_on", "g go on", "continue the reply from where it stopped"),
    _MessageKey("c", "copy", "c copy", "copy it"),
    _MessageKey("d", "delete", "d delete", "delete it and the messages after it"),
    _MessageKey("f", "fork", "f fork", "start a new chat with the messages up to this one"),
    _MessageKey("b", "copy_code", "b copy code", "copy its last code block; press again for the one before"),
    _MessageKey("o", "open_in_editor", "o open in editor", "read it in your text editor"),
    _MessageKey("u", "undo", "", "restore the messages that were deleted last"),
    _MessageKey("left", "older_version", "", "show the previous version"),
    _MessageKey("right", "newer_version", "", "show the next version"),
)
"""The keys for the selected message, in the order of the help page."""


def message_key_hint(width: int, *, versions: bool, fold: str) -> str:
    """Return the hint line for a selected message, with as many keys as fit. F1 lists the others.

    Args:
        width: Maximum width of the hint in cells.
        versions: Whether the message has other versions.
        fold: What Enter does. Empty if the message contains neither reasoning nor a tool call.
    """
    first = [*(["←→ version"] if versions else []), *([fold] if fold else [])]
    keys = [*first, *(each.label for each in MESSAGE_KEYS if each.label)]
    for number in range(len(keys), 0, -1):
        more = ["F1 more"] if number < len(keys) else []
        text = " · ".join((*keys[:number], *more, "Esc back"))
        if len(text) <= width:
            return text
    return "Esc back"


class MessageWidget(Widget, can_focus=True):
    """A message in the transcript. It is selected while it has focus.

    Attributes:
        place: The message's index in the chat's `MessageTree`. None until the message is part of it.
    """

    # A click must not select a message. Otherwise, letters typed afterwards would trigger message actions.
    FOCUS_ON_CLICK = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "screen.select_message(-1)", show=False),
        Binding("down", "screen.select_message(1)", show=False),
        Binding("pageup", "screen.page(-1)", show=False),
        Binding("pagedown", "screen.page(1)", show=False),
        Binding("enter", "unfold", show=False),
        *(Binding(each.key, f"screen.message_action('{each.action}')", show=False) for each in MESSAGE_KEYS),
    ]

    # By default, Textual lays out and redraws all messages when one of them changes size. Only scrolling
    # widgets need that.
    virtual_size: Reactive[Size] = Reactive(Size(0, 0), repaint=False)

    place: int | None = None

    @property
    def fold_hint(self) -> str:
        """What Enter does with the message's reasoning or tool call, or an empty string if there is none."""
        folds = [fold for fold in self.query(Collapsible) if fold.display]
        if not folds:
            return ""
        return "Enter unfold" if folds[0].collapsed else "Enter fold"

    def action_unfold(self) -> None:
        """Unfold the message's reasoning or tool call, or fold it again."""
        for fold in self.query(Collapsible):
            fold.collapsed = not fold.collapsed


class UserMessage(Static, MessageWidget, can_focus=True):
    """A user message, shown exactly as typed, with its images and the names and sizes of its files.

    Only the start of a very long message is shown.

    Args:
        text: The message.
        files: The files attached to the message.
        versions: Number of the shown version, such as `2/3`. Empty if there are no other versions.
    """

    # Textual takes bindings only from the first base class.
    BINDINGS: ClassVar[list[BindingType]] = MessageWidget.BINDINGS

    def __init__(self, text: str, files: Sequence[AttachedFile] = (), versions: str = "") -> None:
        line = Content.styled(_versions_line(versions), "$muted not bold")
        parts = (Content(limited_text(text, _COPY_CHAT)), file_chips(files), line)
        super().__init__(Content("\n").join([part for part in parts if part]), classes="user")
        images = [file.image for file in files if file.image]
        # Most messages have no images, so this widget draws the text itself instead of using a child widget.
        self._preview = ImagePreview(images) if images else None

    def compose(self) -> ComposeResult:
        if self._preview is not None:
            yield self._preview

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the combined height of the text and the images docked below it."""
        if self._preview is None or not width:
            return super().get_content_height(container, viewport, width)
        text_rows = self.visual.get_height(self.styles.get_rules(), width)
        return text_rows + self._preview.get_content_height(container, viewport, width)


class ReplyMessage(MessageWidget):
    """Widget for a reply: its foldable reasoning, its answer, and how it ended.

    The answer is shown as Markdown. Its tokens can be coloured by their origin (draft or target).

    Attributes:
        text: The answer.
        reasoning: The reasoning before the answer.
        writing: Whether the reply is being generated.

    Args:
        entry: The reply in the open chat, or None if it is about to be generated.
        versions: Number of the shown version, such as `2/3`. Empty if there are no other versions.
        origin: Whether to colour the tokens by their origin.
    """

    def __init__(self, entry: ChatEntry | None, versions: str = "", *, origin: bool) -> None:
        super().__init__(classes="reply")
        entry = entry or ChatEntry(Message("assistant", ""))
        self._entry = entry
        self._versions = _versions_line(versions)
        self.text = entry.content
        self.reasoning = entry.reasoning
        self.chunks = list(entry.chunks)
        self._origin = origin
        self.writing = False
        self._drawn = limited_markdown(self.text)
        self._markdown = ReplyMarkdown(self._drawn)

    # Create the next two widgets on first use. Most replies need neither, and creating them would make
    # scrolling slow.
    @cached_property
    def thoughts(self) -> Thoughts:
        """The widget for the reasoning. It is part of the screen only if there is reasoning."""
        return Thoughts(self._entry.thought_seconds)

    @cached_property
    def _end(self) -> Static:
        return Static(classes="reply-end")

    def compose(self) -> ComposeResult:
        if self.reasoning:
            yield self.thoughts
        yield self._markdown

    def on_mount(self) -> None:
        if self.coloured:
            self.show_origin(True)
        else:
            self._refresh_views()

    def render_lines(self, crop: Region) -> list[Strip]:
        """Draw the border of a selected reply. The other widgets draw the rest."""
        if self.has_focus:
            return super().render_lines(crop)
        return [Strip.blank(crop.width, self.visual_style.rich_style)] * crop.height

    @property
    def coloured(self) -> bool:
        """True if draft tokens and the target's own tokens are shown in different colours."""
        return self._origin and bool(self.chunks)

    def begin(self) -> None:
        """Prepare to receive text chunks. Show an ellipsis until the first chunk arrives."""
        self.writing = True
        self._show_end(Content("…"))

    def show_preparing(self, description: str, fraction: float) -> None:
        """Show the step before the first text, such as reading the prompt, and the completed fraction.

        Does nothing once text has appeared.
        """
        if description and not (self.text or self.reasoning) and fraction < 1:
            done = f", {percent(fraction)}" if fraction > 0 else ""
            self._show_end(Content(f"{description}{done}"))

    async def write(self, chunks: Sequence[TextChunk]) -> None:
        """Append chunks to the reply."""
        self.chunks.extend(chunks)
        fragment = "".join(chunk.text for chunk in chunks if not chunk.reasoning)
        self.text += fragment
        thoughts = "".join(chunk.text for chunk in chunks if chunk.reasoning)
        self.reasoning += thoughts
        drawn = limited_markdown(self.text)
        added = drawn[len(self._drawn) :]
        self._drawn += added
        if any(chunk.tool_call for chunk in chunks):
            self._show_end(Content("calling a tool…"))
        elif self.text or self.reasoning:
            self._show_end(_LEGEND if self.coloured else Content(self._hidden_note()))
        self._colour_new(chunks)
        await self._mount_thoughts()
        if thoughts or (fragment and fragment == self.text):
            self._refresh_thoughts()
        self._markdown.append(added)

    async def finish(self, entry: ChatEntry, versions: str) -> None:
        """Mark the reply as finished and show its final text. See `__init__` for the arguments."""
        self._entry, self._versions = entry, _versions_line(versions)
        self.reasoning = entry.reasoning
        await self._mount_thoughts()
        self.writing = False
        # Reparse the whole text, because a link can be defined after its use.
        self.text, self._drawn = entry.content, limited_markdown(entry.content)
        self._markdown.colours = self._colours()
        self._markdown.replace(self._drawn)
        self._refresh_views()

    def show_origin(self, origin: bool) -> None:
        """Colour tokens by their origin (draft or target), or stop colouring them."""
        self._origin = origin
        self._markdown.colours = self._colours()
        self._markdown.replace(self._drawn)
        self._refresh_views()

    def _colours(self) -> OriginColours | None:
        """Return the colours of the answer, or None if it is not coloured."""
        if not self.coloured:
            return None
        answer = [chunk for chunk in self.chunks if not chunk.reasoning]
        written = "".join(chunk.text for chunk in answer)
        # The start of a reply that was continued has no chunks, so it is not coloured.
        start = self.text.removesuffix(written) if self.text.endswith(written) else ""
        colours = OriginColours(len(start))
        for chunk in answer:
            colours.add(chunk.text, accepted=chunk.accepted)
        return colours

    def _colour_new(self, chunks: Sequence[TextChunk]) -> None:
        """Colour new chunks of the answer, before they are drawn."""
        if (colours := self._markdown.colours) is None:
            self._markdown.colours = self._colours()
            return
        for chunk in chunks:
            if not chunk.reasoning:
                colours.add(chunk.text, accepted=chunk.accepted)

    async def _mount_thoughts(self) -> None:
        if self.reasoning and not self.thoughts.is_attached:
            await self.mount(self.thoughts, before=self._markdown)

    def _refresh_thoughts(self) -> None:
        if not self.reasoning:
            return
        chunks = [chunk for chunk in self.chunks if chunk.reasoning]
        # Chunks are missing if the reply was continued or comes from a saved chat.
        complete = "".join(chunk.text for chunk in chunks) == self.reasoning
        text = (
            _coloured_thoughts(chunks)
            if self.coloured and complete
            else Content(limited_text(self.reasoning, _WHOLE_THOUGHTS))
        )
        if complete:
            length = count(sum(chunk.token_count for chunk in chunks), "token")
        else:
            length = count(len(self.reasoning.split()), "word")
        if self.writing and not self.text:
            self.thoughts.show_growing(text, length)
        else:
            self.thoughts.show(text, length)

    def _refresh_views(self) -> None:
        coloured = self.coloured
        self.set_class(coloured, "-coloured")
        if not self.writing:
            self._refresh_thoughts()
            self._show_end(self._closing_line(coloured))
            # Tool calls are shown below the reply, so hide the reply itself if it contains nothing else.
            self.display = bool(self.text or self.reasoning or not self._entry.message.tool_calls)

    def _show_end(self, line: Content) -> None:
        if line and not self._end.is_attached:
            self.mount(self._end)
        self.set_class(bool(line), "-ended")
        if line:
            self._end.update(line)

    @property
    def _lacks_answer(self) -> bool:
        return bool(self.reasoning) and not self.text and not self._entry.message.tool_calls

    def _hidden_note(self) -> str:
        hidden = len(self.text) - len(self._drawn)
        return hidden_note(hidden, _COPY_REPLY) if hidden else ""

    def _closing_line(self, coloured: bool) -> Content:
        ended_early = self._entry.message.ended_early
        ending = _ENDINGS.get(ended_early, "ended without an answer" if self._lacks_answer else "")
        if not coloured:
            return Content("\n".join(filter(None, (self._hidden_note(), ending, self._versions))))
        drafted = sum(chunk.token_count for chunk in self.chunks if chunk.accepted)
        own = sum(chunk.token_count for chunk in self.chunks if not chunk.accepted)
        return Content.assemble(
            ("■ ", GUESSED_STYLE),
            f"{count(drafted)} guessed correctly{self._guessers()}   ",
            ("■ ", OWN_STYLE),
            f"{count(own)} from the model itself",
            f"   {ending}" if ending else "",
            f"\n{note}" if (note := self._hidden_note()) else "",
            f"\n{self._versions}" if self._versions else "",
        )

    def _guessers(self) -> str:
        """Return the source of the draft tokens in parentheses, or an empty string if there were none."""
        reply = self._entry.reply
        effective = "none" if reply is None else reply.method.effective
        return "" if effective == "none" else f" ({sources_text(effective)})"


def _coloured_thoughts(chunks: Sequence[TextChunk]) -> Content:
    """Colour reasoning by token origin: accepted draft tokens or the target's own tokens."""
    shown = limited_chunks(chunks)
    runs = groupby(shown, key=lambda chunk: GUESSED_STYLE if chunk.accepted else OWN_STYLE)
    hidden = sum(len(chunk.text) for chunk in chunks[len(shown) :])
    note = f"…\n{hidden_note(hidden, _WHOLE_THOUGHTS)}" if hidden else ""
    return Content.assemble(*(("".join(chunk.text for chunk in run), style) for style, run in runs), note)


def _versions_line(label: str) -> str:
    return f"‹ {label} ›" if label else ""


class Thoughts(Collapsible):
    """A model's reasoning, below a line that unfolds it with Enter, a click or F7. Hidden while it is empty.

    Attributes:
        seconds: Reasoning time in seconds, or None if it was not measured.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._body = Static(classes="thoughts-text")
        super().__init__(self._body, title="Thoughts", classes="thoughts")
        self.seconds = seconds
        self._began: float | None = None

    def show(self, text: Content, length: str) -> None:
        """Show the reasoning of a finished reply. `length` is its length, such as `45 tokens`."""
        if self._began is not None:
            self.seconds, self._began = monotonic() - self._began, None
        thought = "Thoughts" if self.seconds is None else f"Thought for {seconds_text(self.seconds)}"
        self._update(text, f"{thought} · {length}")

    def show_growing(self, text: Content, length: str) -> None:
        """Show the reasoning so far while the model is still thinking."""
        # Do not time reasoning that began in an earlier run of edgespec.
        if self._began is None and (self.seconds is not None or not self.display):
            self._began = monotonic() - (self.seconds or 0.0)
        self._update(text, f"Thinking… {length}")

    def _update(self, text: Content, title: str) -> None:
        self._body.update(text)
        self.title = title
        self.display = bool(text.plain)


class ToolCallMessage(MessageWidget):
    """A tool call and its result, folded to one line. Enter or a click unfolds them.

    Args:
        call: The call. None if the chat file does not contain it.
        result: The result, or None if the call has not ended.
    """

    def __init__(self, call: ToolCall | None, result: ToolResult | None = None) -> None:
        super().__init__(classes="tool-call")
        self._call = call or ToolCall("", "unknown tool", "")
        self._body = Static()
        self._fold = Collapsible(self._body, title="")
        self._result = result

    def compose(self) -> ComposeResult:
        yield self._fold

    def on_mount(self) -> None:
        self._refresh()

    def finish(self, result: ToolResult) -> None:
        """Show the result of the call."""
        self._result = result
        self._refresh()

    def _refresh(self) -> None:
        call, result = self._call, self._result
        if result is None:
            state = "calling…"
        elif result.failed:
            state = _VETOES.get(result.veto) or f"failed: {_one_line(result.problem, _MAX_PROBLEM)}"
        else:
            took = f" in {seconds_text(result.seconds)}" if result.seconds else ""
            state = f"{count(len(result.text), 'character')}{took}"
        # Use `Content`, so that names and arguments are not interpreted as markup.
        self._fold.query_one(CollapsibleTitle).label = Content.assemble(
            "Tool ",
            (visible(call.name), "bold"),
            f" {_one_line(call.arguments, _MAX_ARGUMENTS)} · {state}",
        )
        text = visible(result.text) if result is not None else ""
        self._body.update(
            Content.assemble(
                (limited_text(readable_arguments(call.arguments)), "$muted"), "\n\n", limited_text(text)
            )
        )


def _one_line(text: str, max_characters: int) -> str:
    line = " ".join(visible(text).split())
    return line if len(line) <= max_characters else f"{line[: max_characters - 1]}…"


class SystemMessage(Static, MessageWidget, can_focus=True):
    """A system message in the middle of a chat, as found only in imported chats."""

    # Textual takes bindings only from the first base class.
    BINDINGS: ClassVar[list[BindingType]] = MessageWidget.BINDINGS

    def __init__(self, text: str) -> None:
        super().__init__(Content(limited_text(text, _COPY_CHAT)), classes="system")


class Panel(Vertical):
    """A titled box in the transcript, for an error or the result of a command. The body can be empty."""

    def __init__(self, title: str, body: str | Widget, *, kind: str = "info") -> None:
        super().__init__(classes=f"panel -{kind}")
        self._title = title
        self._body: Widget | None = None
        if isinstance(body, Widget):
            self._body = body
        elif body:
            self._body = Static(Content(limited_text(body)), classes="panel-body")

    def compose(self) -> ComposeResult:
        yield Static(Content(self._title), classes="panel-title")
        if self._body is not None:
            yield self._body


class Welcome(Vertical):
    """Welcome box above the first message.

    Args:
        line: The model, its context and the speed-up.
        explanation: How drafting works, for new users. Can be empty.
        notices: Notices about the model.
    """

    def __init__(self, line: str, explanation: str, notices: Sequence[str]) -> None:
        super().__init__(classes="welcome")
        self._line, self._explanation, self._notices = line, explanation, notices

    def compose(self) -> ComposeResult:
        yield Static(Content(self._line))
        if self._explanation:
            yield Static(Content(self._explanation), classes="explanation")
        for notice in self._notices:
            yield Static(Content(notice), classes="notice")


class Pairs(Widget):
    """A table of labels and values."""

    def __init__(
        self,
        rows: Sequence[tuple[str, str]],
        *,
        label_style: str = "$muted",
        stack_below: int = 0,
    ) -> None:
        super().__init__()
        self._rows = rows
        self._label_style = label_style
        self._stack_below = stack_below

    def render(self) -> Content:
        return self._laid_out(self.content_size.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        return self._laid_out(width).plain.count("\n") + 1

    def _laid_out(self, width: int) -> Content:
        return pairs_content(self._rows, width, label_style=self._label_style, stack_below=self._stack_below)


def pairs_content(
    rows: Sequence[tuple[str, str]], width: int, *, label_style: str, stack_below: int = 0
) -> Content:
    """Return a table of labels and values for a screen that is `width` cells wide.

    A value without a label starts at the left edge. If fewer than `stack_below` cells are left for the
    values, they follow their labels directly instead of forming a column.
    """
    label_width = max((len(label) for label, _ in rows), default=0) + 2
    has_column = width - label_width >= stack_below
    lines: list[Content] = []
    for label, value in rows:
        indent = 0 if not label else label_width if has_column else 2
        head = Content.assemble((label.ljust(indent) if has_column else label.rstrip(), label_style))
        if label and not has_column:
            line = Content.assemble(head, "  ", value)
            first, *rest = line.wrap(width if line.cell_length <= width else max(8, width - indent))
        else:
            first, *rest = Content(value).wrap(max(8, width - indent))
            first = Content.assemble(head, first)
        lines += [first, *(Content.assemble(" " * indent, line) for line in rest)]
    return Content("\n").join(lines)
