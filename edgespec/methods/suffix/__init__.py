"""Suffix decoding: find earlier occurrences of the last tokens, and draft what usually followed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.options.methods import Method, MethodDocs

if TYPE_CHECKING:
    from edgespec.methods.base import Drafter, DrafterContext

__all__ = ["METHOD"]


def _make(context: DrafterContext) -> Drafter:
    from edgespec.methods.suffix.corpus import suffix_drafter

    corpus = context.arguments["corpus"]
    drafter, notice = suffix_drafter(
        context.target.vocabulary,
        corpus=None if corpus is None else str(corpus),
        remember=context.arguments["remember"],
        can_branch=context.target.facts.capabilities.tree,
        progress=context.progress,
    )
    context.notices.append(notice)
    return drafter


METHOD = Method(
    name="suffix",
    label="repeated text",
    help="repeated text in this chat, in earlier replies and in files you choose",
    docs=MethodDocs(
        source="the text that followed the same tokens earlier: in this chat, in your files (`--corpus"
        " src/`) or in earlier chats (`--remember`)",
        requires="repetitive text, such as code, edits or documents",
        memory="about 100 bytes per token of the chat, 8 bytes per token of a corpus",
    ),
    order=120,
    make=_make,
    reads=frozenset({"corpus"}),
    auto="always",
    always_loaded=True,
)
