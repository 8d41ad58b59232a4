"""Which programs are loaded, and that only the one that is measured runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import sleep
from typing import Protocol

from edgespec.memory import available_bytes
from scripts.peers.configurations import Configuration
from scripts.peers.replies import Asked, Run

__all__ = ["Peer", "Pool"]

_WARM_UP_TOKENS = 4
# What a program does after a reply is not to fall into its next one.
_SETTLE_SECONDS = 0.02


class Peer(Protocol):
    """A program with its models, in a process of its own."""

    @property
    def pid(self) -> int: ...

    def start(self) -> None: ...

    def ask(self, prompt: Sequence[int], asked: Asked) -> Run: ...

    def stop(self) -> None: ...


class Pool:
    """Starts each program when it is first asked, and holds all still but the one that is asked.

    needed_bytes: what must be free before one more is loaded; until then, those asked longest ago are ended,
    and started again in their turn.
    """

    def __init__(self, makers: Mapping[Configuration, Callable[[], Peer]], needed_bytes: int) -> None:
        self._makers = makers
        self._needed_bytes = needed_bytes
        # In the order in which they were last asked.
        self._loaded: dict[Configuration, Peer] = {}

    def ask(self, configuration: Configuration, prompt: Sequence[int], asked: Asked) -> Run:
        """A reply of this one. Raises EdgespecError; the program is ended then."""
        peer = self._loaded.pop(configuration, None)
        try:
            if peer is None:
                self._make_room()
                peer = self._makers[configuration]()
                peer.start()
                # Read from memory and compiled once, on a text that helps with no prompt.
                peer.ask(prompt[::-1], replace(asked, max_tokens=_WARM_UP_TOKENS))
            else:
                os.kill(peer.pid, signal.SIGCONT)
            run = peer.ask(prompt, asked)
            sleep(_SETTLE_SECONDS)
            os.kill(peer.pid, signal.SIGSTOP)
        except BaseException:
            if peer:
                peer.stop()
            raise
        self._loaded[configuration] = peer
        return run

    def _make_room(self) -> None:
        while self._loaded and available_bytes() < self._needed_bytes:
            self._loaded.pop(next(iter(self._loaded))).stop()

    def close(self) -> None:
        """End them all."""
        while self._loaded:
            self._loaded.popitem()[1].stop()
