"""Classification of prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.methods.auto.drafter_stats import TEXT_KINDS, text_kind

CODE = "Rename `total` here:\n\ndef mean(xs):\n    total = sum(xs)\n    return total / len(xs)\n"
SUM = "What is 17 * 23 + 4096 / 64 - 12.5?"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("How do I list files by size?", "talk"),
        (CODE, "code"),
        ("```\nls -l\n```\nWhat does this do?", "code"),
        (SUM, "numbers"),
        ("The harbour was quiet in the morning. " * 50 + "Summarise this.", "document"),
        ("", "talk"),
    ],
)
def test_kind_of_examples(text: str, kind: str) -> None:
    assert text_kind(text) == kind


@given(st.text())
def test_every_text_has_a_kind(text: str) -> None:
    assert text_kind(text) in TEXT_KINDS
