"""Classify prompts roughly, because acceptance rates differ between code, numbers and prose."""

from __future__ import annotations

import re

from edgespec.methods.auto.constants import (
    CODE_SHARE,
    DIGIT_SHARE,
    INSPECTED_CHARACTERS,
    MIN_DOCUMENT_CHARACTERS,
)

__all__ = ["TEXT_KINDS", "text_kind"]

TEXT_KINDS = ("talk", "document", "code", "numbers")
_CODE_BEGIN = re.compile(r"\s*(?:```|def |class |import |from \w+ import|#include|return\b|\}|@\w+)|\s{4,}\S")
_CODE_END = re.compile(r"[{};]\s*$")


def text_kind(text: str) -> str:
    """Classify a prompt by its last 2,000 characters as one of `TEXT_KINDS`, such as `code`."""
    text = text[-INSPECTED_CHARACTERS:]
    lines = [line for line in text.splitlines() if line.strip()]
    code_lines = sum(bool(_CODE_BEGIN.match(line) or _CODE_END.search(line)) for line in lines)
    if "```" in text or code_lines > CODE_SHARE * max(len(lines), 4):
        return "code"
    if sum(map(str.isdigit, text)) > DIGIT_SHARE * max(len(text), 40):
        return "numbers"
    return "document" if len(text) > MIN_DOCUMENT_CHARACTERS else "talk"
