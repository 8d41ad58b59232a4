"""Find the text at the top of a scrolling view again after the width of the view has changed."""

from __future__ import annotations

from textual.geometry import Region
from textual.widget import Widget

__all__ = ["TextPosition"]


class TextPosition:
    """The text at the top of a view: a widget, and the fraction of its height above the view.

    Attributes:
        places: Regions of the widgets in the last layout, from top to bottom.
    """

    def __init__(self) -> None:
        self.places: dict[Widget, Region] = {}
        self._text: tuple[Widget, float] | None = None
        self._row = -1

    def remember(self, row: int) -> None:
        """Remember the text in `row` of the last layout.

        If `found` has returned the same row, the user has not scrolled since then. The text stays the same,
        because rounding would otherwise move it a little with each of many changes of the width.
        """
        if row == self._row:
            return
        self._text = None
        for widget, place in self.places.items():
            if row < place.bottom:
                self._text = widget, (row - place.y) / max(1, place.height)
                return

    def found(self, rows: int) -> int | None:
        """Return the row of the remembered text in the last layout, at most `rows`.

        Return None if its widget is not in the layout.
        """
        if self._text is None or self._text[0] not in self.places:
            return None
        place = self.places[self._text[0]]
        self._row = min(max(0, place.y + int(self._text[1] * place.height)), rows)
        return self._row
