"""Delete data that edgespec saves between runs: replies, learned data, cached prefixes and chats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from edgespec.attachments.clipboard import delete_pasted_images
from edgespec.chat.prompt_history import delete_prompt_history
from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError, EdgespecError
from edgespec.memory.prefix_cache.disk import delete_cached_prefixes
from edgespec.methods.suffix.saved_replies import delete_saved_replies
from edgespec.store.saved_arrays import delete_saved_arrays
from edgespec.system.facts import Facts
from edgespec.system.files import data_folder, error_reason, write_advice

__all__ = ["KINDS", "delete_chat", "delete_data"]

# Kinds of facts that are measured or counted. All other kinds describe model files.
_MEASURED = ("acceptance", "classes", "costs", "drafting", "experts", "machine", "threads")
KINDS = ("replies", "learned", "prefix-cache", "history")
_DELETE: dict[str, Callable[[], int]] = {
    "replies": delete_saved_replies,
    "learned": lambda: delete_saved_arrays() + Facts().delete(*_MEASURED),
    "prefix-cache": delete_cached_prefixes,
    "history": lambda: delete_prompt_history() + delete_pasted_images(),
}


def delete_data(kind: Literal["all", "replies", "learned", "prefix-cache", "history"] = "all") -> int:
    """Delete saved data, except chats and files created by `edgespec prepare`.

    An open runtime keeps its copy in memory and may save it again.

    Args:
        kind: `replies` means the earlier replies and prompts that the suffix method searches. `learned` means
            everything trained or measured: draft models, pass costs and acceptance rates. `prefix-cache`
            means the KV caches of earlier prompts. `history` means the prompts that can be recalled in the
            terminal chat, and the images that were pasted into them. `all` means all four.

    Returns:
        Number of bytes freed.

    Raises:
        EdgespecError: A file could not be deleted.
    """
    freed_bytes = 0
    for each in KINDS if kind == "all" else (kind,):
        try:
            freed_bytes += _DELETE[each]()
        except OSError as error:
            raise EdgespecError(
                f"the saved data of type `{each}` could not be deleted: {error_reason(error)}",
                write_advice(error, Path(error.filename).parent if error.filename else data_folder()),
                code="file_not_written",
            ) from error
    return freed_bytes


def delete_chat(store: ChatStore, chat_id: str) -> None:
    """Delete a saved chat, and the saved replies, cached prefixes and prompt history of all chats.

    That data does not record which chat its text comes from, so all of it is deleted.

    Args:
        store: The saved chats.
        chat_id: The ID of the chat, which may be hidden. See `ChatStore.hide`.

    Raises:
        ChatFileError: The chat or the cached data could not be deleted.
    """
    store.delete(chat_id)
    try:
        delete_data("replies")
        delete_data("prefix-cache")
        delete_data("history")
    except EdgespecError as error:
        raise ChatFileError(
            f"the chat was deleted, but cached data containing its text was not: {error.what}",
            error.next_step,
            code=error.code,
        ) from error
