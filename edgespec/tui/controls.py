"""A filter that keeps control characters in model output and chat files from reaching the terminal."""

from __future__ import annotations

import re

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

__all__ = ["NoControls", "without_controls"]

# Matches control characters, and characters that change the text direction and can disguise a name.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def without_controls(text: str) -> str:
    """Return the text without control characters other than line breaks and tabs."""
    return _CONTROLS.sub(lambda found: found[0] if found[0] in "\n\t" else "", text)


class NoControls(LineFilter):
    """Removes control characters from each line before it is drawn."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:  # noqa: ARG002 - textual's
        return [
            segment if segment.control else Segment(_CONTROLS.sub("", segment.text), segment.style)
            for segment in segments
        ]
