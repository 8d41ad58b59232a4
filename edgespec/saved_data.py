"""What is kept from one run to the next, given up: of earlier chats, and what was learnt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from edgespec.corpus import delete_saved_replies
from edgespec.errors import EdgespecError
from edgespec.files import error_reason
from edgespec.memory.prefix_cache import delete_cached_prefixes
from edgespec.saved_arrays import delete_saved_arrays

__all__ = ["KINDS", "delete_data"]

KINDS = ("replies", "learnt", "kept")
_FORGET: dict[str, Callable[[], int]] = {
    "replies": delete_saved_replies,
    "learnt": delete_saved_arrays,
    "kept": delete_cached_prefixes,
}


def delete_data(what: Literal["all", "replies", "learnt", "kept"] = "all") -> int:
    """Delete what is kept on disk beside the saved chats. Gives the bytes that were freed.

    replies: of earlier chats, and what was new of their prompts, that guesses are looked up in. learnt:
    drafts that were trained, layers that were found, what passes cost and how often guesses came true, of
    every model; the next load drafts with what was downloaded. kept: what models have read of chats; a chat
    that goes on is read again.
    A runtime that is open keeps what it learnt, and may save it again.
    Raises EdgespecError where a file cannot be deleted.
    """
    freed_bytes = 0
    for kind in KINDS if what == "all" else (what,):
        try:
            freed_bytes += _FORGET[kind]()
        except OSError as error:
            raise EdgespecError(
                f"what is kept of {kind} cannot be deleted: {error_reason(error)}",
                f"delete the folder `{kind}` in edgespec's data folder",
            ) from error
    return freed_bytes
