"""What kind of text a prompt is: guesses come true in code as they do not in talk."""

from __future__ import annotations

import re

__all__ = ["KINDS", "kind_of"]

KINDS = ("talk", "document", "code", "numbers")
# The end says what is asked; a long document before it shows in what is looked at.
_LOOKED_AT = 2000
_DOCUMENT = 1200
_CODE_BEGIN = re.compile(r"\s*(?:```|def |class |import |from \w+ import|#include|return\b|\}|@\w+)|\s{4,}\S")
_CODE_END = re.compile(r"[{};]\s*$")
_CODE_SHARE = 0.25
_DIGIT_SHARE = 0.06


def kind_of(text: str) -> str:
    """The kind of a prompt, of which the last 2,000 characters are enough: one of KINDS."""
    text = text[-_LOOKED_AT:]
    lines = [line for line in text.splitlines() if line.strip()]
    code = sum(bool(_CODE_BEGIN.match(line) or _CODE_END.search(line)) for line in lines)
    if "```" in text or code > _CODE_SHARE * max(len(lines), 4):
        return "code"
    if sum(map(str.isdigit, text)) > _DIGIT_SHARE * max(len(text), 40):
        return "numbers"
    return "document" if len(text) > _DOCUMENT else "talk"
