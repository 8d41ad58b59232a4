"""Load models for a command, and show progress and notes on stderr. Ctrl-C cancels loading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgespec.cli.interrupt import Stop
from edgespec.cli.screen import ProgressLine, note

if TYPE_CHECKING:
    from edgespec import Runtime

__all__ = ["check_sampling", "loaded"]


def check_sampling(settings: dict[str, Any]) -> None:
    """Raise OptionError for invalid sampling settings. Call this before loading a model."""
    import edgespec

    edgespec.SamplingParams(**settings)


@contextmanager
def loaded(stop: Stop, **options: Any) -> Iterator[Runtime]:
    """Load a runtime, print its model files, and close the runtime at the end of the `with` block."""
    import edgespec
    from edgespec.errors import CancelledError

    progress = ProgressLine(stop)
    try:
        runtime = edgespec.load(**options, progress=progress)
    finally:
        progress.clear()
    with runtime:
        if stop.requested:
            raise CancelledError(f"loading {runtime.target.name} was cancelled")
        note(_resolution("target", options["target"], runtime.target.path))
        if runtime.draft is not None:
            reference = options.get("draft") or "none"
            reference = runtime.draft.name if reference == "auto" else reference
            note(_resolution("draft", reference, runtime.draft.path))
        note(runtime.target.notice)
        yield runtime


def _resolution(role: str, reference: str, path: str) -> str:
    """Return a line that shows which file a reference was resolved to."""
    return f"{role}: {path}" if reference == path else f"{role}: {reference} -> {path}"
