"""Wait for network connections in a way that the user can cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from edgespec.errors import CancelledError
from edgespec.system import waiting

__all__ = ["ConnectProgress", "wait_for"]

_Result = TypeVar("_Result")
# Called with a description and a fraction. Returning False cancels the connection.
ConnectProgress: TypeAlias = Callable[[str, float], bool]


def wait_for(
    work: Callable[[], _Result],
    description: str,
    progress: ConnectProgress | None,
    discard: Callable[[_Result], None] = lambda _: None,
) -> _Result:
    """Run `work` in a thread and return its result, or re-raise its exception.

    Args:
        work: The call. It keeps running if the wait is cancelled.
        description: What the call does, such as `connecting to host:port`.
        progress: Called repeatedly during the wait.
        discard: Called with the result if the wait was cancelled.

    Raises:
        CancelledError: `progress` returned False.
    """

    def check() -> None:
        if progress is not None and not progress(description, 0.0):
            raise CancelledError(f"{description} was cancelled")

    check()
    return waiting.wait_for(work, check, discard)
