"""Where the copies of kept texts are: in memory while there is room for them, on disk, or in both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from edgespec.backends.base import Snapshot
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk
from edgespec.memory.prefix_cache.reuse_costs import ReuseCosts
from edgespec.memory.prefix_cache.segments import Segment, SegmentTree, digest_of

__all__ = ["RESERVE_BYTES", "SegmentStore", "default_memory_bytes", "max_copy_bytes"]

_MOST_BYTES = 4 * 2**30
_SHARE_OF_LEFT = 0.25
# A copy is in memory twice for a moment, beside those that are kept.
_COPIES = 3
# Left to other programs, whatever was allowed.
RESERVE_BYTES = 512 * 2**20
_FRESH_SECONDS = 60.0


def default_memory_bytes(free_bytes: int) -> int:
    """The bytes that may be kept in memory unless the user says: a quarter of what is left, at most 4 GiB."""
    return min(_MOST_BYTES, max(0, int(free_bytes * _SHARE_OF_LEFT)))


def max_copy_bytes(free_bytes: int) -> int:
    """The bytes that one copy may take, of what is left while none is kept."""
    return max(0, free_bytes) // _COPIES


class SegmentStore:
    """The pieces of a model's texts, and their copies. Any thread may ask; `lock` is held meanwhile.

    most_bytes: of copies in memory; what is over that goes to disk, or is dropped where there is none.
    available: the bytes that are free now; below a reserve copies in memory make room for other programs.
    worth: knows what reading a piece again would take.
    """

    def __init__(
        self, most_bytes: int, disk: PrefixCacheDisk | None, available: Callable[[], int], worth: ReuseCosts
    ) -> None:
        self.tree = SegmentTree()
        self.lock = threading.RLock()
        self.most_bytes = most_bytes
        self.disk = disk
        self._available = available
        self._worth = worth
        for stored in disk.stored() if disk else ():
            parent = self.tree.named(f"{stored.after}-") if stored.after else None
            piece = Segment(stored.name, parent, stored.tokens, stored.data_bytes, None, True)
            piece.used = stored.used
            self.tree.add(piece)

    @property
    def held_bytes(self) -> int:
        """What copies in memory take now."""
        with self.lock:
            return sum(piece.size_bytes for piece in self.tree if piece.snapshot)

    def room_for(self, size_bytes: float) -> bool:
        """Whether the system has so much free beside its reserve."""
        return size_bytes < self._available() - RESERVE_BYTES

    def read(self, piece: Segment) -> Snapshot | None:
        """The copy, wherever it is; None where it is damaged or gone."""
        return piece.snapshot or (self.disk.read(piece.name) if self.disk else None)

    def hold(self, piece: Segment, snapshot: Snapshot) -> None:
        """Let a copy that was read stay in memory, where it may be that large."""
        if self.most_bytes >= piece.size_bytes:
            piece.snapshot = snapshot

    def touch(self, piece: Segment) -> None:
        """Its text is used now."""
        clock = time.time()
        for part in piece.chain():
            part.used = clock

    def remove(self, piece: Segment) -> None:
        """Give up a piece and all that goes on from it, on disk too."""
        names = [one.name for one in self.tree.remove(piece) if one.on_disk]
        if self.disk and names:
            self.disk.remove(names)

    def forget(self) -> None:
        """Give up all pieces; what is on disk is not looked at any more."""
        with self.lock:
            self.tree = SegmentTree()

    def write(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Put on disk what is in memory only, while `wanted()`."""
        with self.lock:
            waiting = [piece for piece in self.tree if piece.snapshot and not piece.on_disk]
        for piece in waiting:
            if not wanted():
                return
            self._write(piece)

    def _write(self, piece: Segment) -> bool:
        """False where it cannot be put on disk."""
        disk, snapshot = self.disk, piece.snapshot
        if piece.on_disk:
            return True
        if disk is None or snapshot is None:
            return False
        if piece.parent and not piece.parent.on_disk and not self._write(piece.parent):
            return False
        after = digest_of(piece.parent.text()) if piece.parent else ""
        seconds = len(piece.tokens) * self._worth.read_seconds
        written = disk.write(piece.name, after, piece.tokens, snapshot, seconds)
        with self.lock:
            piece.on_disk = written
            if written and piece not in self.tree:
                disk.remove([piece.name])
            self._miss(disk)
        return written

    def _miss(self, disk: PrefixCacheDisk) -> None:
        """Give up what is in memory no more and was deleted on disk, for its quota or by another program."""
        for piece in list(self.tree):
            if piece.on_disk and not disk.has(piece.name):
                piece.on_disk = False
                if piece.snapshot is None:
                    self.remove(piece)

    def give_way(self, *, write: bool = True) -> int:
        """Take copies out of memory for other programs; how many bytes. May be asked for at any time.

        write: what is on no disk yet is put there first, where texts are kept on disk; that takes its time.
        Else it is dropped after those that are there.
        """
        with self.lock:
            before = self.held_bytes
            self.make_room(write)
            return before - self.held_bytes

    def make_room(self, write: bool = True) -> None:
        """Take copies out of memory, what is worth least first, until the others are within bounds."""
        copies = [piece for piece in self.tree if piece.snapshot]
        total = sum(piece.size_bytes for piece in copies)
        limit = min(self.most_bytes, total + self._available() - RESERVE_BYTES)
        if total <= limit:
            return
        clock = time.time()

        def own(piece: Segment) -> float:
            gain = len(piece.tokens) / (piece.size_bytes + 1)
            return gain / (max(0.0, clock - piece.used) + _FRESH_SECONDS)

        def order(piece: Segment) -> tuple[bool, float, int]:
            return not (write or piece.on_disk), piece.value(own), -piece.start

        for piece in sorted(copies, key=order):
            if total <= limit:
                return
            if piece.snapshot is None:
                continue
            if piece.on_disk or (write and self._write(piece)):
                piece.snapshot = None
                total -= piece.size_bytes
            else:
                total -= sum(one.size_bytes for one in piece.family() if one.snapshot)
                self.remove(piece)
