"""The race screen: two replies to the same prompt, played side by side at their measured speeds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from time import monotonic
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from edgespec.bench.race import Lane, Race
from edgespec.errors import CancelledError
from edgespec.tui.commands.results import RunningRace
from edgespec.tui.numbers import bar, count, rate
from edgespec.tui.texts import error_text, in_chat

_TICK_SECONDS = 1 / 20
_BAR_CELLS = 24
# Minimum column width, in cells, for the long heading. In a narrower column, the heading would take up lines
# that the reply needs.
_MIN_LONG_HEADING = 34
_REMEMBERED = "edgespec also guesses from earlier replies, so a second race with the same message is faster."


class RaceScreen(ModalScreen[None]):
    """Shows the progress of a race, then plays back its result. Esc cancels the race or closes the screen.

    Args:
        running: The race.
        cancel: Function that cancels the race.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,ctrl+c", "close", "Close", show=False),
        Binding("r,enter", "replay", "Play again", show=False),
    ]

    def __init__(self, running: RunningRace, cancel: Callable[[], None]) -> None:
        super().__init__()
        self._running_race, self._cancel = running, cancel
        self._race: Race | None = None
        self._began = 0.0
        self._columns = [_LaneColumn(), _LaneColumn()]
        self._result = Static(classes="race-result")

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -race") as dialog:
            dialog.border_title = "Race"
            dialog.border_subtitle = "Esc cancels"
            yield Static(Content(" ".join(self._running_race.prompt.split())), classes="race-prompt")
            yield Horizontal(*self._columns, classes="race-lanes")
            yield VerticalScroll(self._result, classes="race-end")

    def on_mount(self) -> None:
        self._timer = self.set_interval(_TICK_SECONDS, self._tick)
        self._tick()

    def action_close(self) -> None:
        """Close the screen, and cancel the race if it is running."""
        if not self._running_race.race.done():
            self._cancel()
        self.dismiss()

    def action_replay(self) -> None:
        """Play the finished race again."""
        if self._race is not None:
            self._play(self._race)

    def _tick(self) -> None:
        if not self.is_active:
            # The screen has been dismissed, but a timer tick can still arrive before the screen is removed.
            return
        if self._race is not None:
            self._show(self._race, monotonic() - self._began)
        elif self._running_race.race.done():
            self._finish()
        else:
            progress = self._running_race.progress
            self._result.update(Content(f"{bar(progress.fraction, _BAR_CELLS)} {progress.description}"))

    def _finish(self) -> None:
        try:
            self._race = self._running_race.race.result()
        except CancelledError:
            self.dismiss()
        except Exception as error:
            self._timer.pause()
            self._result.update(Content("\n".join(error_text(error))))
            self.query_one(".dialog").border_subtitle = "Esc closes"
        else:
            self.query_one(".dialog").border_subtitle = "R plays again · Esc closes"
            self._play(self._race)

    def _play(self, race: Race) -> None:
        self._began = monotonic()
        self._result.update("")
        self._timer.resume()
        self._show(race, 0.0)

    def _show(self, race: Race, seconds: float) -> None:
        for column, lane in zip(self._columns, (race.plain, race.other), strict=True):
            column.show(lane, seconds)
        if seconds < max(race.plain.seconds, race.other.seconds):
            return
        self._timer.pause()
        remarks = [*map(in_chat, race.remarks())]
        if "suffix" in race.other.reply.method.effective.split("+"):
            remarks.append(_REMEMBERED)
        legend = (("■ ", "$success"), "guessed correctly   ", ("■ ", "$warning"), "from the model itself")
        self._result.update(
            Content.assemble(
                (race.chat_headline(), "bold" if race.is_faster else "bold $warning"),
                *(f"\n{remark}" for remark in remarks),
                "\n",
                *legend,
            )
        )


class _LaneColumn(Vertical):
    """One of the two replies in a race: its method, its speed so far, and its text."""

    def __init__(self) -> None:
        super().__init__(classes="race-lane")
        self._heading = Static()
        self._text = Static()
        self._scroll = VerticalScroll(self._text, can_focus=False)
        self._running_race = -1

    def compose(self) -> ComposeResult:
        yield self._heading
        yield self._scroll

    def on_resize(self) -> None:
        """Keep the end of the text visible when the race result takes up some of the lines."""
        self._scroll.scroll_end(animate=False)

    def show(self, lane: Lane, seconds: float) -> None:
        """Show the text and speed as of `seconds` after the start."""
        finished = seconds >= lane.seconds
        seconds = min(seconds, lane.seconds)
        tokens = lane.tokens_at(seconds)
        is_narrow = self.size.width < _MIN_LONG_HEADING
        if lane.method == "none":
            name = "plain" if is_narrow else "without the speed-up"
        else:
            name = lane.method if is_narrow else f"with the speed-up ({lane.method})"
        length = "" if is_narrow else f"{count(tokens, 'token')} · "
        speed = rate(tokens / seconds if seconds else None)
        self._heading.update(
            Content.assemble(
                (name, "bold"),
                ("  ✓" if finished else "", "$success"),
                f"\n{speed} · {length}{seconds:.1f} s",
            )
        )
        chunks = [chunk for chunk in lane.chunks if chunk.seconds <= seconds]
        if len(chunks) != self._running_race:
            self._running_race = len(chunks)
            runs = groupby(chunks, key=lambda chunk: "$success" if chunk.accepted else "bold $warning")
            self._text.update(
                Content.assemble(*(("".join(chunk.text for chunk in run), style) for style, run in runs))
            )
            self._scroll.scroll_end(animate=False)
