"""The messages of a chat as a tree, so that a message can have several versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

__all__ = ["MessageTree"]

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class MessageTree(Generic[T]):
    """A chat's messages as a tree, with a current branch, which is the conversation shown.

    Each message follows its parent. Messages with the same parent are versions of each other, such as several
    replies to one question. A message is identified by its index in `messages`, called its place. Trees are
    immutable: methods return a new tree in which existing messages keep their indexes, except for `pruned`,
    which renumbers them. Until then, deleted messages stay in the tree so that they can be restored.

    Attributes:
        messages: All messages, in the order in which they were added.
        parents: The index of each message's parent, which is always lower than its own. None for a first
            message.
        tip: Index of the last message on the current branch. None if the branch is empty.
        deleted: Indexes of the deleted messages, in order of deletion. Messages that follow a deleted one
            count as deleted too.
    """

    messages: tuple[T, ...] = ()
    parents: tuple[int | None, ...] = ()
    tip: int | None = None
    deleted: tuple[int, ...] = ()

    @classmethod
    def linear(cls, messages: Iterable[T]) -> MessageTree[T]:
        """Return a tree without branches, in which each message follows the previous one."""
        items = tuple(messages)
        places = (None, *range(len(items)))
        return cls(items, places[:-1], places[-1])

    @property
    def path(self) -> tuple[int, ...]:
        """The indexes of the messages on the current branch, from the first message to `tip`."""
        places, place = [], self.tip
        while place is not None:
            places.append(place)
            place = self.parents[place]
        return tuple(reversed(places))

    @property
    def open_messages(self) -> tuple[T, ...]:
        """The messages on the current branch."""
        return tuple(self.messages[place] for place in self.path)

    def versions(self, place: int) -> tuple[int, ...]:
        """Return the indexes of all versions of a message, oldest first, excluding deleted versions."""
        return self._children(self.parents[place])

    def _children(self, parent: int | None) -> tuple[int, ...]:
        start = 0 if parent is None else parent + 1
        places = range(start, len(self.parents))
        return tuple(p for p in places if self.parents[p] == parent and p not in self.deleted)

    def is_last(self, place: int) -> bool:
        """Return whether the message at `place` has no children."""
        return not self._children(place)

    def add(self, message: T, parent: int | None) -> MessageTree[T]:
        """Return a tree with `message` added after `parent`, as the last message of the current branch."""
        place = len(self.messages)
        return replace(self, messages=(*self.messages, message), parents=(*self.parents, parent), tip=place)

    def ending_at(self, tip: int | None) -> MessageTree[T]:
        """Return a tree whose current branch ends at the message `tip`, or is empty if `tip` is None."""
        return replace(self, tip=tip)

    def opened(self, place: int) -> MessageTree[T]:
        """Return a tree whose current branch runs through a message and on to the newest versions."""
        while children := self._children(place):
            place = children[-1]
        return replace(self, tip=place)

    def with_message(self, place: int, message: T) -> MessageTree[T]:
        """Return a tree in which `message` replaces the message at `place`."""
        return replace(self, messages=(*self.messages[:place], message, *self.messages[place + 1 :]))

    def without(self, place: int) -> MessageTree[T]:
        """Return a tree in which a message and all messages after it are deleted.

        If the message was on the current branch, the branch switches to the nearest other version of it. If
        there is none, the branch ends before the message.
        """
        tree = replace(self, deleted=(*self.deleted, place))
        if place not in self.path:
            return tree
        others = tree.versions(place)
        if not others:
            return tree.ending_at(self.parents[place])
        return tree.opened(min(others, key=lambda other: (abs(other - place), other)))

    def restored(self) -> MessageTree[T]:
        """Return a tree in which the most recently deleted messages are restored and shown."""
        return replace(self, deleted=self.deleted[:-1]).opened(self.deleted[-1])

    def pruned(self) -> MessageTree[T]:
        """Return a tree without the deleted messages. The remaining messages get new indexes."""
        places: dict[int | None, int | None] = {None: None}
        for place, parent in enumerate(self.parents):
            if parent in places and place not in self.deleted:
                places[place] = len(places) - 1
        kept = [place for place in places if place is not None]
        return MessageTree(
            tuple(self.messages[place] for place in kept),
            tuple(places[self.parents[place]] for place in kept),
            places[self.tip],
        )

    def map(self, function: Callable[[T], S]) -> MessageTree[S]:
        """Return a tree of the same shape, with `function` applied to each message."""
        return MessageTree(tuple(map(function, self.messages)), self.parents, self.tip, self.deleted)
