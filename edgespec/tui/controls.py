"""Nothing that a model, a chat file or a name says steers the terminal."""

from __future__ import annotations

import re

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

__all__ = ["NoControls"]

# Those that turn the direction of what follows would let one name be read as another.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class NoControls(LineFilter):
    """Takes control characters out of what is drawn; they have no width, so nothing moves."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:  # noqa: ARG002 - textual's
        """The segments without them."""
        return [
            segment
            if segment.control or not _CONTROLS.search(segment.text)
            else Segment(_CONTROLS.sub("", segment.text), segment.style)
            for segment in segments
        ]
