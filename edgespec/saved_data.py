"""Delete data that edgespec saves between runs: replies, learned data and cached prefixes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from edgespec.chat.prompt_history import delete_prompt_history
from edgespec.corpus import delete_saved_replies
from edgespec.errors import EdgespecError
from edgespec.files import data_folder, error_reason, write_advice
from edgespec.memory.prefix_cache import delete_cached_prefixes
from edgespec.saved_arrays import delete_saved_arrays

__all__ = ["KINDS", "delete_data"]

KINDS = ("replies", "learned", "prefix-cache", "history")
_DELETE: dict[str, Callable[[], int]] = {
    "replies": delete_saved_replies,
    "learned": delete_saved_arrays,
    "prefix-cache": delete_cached_prefixes,
    "history": delete_prompt_history,
}


def delete_data(kind: Literal["all", "replies", "learned", "prefix-cache", "history"] = "all") -> int:
    """Delete saved data, except chats and files created by `edgespec prepare`.

    An open runtime keeps its copy in memory and may save it again.

    Args:
        kind: `replies` are earlier replies and prompts, which the suffix method searches. `learned` is
            everything trained or measured: draft models, SWIFT layers, pass costs and acceptance rates.
            `prefix-cache` contains the KV caches of earlier prompts. `history` contains the prompts that can
            be recalled in the terminal chat. `all` means all four.

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
                f"the saved {each} data could not be deleted: {error_reason(error)}",
                write_advice(error, Path(error.filename).parent if error.filename else data_folder()),
            ) from error
    return freed_bytes
