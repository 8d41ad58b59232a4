"""Terms for drafting: the usual ones, and simpler ones for the chat. Phrases that both surfaces use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from edgespec.options.methods import sources_text

__all__ = ["CHAT", "TERMS", "Wording", "limit_text", "no_draft_text"]


class Wording(NamedTuple):
    """The terms for drafting in sentences.

    Attributes:
        draft: The noun.
        drafts: Its plural.
        drafted: The participle.
        drafting: The activity.
        sources: Returns the name of drafters such as `model+suffix` in a sentence.
        subject: Returns the subject of a sentence about a reply with a method such as `auto`.
        without: What the subject is compared with.
        limit: Where the maximum loss is set, in parentheses. Empty in the chat, which cannot change it.
    """

    draft: str
    drafts: str
    drafted: str
    drafting: str
    sources: Callable[[str], str]
    subject: Callable[[str], str]
    without: str
    limit: str


TERMS = Wording(
    *("draft", "drafts", "drafted", "drafting"),
    sources=str,
    subject=str,
    without="plain decoding",
    limit=" (see --max-loss)",
)
"""The terms of the command line, the API and the documentation."""

CHAT = Wording(
    *("guess", "guesses", "guessed", "guessing"),
    sources=sources_text,
    subject=lambda method: f"With the speed-up ({method}), the reply",
    without="without it",
    limit="",
)
"""The words of the chat, in which drafters are called by the source of their tokens."""


def no_draft_text(reason: str) -> str:
    """Return a sentence without its full stop that says that there is no draft model, and why."""
    return reason if reason.startswith("no draft model") else f"no draft model: {reason}"


def limit_text(source: str) -> str:
    """Describe where a memory limit comes from: an option that the user set, or the machine."""
    return f"chosen with {source}" if source.startswith("--") else source
