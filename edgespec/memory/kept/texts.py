"""What a model has read of several texts: kept when another takes its cache, put back when it returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from time import perf_counter as now

import numpy as np

from edgespec.backends.base import LanguageModel, Snapshot
from edgespec.errors import BackendError, CapabilityError, EdgespecError
from edgespec.memory.budget import available_bytes
from edgespec.memory.kept.disk import KeptDisk
from edgespec.memory.kept.pieces import Forest, Piece, Tokens, digest_of, name_of, shared_tokens
from edgespec.memory.kept.use import KeptUse
from edgespec.memory.kept.worth import Worth

__all__ = ["RESERVE_BYTES", "KeptTexts", "copy_bound", "memory_bound"]

# So few tokens are not worth a piece of their own.
_SHORT_TOKENS = 64
# A last piece no longer than this is taken into what goes on from it.
_TURN_TOKENS = 256
_MOST_BYTES = 4 * 2**30
_SHARE_OF_LEFT = 0.25
# A copy is in memory twice for a moment, beside those that are kept.
_COPIES = 3
# Left to other programs, whatever was allowed.
RESERVE_BYTES = 512 * 2**20
_FRESH_SECONDS = 60.0


def memory_bound(left_bytes: int) -> int:
    """The bytes that may be kept in memory unless the user says: a quarter of what is left, at most 4 GiB."""
    return min(_MOST_BYTES, max(0, int(left_bytes * _SHARE_OF_LEFT)))


def copy_bound(left_bytes: int) -> int:
    """The bytes that one copy may take, of what is left while none is kept."""
    return max(0, left_bytes) // _COPIES


class KeptTexts:
    """The kept texts of one model. `keep` and `restore` belong to the model's thread, `write` to any.

    most_bytes: of copies in memory; what is over that goes to disk, or is dropped where there is none.
    most_copied_bytes: of one copy while it is made; what is larger is not kept. None is no limit.
    available: the bytes that are free now; below a reserve copies in memory make room for other programs.
    notice: why they are not kept as they were to be, in words.
    Nothing here raises for what cannot be kept or put back: the model reads it again.
    """

    def __init__(
        self,
        model: LanguageModel,
        most_bytes: int,
        disk: KeptDisk | None = None,
        *,
        worth: Worth,
        most_copied_bytes: int | None = None,
        available: Callable[[], int] = available_bytes,
        notice: str = "",
    ) -> None:
        self.worth = worth
        self.hits = self.tokens_not_read = 0
        self._model = model
        self._cuts = model.facts.capabilities.cuts
        self._most_bytes = most_bytes
        self._most_copied_bytes = most_copied_bytes
        self._disk = disk
        self._available = available
        self._forest = Forest()
        self._lock = threading.RLock()
        self._notice = notice
        self._off = False
        # The text that was in the cache when all was forgotten.
        self._forgotten: Tokens | None = None
        for stored in disk.stored() if disk else ():
            parent = self._forest.named(f"{stored.after}-") if stored.after else None
            piece = Piece(stored.name, parent, stored.tokens, stored.data_bytes, None, True)
            piece.used = stored.used
            self._forest.add(piece)

    @property
    def saves(self) -> bool:
        """Whether texts are kept on disk."""
        return self._disk is not None and not self._off

    def keep(self, read: Sequence[int], shared: int = 0) -> None:
        """Keep the cache, which holds `read`, before it is cut to the first `shared` tokens.

        The cache may be cut already then. What takes less to read again than to copy is not kept.
        """
        text = np.array(read, np.int32)
        with self._lock:
            if self._off or self._drops_forgotten(text):
                return
            base, have = self._forest.longest(text, whole=True)
            if base:
                self._touch(base)
            lost = len(text) - (max(have, shared) if self._cuts else have)
            if self._fits(lost, len(text) - have):
                try:
                    self._add(text, base, shared)
                except (EdgespecError, MemoryError) as error:
                    self._note(error)
            self._make_room()

    def _fits(self, lost: int, more: int) -> bool:
        """Whether so many tokens are worth a copy that holds `more` of them, and there is memory for it."""
        size_bytes = more * self._bytes_per_token()
        most = self._most_copied_bytes
        return (
            self.worth.pays(lost, size_bytes)
            and (most is None or size_bytes <= most)
            and size_bytes < self._available() - RESERVE_BYTES
        )

    def _bytes_per_token(self) -> float:
        known = [(piece.size_bytes, len(piece.tokens)) for piece in self._forest]
        if known:
            return sum(size for size, _ in known) / sum(count for _, count in known)
        facts = self._model.facts
        return facts.most_kv_bytes / facts.most_context_tokens

    def _add(self, text: Tokens, base: Piece | None, shared: int) -> None:
        end = len(text)
        old: list[Piece] = []
        if not self._cuts:
            if base and not base.parting:
                old.append(base)
            self._take(text, None)
        else:
            while (
                base
                and base.children == old[-1:]
                and not (base.parting or base.end <= shared)
                and len(base.tokens) <= max(_TURN_TOKENS, end - base.end)
            ):
                old.append(base)
                base = base.parent
            start = base.end if base else 0
            if start + _SHORT_TOKENS <= shared <= end - _SHORT_TOKENS:
                self._take_parted(text, base, shared)
            else:
                self._take(text, base)
        for piece in old:
            self._remove(piece)

    def _take_parted(self, text: Tokens, parent: Piece | None, at: int) -> None:
        """The text beyond `at` and what is before that, as two pieces; the cache is cut to `at`."""
        last = self._copied(at)
        self._model.truncate(at)
        first = self._take(text[:at], parent)
        first.parting = True
        self._insert(text, first, last)

    def _take(self, text: Tokens, parent: Piece | None) -> Piece:
        """A piece of what the cache holds after `parent`, which is `text` to its end."""
        return self._insert(text, parent, self._copied(parent.end if parent else 0))

    def _copied(self, start: int) -> Snapshot:
        began = now()
        snapshot = self._model.snapshot(start)
        self.worth.note_copied(len(snapshot.data), now() - began)
        return snapshot

    def _insert(self, text: Tokens, parent: Piece | None, snapshot: Snapshot) -> Piece:
        name = name_of(text, snapshot.start)
        piece = self._forest.named(name)
        if piece is None:
            tokens = text[snapshot.start :].copy()
            piece = Piece(name, parent, tokens, len(snapshot.data), snapshot)
            self._forest.add(piece)
        piece.snapshot = piece.snapshot or snapshot
        self._touch(piece)
        return piece

    def parting(self, wanted: Sequence[int], held: int) -> int:
        """Where a kept text goes another way than this one, after the `held` tokens that the cache has.

        0 where that needs no copy of its own: a cache that can be cut there needs none.
        """
        if self._cuts or self._off:
            return 0
        _, shared = self._forest.longest(np.array(wanted[:-1], np.int32))
        return shared if shared - held >= _SHORT_TOKENS and self._fits(shared - held, shared) else 0

    def keep_parting(self, read: Sequence[int]) -> None:
        """Keep the cache, which holds `read`, as what several texts begin with."""
        text = np.array(read, np.int32)
        with self._lock:
            try:
                self._take(text, None).parting = True
            except (EdgespecError, MemoryError) as error:
                self._note(error)
            self._make_room()

    def find(self, wanted: Sequence[int], held: int) -> Piece | None:
        """The kept text that saves most of reading `wanted`, `held` tokens of which the cache has."""
        text = np.array(wanted[:-1], np.int32)
        with self._lock:
            if self._off:
                return None
            self._make_room()
            piece, shared = self._forest.longest(text, whole=not self._cuts)
            while piece and piece.end > self._model.facts.context_tokens:
                piece = piece.parent
            if piece is None:
                return None
            shared = min(shared, piece.end)
            # It is copied once, not away and back.
            size_bytes = sum(part.size_bytes for part in piece.chain()) / 2
            return piece if self.worth.pays(shared - held, size_bytes) else None

    def restore(self, piece: Piece, wanted: Sequence[int], held: int) -> int:
        """Put a kept text into the cache, which has the first `held` tokens of `wanted`.

        The cache then has a beginning of `wanted`: returns how many tokens.
        """
        text = np.array(wanted[:-1], np.int32)
        with self._lock:
            chain, kept = piece.chain(), piece.text()
            common = shared_tokens(kept, text)
            # What the cache has of it already stays.
            ends = [part.end for part in chain if self._cuts and part.end <= min(held, common)]
            there = max(ends, default=0)
            self._model.truncate(there)
            if self._model.length != there:
                self._model.truncate(0)
                there = 0
            for part in chain:
                if part.start >= there and not self._put_back(part):
                    break
            if self._cuts and self._model.length == piece.end and piece in self._forest:
                self._part(piece, common)
            self._model.truncate(min(common, self._model.length))
            got = self._model.length
            if got > held:
                self.hits += 1
                self.tokens_not_read += got - held
            self._touch(piece)
            self._make_room()
            return got

    def _put_back(self, piece: Piece) -> bool:
        began = now()
        snapshot = piece.snapshot
        if snapshot is None and self._disk:
            snapshot = self._disk.read(piece.name)
        if snapshot is None or snapshot.start != self._model.length or snapshot.length != piece.end:
            self._remove(piece)
            return False
        try:
            self._model.restore(snapshot)
        except (EdgespecError, MemoryError):
            # A smaller context, or a state that is not what it says.
            self._remove(piece)
            return False
        if piece.snapshot is None and self._most_bytes >= piece.size_bytes:
            piece.snapshot = snapshot
        self.worth.note_copied(piece.size_bytes, now() - began)
        return True

    def _part(self, piece: Piece, at: int) -> None:
        """Let a piece end where another text goes on; the cache holds it to its end."""
        if piece.start + _SHORT_TOKENS > at or at > piece.end - _SHORT_TOKENS:
            return
        text, children = piece.text(), piece.children
        try:
            self._take_parted(text, piece.parent, at)
        except (EdgespecError, MemoryError) as error:
            self._note(error)
            return
        last = self._forest.named(name_of(text, at))
        if last:
            # Their files say which text they go after, and that is the same.
            last.children += children
            piece.children = []
            for child in children:
                child.parent = last
        self._remove(piece)

    def write(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Put on disk what is in memory only, while `wanted()`."""
        with self._lock:
            waiting = [piece for piece in self._forest if piece.snapshot and not piece.on_disk]
        for piece in waiting:
            if not wanted():
                return
            self._write(piece)

    def _write(self, piece: Piece) -> bool:
        """False where it cannot be put on disk."""
        disk, snapshot = self._disk, piece.snapshot
        if piece.on_disk:
            return True
        if disk is None or snapshot is None:
            return False
        if piece.parent and not piece.parent.on_disk and not self._write(piece.parent):
            return False
        after = digest_of(piece.parent.text()) if piece.parent else ""
        seconds = len(piece.tokens) * self.worth.read_seconds
        written = disk.write(piece.name, after, piece.tokens, snapshot, seconds)
        with self._lock:
            piece.on_disk = written
            if written and piece not in self._forest:
                disk.remove([piece.name])
        return written

    @property
    def copied_bytes(self) -> int:
        """What copies in memory take now."""
        with self._lock:
            return sum(piece.size_bytes for piece in self._forest if piece.snapshot)

    def give_way(self, *, write: bool = True) -> int:
        """Take copies out of memory for other programs; how many bytes. May be asked for at any time.

        write: what is on no disk yet is put there first, where texts are kept on disk; that takes its time.
        Else it is dropped after those that are there.
        """
        with self._lock:
            before = self.copied_bytes
            self._make_room(write)
            return before - self.copied_bytes

    def _make_room(self, write: bool = True) -> None:
        """Take copies out of memory, what is worth least first, until the others are within bounds."""
        copies = [piece for piece in self._forest if piece.snapshot]
        total = sum(piece.size_bytes for piece in copies)
        limit = min(self._most_bytes, total + self._available() - RESERVE_BYTES)
        if total <= limit:
            return
        clock = time.time()

        def own(piece: Piece) -> float:
            gain = len(piece.tokens) / (piece.size_bytes + 1)
            return gain / (max(0.0, clock - piece.used) + _FRESH_SECONDS)

        def order(piece: Piece) -> tuple[bool, float, int]:
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
                self._remove(piece)

    def _drops_forgotten(self, text: Tokens) -> bool:
        """Whether this text was in the cache when somebody had all forgotten: it may have been meant."""
        if self._disk and self._disk.forgotten:
            self._disk.begin_again()
            self._forest = Forest()
            self._forgotten = text
        return self._forgotten is not None and np.array_equal(text, self._forgotten)

    def forget(self) -> None:
        """Give up the copies in memory; what is on disk is not looked at any more."""
        with self._lock:
            self._forest = Forest()

    def _remove(self, piece: Piece) -> None:
        names = [one.name for one in self._forest.remove(piece) if one.on_disk]
        if self._disk and names:
            self._disk.remove(names)

    def _touch(self, piece: Piece) -> None:
        clock = time.time()
        for part in piece.chain():
            part.used = clock

    def _note(self, error: Exception) -> None:
        """A copy failed: another time it may fit, or not be cancelled; a cache of a strange kind stays so."""
        self._off = isinstance(error, BackendError | CapabilityError)
        self._notice = f"texts are not kept: {error}" if self._off else self._notice

    def texts(self) -> list[Tokens]:
        """The kept texts, each once."""
        with self._lock:
            return [piece.text() for piece in self._forest if not piece.children]

    def use(self) -> KeptUse:
        """What is kept now."""
        with self._lock:
            pieces = list(self._forest)
            return KeptUse(
                texts=sum(not piece.children for piece in pieces),
                memory_bytes=sum(piece.size_bytes for piece in pieces if piece.snapshot),
                memory_limit_bytes=self._most_bytes,
                disk_bytes=sum(piece.size_bytes for piece in pieces if piece.on_disk),
                disk_limit_bytes=self._disk.quota_bytes if self._disk else 0,
                hits=self.hits,
                tokens_not_read=self.tokens_not_read,
                notice=" · ".join(filter(None, (self._notice, self._disk.notice if self._disk else ""))),
            )
