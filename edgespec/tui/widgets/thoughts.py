"""Widget for a reply's reasoning, folded to one line."""

from __future__ import annotations

from time import monotonic

from textual.content import Content
from textual.widgets import Collapsible, Static

from edgespec.tui.numbers import seconds_text

__all__ = ["Thoughts"]


class Thoughts(Collapsible):
    """A model's reasoning, below a line that unfolds it with Enter, a click or F7. Hidden while it is empty.

    Attributes:
        seconds: How long the model thought, in seconds. None if this was not measured.
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
        """Show the reasoning generated so far, while the model is still thinking."""
        # Do not time reasoning that began in an earlier run of edgespec.
        if self._began is None and (self.seconds is not None or not self.display):
            self._began = monotonic() - (self.seconds or 0.0)
        self._update(text, f"Thinking… {length}")

    def _update(self, text: Content, title: str) -> None:
        self._body.update(text)
        self.title = title
        self.display = bool(text.plain)
