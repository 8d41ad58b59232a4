"""Download models in the background while the user continues to chat."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING

import edgespec
from edgespec.tui.numbers import percent, time_left

if TYPE_CHECKING:
    from edgespec import AvailableModel

# Seconds to wait before estimating the remaining time from the download speed so far.
_ESTIMATE_AFTER_SECONDS = 3.0


@dataclass(slots=True)
class Download:
    """The download of a model and its draft model. The download thread updates the attributes.

    Attributes:
        reference: A reference to the model.
        draft: A reference to the draft model. Empty if there is none.
        draft_share: The draft model's share of the bytes to download.
        model: The model in the list of models, or None if it was not chosen there.
        fraction: Downloaded fraction of the total bytes of both models.
        cancelled: Set when the user has cancelled the download.
        ended: Set when the download has finished, failed or stopped.
        error: The error that stopped the download, or None if there was none.
    """

    reference: str
    draft: str = ""
    draft_share: float = 0.0
    model: AvailableModel | None = None
    fraction: float = 0.0
    cancelled: Event = field(default_factory=Event)
    ended: Event = field(default_factory=Event)
    error: Exception | None = None
    # Time and fraction of the first progress report. A resumed download does not start at 0.
    _start: tuple[float, float] | None = None

    def run(self) -> None:
        """Download the model, then its draft model."""
        shares = [(self.reference, 0.0, 1 - self.draft_share)]
        if self.draft:
            shares.append((self.draft, 1 - self.draft_share, self.draft_share))
        try:
            for reference, start, share in shares:
                self._download(reference, start, share)
        except Exception as error:
            self.error = error
        self.ended.set()

    def _download(self, reference: str, start: float, share: float) -> None:
        def progress(_description: str, fraction: float) -> bool:
            self.fraction = start + share * fraction
            self._start = self._start or (monotonic(), self.fraction)
            return not self.cancelled.is_set()

        edgespec.download_model(reference, progress)

    @property
    def state(self) -> str:
        """The download's state and progress in a few words, such as `downloading 40%`."""
        if self.ended.is_set():
            return f"stopped at {percent(self.fraction)}" if self.error else "downloaded"
        return "stopping" if self.cancelled.is_set() else f"downloading {percent(self.fraction)}"

    @property
    def time_left(self) -> str:
        """The estimated remaining time, such as `, 2 min left`, or an empty string if it is unknown."""
        if self._start is None or self.cancelled.is_set() or self.ended.is_set():
            return ""
        start_seconds, start_fraction = self._start
        seconds, done = monotonic() - start_seconds, self.fraction - start_fraction
        if seconds < _ESTIMATE_AFTER_SECONDS or done <= 0:
            return ""
        return f", {time_left((1 - self.fraction) * seconds / done)} left"


class Downloads:
    """The downloads started since the chat began. Call all methods from the screen's thread."""

    def __init__(self) -> None:
        self._downloads: dict[str, Download] = {}

    def start(self, download: Download) -> None:
        """Start a download, or resume it where an earlier download of the same model stopped."""
        self._downloads[download.reference] = download
        # Use a daemon thread, so that quitting is not delayed. The next download resumes where this one
        # stopped.
        Thread(target=download.run, name="edgespec-download", daemon=True).start()

    def find(self, reference: str) -> Download | None:
        """Return the most recent download of a model, or None if there was none."""
        return self._downloads.get(reference)

    def is_running(self, reference: str) -> bool:
        """Return whether a model is being downloaded."""
        download = self.find(reference)
        return download is not None and not download.ended.is_set()

    def stop(self, reference: str) -> None:
        """Stop downloading a model. The bytes downloaded so far are kept."""
        if (download := self.find(reference)) is not None:
            download.cancelled.set()

    @property
    def unfinished(self) -> list[Download]:
        """The downloads that are running, or that have stopped and can be resumed."""
        return [each for each in self._downloads.values() if each.error or not each.ended.is_set()]

    @property
    def status(self) -> str:
        """Status-line text that lists the running downloads, or an empty string if there are none."""
        running = [each for each in self._downloads.values() if not each.ended.is_set()]
        return ", ".join(f"{each.state} of {each.reference}{each.time_left}" for each in running)
