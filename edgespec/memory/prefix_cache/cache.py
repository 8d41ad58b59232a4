"""What a model has read of several texts: kept when another takes its cache, put back when it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from time import perf_counter as now

import numpy as np

from edgespec.backends.base import LanguageModel
from edgespec.errors import BackendError, CapabilityError, EdgespecError
from edgespec.memory.budget import available_bytes
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk
from edgespec.memory.prefix_cache.reusable_prefix import reusable_tokens
from edgespec.memory.prefix_cache.reuse_costs import ReuseCosts
from edgespec.memory.prefix_cache.segments import Segment, Tokens, name_of, shared_tokens
from edgespec.memory.prefix_cache.store import SegmentStore
from edgespec.memory.prefix_cache.usage import PrefixCacheUsage

__all__ = ["PrefixCache"]

# So few tokens are not worth a piece of their own.
_SHORT_TOKENS = 64
# A last piece no longer than this is taken into what goes on from it.
_TURN_TOKENS = 256
# Of what there is room for: copies are larger than what one reckons beforehand.
_SURE_SHARE = 0.95


class PrefixCache:
    """The kept texts of one model: how they are taken out of its cache, and put back. Its thread asks.

    most_bytes, disk, available: see `SegmentStore`, which any thread may ask.
    max_copied_bytes: of one copy while it is made. What is larger is kept in several pieces, or not at all
    where the cache has to be copied whole. None is no limit.
    notice: why they are not kept as they were to be, in words.
    Nothing here raises for what cannot be kept or put back: the model reads it again.
    """

    def __init__(
        self,
        model: LanguageModel,
        most_bytes: int,
        disk: PrefixCacheDisk | None = None,
        *,
        worth: ReuseCosts,
        max_copied_bytes: int | None = None,
        available: Callable[[], int] = available_bytes,
        notice: str = "",
    ) -> None:
        self.worth = worth
        self.hits = self.reused_tokens = 0
        self._model = model
        self._cuts = model.facts.capabilities.partial_truncate
        self._most_copied_bytes = max_copied_bytes
        self.store = SegmentStore(most_bytes, disk, available, worth)
        self._notice = notice
        self._off = False
        # The text that was in the cache when all was forgotten.
        self._forgotten: Tokens | None = None

    @property
    def saves(self) -> bool:
        """Whether texts are kept on disk."""
        return self.store.disk is not None and not self._off

    def keep(self, read: Sequence[int], shared: int = 0) -> None:
        """Keep the cache, which holds `read`, before it is cut to the first `shared` tokens.

        What takes less to read again than to copy is not kept.
        """
        text = np.array(read, np.int32)
        with self.store.lock:
            if self._off or self._drops_forgotten(text):
                return
            text = text[: self._most_tokens()]
            base, have = self.store.tree.longest(text, whole=True)
            if base:
                self.store.touch(base)
            lost = len(text) - (max(have, shared) if self._cuts else have)
            if self._fits(lost, len(text) - have):
                try:
                    self._add(text, base, shared)
                except (EdgespecError, MemoryError) as error:
                    self._note(error)
            self.store.make_room()

    def _fits(self, lost: int, more: int) -> bool:
        """Whether so many tokens are worth a copy that holds `more` of them, and there is memory for it."""
        size_bytes = more * self._bytes_per_token()
        least_bytes = min(more, _SHORT_TOKENS if self._cuts else more) * self._bytes_per_token()
        most = self._most_bytes
        return (
            self.worth.pays(lost, size_bytes)
            and (most is None or least_bytes <= most)
            and self.store.room_for(size_bytes if most is None else min(size_bytes, most))
        )

    @property
    def _most_bytes(self) -> int | None:
        """Of one copy: without a disk no more than memory may hold of all."""
        most = self._most_copied_bytes
        if self.store.disk is not None:
            return most
        return self.store.most_bytes if most is None else min(most, self.store.most_bytes)

    def _most_tokens(self) -> int | None:
        """Of one text: more would be copied, and push others out, only to be dropped itself."""
        size_bytes, disk = self._bytes_per_token(), self.store.disk
        if not (self._cuts and size_bytes):
            return None
        room_bytes = self.store.most_bytes + (disk.quota_bytes if disk else 0)
        return int(_SURE_SHARE * room_bytes / size_bytes)

    def _bytes_per_token(self) -> float:
        known = [(piece.size_bytes, len(piece.tokens)) for piece in self.store.tree]
        if known:
            return sum(size for size, _ in known) / sum(count for _, count in known)
        facts = self._model.facts
        return facts.max_kv_bytes / facts.max_context_tokens

    def _add(self, text: Tokens, base: Segment | None, shared: int) -> None:
        end = len(text)
        old: list[Segment] = []
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
                and self._copies_for(end - base.start) == 1
            ):
                old.append(base)
                base = base.parent
            start = base.end if base else 0
            if start + _SHORT_TOKENS <= shared <= end - _SHORT_TOKENS:
                base = self._take_all(text[:shared], base)
                if base:
                    base.parting = True
                    self._take_all(text, base)
            else:
                self._take_all(text, base)
        for piece in old:
            self.store.remove(piece)

    def _copies_for(self, tokens: int) -> int:
        """In how many pieces so many tokens are copied."""
        most = self._most_bytes
        return 1 if most is None else max(1, ceil(tokens * self._bytes_per_token() / max(1, most)))

    def _take_all(self, text: Tokens, parent: Segment | None) -> Segment | None:
        """What the cache holds of a text after `parent`, in as many pieces as it takes; the last one.

        None where there is no room for all of them: then its beginning is kept.
        """
        start = parent.end if parent else 0
        count = self._copies_for(len(text) - start)
        ends = [start + (len(text) - start) * i // count for i in range(1, count + 1)]
        last = parent
        for end in ends:
            self.store.make_room()
            if last and last not in self.store.tree:
                return None
            last = self._take(text[:end], last)
        return last

    def _take(self, text: Tokens, parent: Segment | None) -> Segment:
        """A piece of what the cache holds after `parent`, to the end of `text`."""
        began = now()
        snapshot = self._model.snapshot(parent.end if parent else 0, len(text))
        self.worth.note_copied(len(snapshot.data), now() - began)
        name = name_of(text, snapshot.start)
        piece = self.store.tree.named(name)
        if piece is None:
            tokens = text[snapshot.start :].copy()
            piece = Segment(name, parent, tokens, len(snapshot.data), snapshot)
            self.store.tree.add(piece)
        piece.snapshot = piece.snapshot or snapshot
        self.store.touch(piece)
        return piece

    def parting(self, wanted: Sequence[int], held: int) -> int:
        """Where a kept text goes another way than this one, after the `held` tokens that the cache has.

        0 where that needs no copy of its own: a cache that can be cut there needs none.
        """
        if self._cuts or self._off:
            return 0
        _, shared = self.store.tree.longest(np.array(wanted[:-1], np.int32))
        return shared if shared - held >= _SHORT_TOKENS and self._fits(shared - held, shared) else 0

    def keep_parting(self, read: Sequence[int]) -> None:
        """Keep the cache, which holds `read`, as what several texts begin with."""
        text = np.array(read, np.int32)
        with self.store.lock:
            try:
                self._take(text, None).parting = True
            except (EdgespecError, MemoryError) as error:
                self._note(error)
            self.store.make_room()

    def find(self, wanted: Sequence[int], held: int) -> Segment | None:
        """The kept text that saves most of reading `wanted`, `held` tokens of which the cache has."""
        text = np.array(wanted[:-1], np.int32)
        with self.store.lock:
            if self._off:
                return None
            self.store.make_room()
            piece, shared = self.store.tree.longest(text, whole=not self._cuts)
            while piece and piece.end > self._model.facts.context_tokens:
                piece = piece.parent
            if piece is None:
                return None
            shared = self._sure(min(shared, piece.end))
            # It is copied once, not away and back.
            size_bytes = sum(part.size_bytes for part in piece.chain()) / 2
            return piece if self.worth.pays(shared - held, size_bytes) else None

    def restore(self, piece: Segment, wanted: Sequence[int], held: int) -> int:
        """Put a kept text into the cache, which has the first `held` tokens of `wanted`.

        The cache then has a beginning of `wanted`: returns how many tokens.
        """
        text = np.array(wanted[:-1], np.int32)
        with self.store.lock:
            chain, kept = piece.chain(), piece.text()
            common = self._sure(shared_tokens(kept, text))
            # What the cache has of it already stays.
            ends = [part.end for part in chain if self._cuts and part.end <= min(held, common)]
            there = max(ends, default=0)
            self._model.truncate(there)
            if self._model.length != there:
                self._model.truncate(0)
                there = 0
            self.store.touch(piece)
            for part in chain:
                if there <= part.start < common and not self._put_back(part):
                    break
            if self._cuts and self._model.length == piece.end and piece in self.store.tree:
                self._part(piece, common)
            self._model.truncate(min(common, self._model.length))
            got = self._model.length
            if got > held:
                self.hits += 1
                self.reused_tokens += got - held
            self.store.make_room()
            return got

    def _sure(self, length: int) -> int:
        return reusable_tokens(self._model.facts.capabilities, length)

    def _put_back(self, piece: Segment) -> bool:
        began = now()
        snapshot = self.store.read(piece)
        if snapshot is None or snapshot.start != self._model.length or snapshot.length != piece.end:
            self.store.remove(piece)
            return False
        try:
            self._model.restore(snapshot)
        except (EdgespecError, MemoryError):
            # A smaller context, or a state that is not what it says.
            self.store.remove(piece)
            return False
        self.worth.note_copied(piece.size_bytes, now() - began)
        self.store.hold(piece, snapshot)
        self.store.make_room()
        return True

    def _part(self, piece: Segment, at: int) -> None:
        """Let a piece end where another text goes on; the cache holds it to its end."""
        if piece.start + _SHORT_TOKENS > at or at > piece.end - _SHORT_TOKENS:
            return
        text, children = piece.text(), piece.children
        try:
            # It may be of a run that had more memory for a copy.
            take = self._take if self._copies_for(len(piece.tokens)) == 1 else self._take_all
            first = take(text[:at], piece.parent)
            last = first and take(text, first)
        except (EdgespecError, MemoryError) as error:
            self._note(error)
            return
        if not (first and last and piece in self.store.tree):
            return
        first.parting = True
        # Their files say which text they go after, and that is the same.
        last.children += children
        piece.children = []
        for child in children:
            child.parent = last
        self.store.remove(piece)

    def _drops_forgotten(self, text: Tokens) -> bool:
        """Whether this text was in the cache when somebody had all forgotten: it may have been meant."""
        disk = self.store.disk
        if disk and disk.forgotten:
            disk.begin_again()
            self.store.forget()
            self._forgotten = text
        return self._forgotten is not None and np.array_equal(text, self._forgotten)

    def _note(self, error: Exception) -> None:
        """A copy failed: another time it may fit, or not be cancelled; a cache of a strange kind stays so."""
        self._off = isinstance(error, BackendError | CapabilityError)
        self._notice = f"texts are not kept: {error}" if self._off else self._notice

    def texts(self) -> list[Tokens]:
        """The kept texts, each once."""
        with self.store.lock:
            return [piece.text() for piece in self.store.tree if not piece.children]

    def use(self) -> PrefixCacheUsage:
        """What is kept now."""
        disk = self.store.disk
        with self.store.lock:
            pieces = list(self.store.tree)
            return PrefixCacheUsage(
                texts=sum(not piece.children for piece in pieces),
                memory_bytes=sum(piece.size_bytes for piece in pieces if piece.snapshot),
                memory_limit_bytes=self.store.most_bytes,
                disk_bytes=sum(piece.size_bytes for piece in pieces if piece.on_disk),
                disk_limit_bytes=disk.quota_bytes if disk else 0,
                hits=self.hits,
                reused_tokens=self.reused_tokens,
                notice=" · ".join(filter(None, (self._notice, disk.notice if disk else ""))),
            )
