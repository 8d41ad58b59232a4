"""Loading for a command: with progress and notes on stderr, and stopped by Ctrl-C."""

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
    """Refuse settings that make no sense before the model is loaded. Raises OptionError."""
    import edgespec

    edgespec.SamplingParams(**settings)


@contextmanager
def loaded(stop: Stop, **options: Any) -> Iterator[Runtime]:
    """The runtime of these options of `edgespec.load`, closed at the end; what was loaded is noted."""
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
            wanted = options.get("draft") or "none"
            note(_resolution("draft", runtime.draft.name if wanted == "auto" else wanted, runtime.draft.path))
        note(runtime.target.notice)
        yield runtime


def _resolution(role: str, reference: str, path: str) -> str:
    """Which file a reference came to."""
    return f"{role}: {path}" if reference == path else f"{role}: {reference} -> {path}"
