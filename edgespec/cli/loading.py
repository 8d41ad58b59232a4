"""Load models for a command, showing progress and notes on stderr. Ctrl-C cancels loading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgespec.cli.interrupt import Stop
from edgespec.cli.screen import ProgressLine, note

if TYPE_CHECKING:
    from edgespec import Runtime

__all__ = ["loaded"]


@contextmanager
def loaded(stop: Stop, **options: Any) -> Iterator[Runtime]:
    """Load a runtime, print its model files, and close it at the end of the `with` block.

    A stop request cancels loading, and later the current reply.
    """
    import edgespec
    from edgespec.errors import CancelledError

    with ProgressLine(stop) as progress:
        runtime = edgespec.load(**options, progress=progress)
    with runtime:
        if stop.requested:
            raise CancelledError(f"loading {runtime.target.name} was cancelled")
        note(_file_line("model", options["target"], runtime.target.path))
        if runtime.draft is not None:
            reference = options.get("draft") or "none"
            reference = runtime.draft.name if reference == "auto" else reference
            note(_file_line("draft model", reference, runtime.draft.path))
        for head in runtime.heads:
            note(_file_line("head", head.name, head.path or head.name))
        note(runtime.target.notice.replace(" · ", "\n"))
        stop.on_request(runtime.cancel)
        yield runtime


def _file_line(role: str, reference: str, path: str) -> str:
    return f"{role}: {path}" if reference == path else f"{role}: {reference} -> {path}"
