"""Notice replies that repeat the same text over and over, which small models write until the context is full.

The chat stops such a reply and says so. Ollama stops a reply after 100 equal tokens, which does not end
repeated sentences.
"""

from __future__ import annotations

REPETITION_NOTE = (
    "The reply was stopped, because it repeated the same text over and over. To let it go on, type /continue."
    " To get another reply, type /regen. If this happens often, type /set repetition_penalty 1.1 or choose a"
    " larger model."
)

# The end of a reply must consist of at least so many copies of the same text, and be at least this long. The
# values were chosen so that tables, lists and lines of dashes are never stopped.
_MIN_COPIES = 10
_MIN_CHARACTERS = 2000
# Maximum length of the repeated text in characters. Chosen to be a few paragraphs.
_MAX_PERIOD = 1000
# Length in characters of the end of the reply whose previous occurrence shows where the last copy begins.
_ANCHOR_CHARACTERS = 64
# Number of characters after which the text is checked again. Chosen to keep the checks cheap.
_CHECK_CHARACTERS = 200


class RepetitionWatch:
    """Collects the text of a reply, and tells when it only repeats itself."""

    def __init__(self) -> None:
        self._text = ""
        self._unchecked_characters = 0

    def add(self, text: str) -> bool:
        """Add the next part of the reply. Return whether the reply's end consists of copies of one text."""
        self._text = (self._text + text)[-_MIN_COPIES * _MAX_PERIOD :]
        self._unchecked_characters += len(text)
        if self._unchecked_characters < _CHECK_CHARACTERS or len(self._text) < _MIN_CHARACTERS:
            return False
        self._unchecked_characters = 0
        text = self._text
        period = len(text) - _ANCHOR_CHARACTERS - text.rfind(text[-_ANCHOR_CHARACTERS:], 0, len(text) - 1)
        length = max(_MIN_CHARACTERS, _MIN_COPIES * period)
        if period > _MAX_PERIOD or length > len(text):
            return False
        return text[-length:-period] == text[period - length :]
