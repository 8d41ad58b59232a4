"""Prompt lookup decoding: draft the continuation of an earlier occurrence of the last tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.options.methods import Method, MethodDocs

if TYPE_CHECKING:
    from edgespec.methods.base import Drafter, DrafterContext

__all__ = ["METHOD"]


def _make(_context: DrafterContext) -> Drafter:
    from edgespec.methods.ngram.drafter import NgramDrafter

    return NgramDrafter()


METHOD = Method(
    name="ngram",
    label="repeated text",
    help="prompt lookup: text that came after the same few tokens earlier in this chat",
    docs=MethodDocs(
        source="text that came after the same few tokens earlier in this chat",
        requires="repetitive text",
        memory="4 bytes per token of the chat",
    ),
    order=130,
    make=_make,
    always_loaded=True,
)
