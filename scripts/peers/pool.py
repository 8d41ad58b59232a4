"""A pool of loaded programs that suspends all of them except the one being measured."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import sleep
from typing import Protocol

from edgespec.memory.budget import available_bytes
from scripts.peers.configurations import Configuration
from scripts.peers.replies import GenerationOptions, Run

_WARM_UP_TOKENS = 4
# Time for a program to finish its work after a reply, before it is suspended. Chosen as a heuristic.
_SETTLE_SECONDS = 0.02


class Peer(Protocol):
    """A program with its models, in its own process."""

    @property
    def pid(self) -> int: ...

    def start(self) -> None: ...

    def generate(self, prompt: Sequence[int], options: GenerationOptions) -> Run: ...

    def stop(self) -> None: ...


class Pool:
    """Starts each program on its first use, and suspends all programs except the one being measured.

    Args:
        makers: Functions that create the programs.
        needed_bytes: Memory that must be available before another program is loaded. If there is less, the
            least recently used programs are stopped. They are started again when they are needed.
    """

    def __init__(self, makers: Mapping[Configuration, Callable[[], Peer]], needed_bytes: int) -> None:
        self._makers = makers
        self._needed_bytes = needed_bytes
        # Least recently used first.
        self._loaded: dict[Configuration, Peer] = {}

    def generate(
        self, configuration: Configuration, prompt: Sequence[int], options: GenerationOptions
    ) -> Run:
        """Generate a reply with one program. If an exception is raised, the program is stopped.

        Raises:
            EdgespecError: The program failed.
        """
        peer = self._loaded.pop(configuration, None)
        try:
            if peer is None:
                self._free_memory()
                peer = self._makers[configuration]()
                peer.start()
                # Warm up to load the weights and compile kernels. Reverse the prompt, so that no prefix can
                # be reused.
                peer.generate(prompt[::-1], replace(options, max_tokens=_WARM_UP_TOKENS))
            else:
                os.kill(peer.pid, signal.SIGCONT)
            run = peer.generate(prompt, options)
            sleep(_SETTLE_SECONDS)
            os.kill(peer.pid, signal.SIGSTOP)
        except BaseException:
            if peer:
                peer.stop()
            raise
        self._loaded[configuration] = peer
        return run

    def _free_memory(self) -> None:
        while self._loaded and available_bytes() < self._needed_bytes:
            self._loaded.pop(next(iter(self._loaded))).stop()

    def close(self) -> None:
        """Stop all programs."""
        while self._loaded:
            self._loaded.popitem()[1].stop()
