"""Terms for drafting: the usual ones, and simpler ones for the chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from edgespec.options.methods import sources_text

__all__ = ["CHAT", "TERMS", "Wording"]


class Wording(NamedTuple):
    """The terms for drafting in sentences.

    Attributes:
        draft: The noun.
        drafts: Its plural.
        drafted: The participle.
        drafting: The activity.
        sources: Returns the name of drafters such as `model+suffix` in a sentence.
        without: Decoding without drafts.
        limit: Where the maximum loss is set, in parentheses. Empty in the chat, which cannot change it.
    """

    draft: str
    drafts: str
    drafted: str
    drafting: str
    sources: Callable[[str], str]
    without: str
    limit: str


TERMS = Wording(
    "draft", "drafts", "drafted", "drafting", str, "plain decoding", " (--max-loss sets how much)"
)
"""The terms of the command line, the API and the documentation."""

CHAT = Wording("guess", "guesses", "guessed", "guessing", sources_text, "without the speed-up", "")
"""The words of the chat, in which drafters are called by the source of their tokens."""
