"""Classify prompts roughly, because acceptance rates differ between code, numbers and prose."""

from __future__ import annotations

import re

__all__ = ["TEXT_KINDS", "text_kind"]

TEXT_KINDS = ("talk", "document", "code", "numbers")
_INSPECTED_CHARACTERS = 2000
# Prompts longer than this, in characters, count as documents rather than conversation.
_MIN_DOCUMENT_CHARACTERS = 1200
_CODE_BEGIN = re.compile(r"\s*(?:```|def |class |import |from \w+ import|#include|return\b|\}|@\w+)|\s{4,}\S")
_CODE_END = re.compile(r"[{};]\s*$")
# Minimum share of lines that look like code for a prompt to count as code.
_CODE_SHARE = 0.25
_DIGIT_SHARE = 0.06


def text_kind(text: str) -> str:
    """Classify a prompt by its last 2,000 characters as one of `TEXT_KINDS`, such as `code`."""
    text = text[-_INSPECTED_CHARACTERS:]
    lines = [line for line in text.splitlines() if line.strip()]
    code_lines = sum(bool(_CODE_BEGIN.match(line) or _CODE_END.search(line)) for line in lines)
    if "```" in text or code_lines > _CODE_SHARE * max(len(lines), 4):
        return "code"
    if sum(map(str.isdigit, text)) > _DIGIT_SHARE * max(len(text), 40):
        return "numbers"
    return "document" if len(text) > _MIN_DOCUMENT_CHARACTERS else "talk"
