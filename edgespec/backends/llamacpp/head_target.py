"""Base class for GGUF targets whose hidden states can feed a draft head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.native import library
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError, EdgespecError
from edgespec.model.base import Head, LoadOptions
from edgespec.model.base_model import BaseModel, SelfDraftView
from edgespec.model.hidden_states import HiddenStateLog, HiddenStateSource
from edgespec.model.registry import format_of

__all__ = ["HeadTarget", "SharedHead", "SharedHeads"]


class SharedHead(Protocol):
    """A head's weights and context, shared by its views. Each concurrent reply has its own view."""

    def view(self, target: HeadTarget, release: Callable[[], None]) -> SelfDraftView[Any]:
        """Open a view of this head that drafts for one reply.

        Args:
            target: The model that verifies the drafts.
            release: Called once, when the view is closed.

        Raises:
            EdgespecError: The view cannot be created.
        """

    def close(self) -> None:
        """Free the weights. All views must already be closed."""


class SharedHeads:
    """The heads of a target. Opening the first view of a head loads it, and closing the last one frees it.

    Only the thread that loads and closes models uses this class.
    """

    def __init__(self) -> None:
        # The loaded heads, with one object per open view.
        self._loaded: dict[Head, tuple[SharedHead, set[object]]] = {}

    def view(self, target: HeadTarget, head: Head) -> SelfDraftView[Any]:
        """Return a view of a head for one reply, loading the head first if necessary.

        Raises the same errors as loading the head.
        """
        if head not in self._loaded:
            self._loaded[head] = format_of("gguf").load_head(target, head), set()
        (loaded, views), own = self._loaded[head], object()
        views.add(own)

        def release() -> None:
            if own in views:
                views.remove(own)
                if not views:
                    del self._loaded[head]
                    loaded.close()

        try:
            return loaded.view(target, release)
        except BaseException:
            release()
            raise


class HeadTarget(BaseModel, HiddenStateSource):
    """A GGUF model that heads can draft for. Each concurrent reply has its own instance.

    Attributes:
        options: The options that the model was loaded with.
        weights: The llama_model handles of the model.
        max_plan: The size and layout of the reply's KV cache at the maximum context length.
        slot: The index of the reply's slot in the context.
    """

    options: LoadOptions
    weights: Sequence[Any]
    max_plan: ContextPlan
    slot: int = 0
    _heads: SharedHeads
    # Hidden states of the nodes in the tree being verified.
    _tree_states: list[NDArray[np.float32]]

    @property
    @abstractmethod
    def context(self) -> LlamaContext:
        """The context that runs the model. Several replies can share it."""

    @abstractmethod
    def _end_round(self) -> None:
        """Remove rejected tokens from the KV cache."""

    @abstractmethod
    def _tap_states(self) -> None:
        """Choose the hidden states that `logs` needs. See `LlamaContext.tap_states`."""

    @abstractmethod
    def _allocate_for_states(self) -> None:
        """Reallocate the context if copying the chosen hidden states requires it."""

    def log_hidden_states(self, states: Sequence[int]) -> HiddenStateLog:
        """Start a log of hidden states. If the model is recurrent, its cache must be empty."""
        self._check(0)
        self._end_round()
        log = self.logs.open(states, library().llama_model_n_embd(self.weights[0]))
        try:
            self._tap_states()
            self._allocate_for_states()
            self._check_states_readable()
        except BaseException:
            self.stop_logging(log)
            # If the larger context could not be allocated, go back to one that does not copy these states.
            # Otherwise, the model would have no KV cache.
            with suppress(EdgespecError):
                self._allocate_for_states()
            raise
        return log

    def _check_states_readable(self) -> None:
        """Run one token to check that llama.cpp computes all chosen hidden states for this architecture."""
        if not self.free_tokens:
            return
        try:
            self.verify(TokenTree.chain(0))
        except BackendError as error:
            raise CapabilityError(
                f"the hidden states of {self.facts.name} cannot be read: {error.what}", error.next_step
            ) from error
        self.truncate(self.length)

    def stop_logging(self, log: HiddenStateLog) -> None:
        """Stop updating a log. See `HiddenStateSource`."""
        self.logs.close(log)
        self._tap_states()

    def _log_commit(self, path: tuple[int, ...]) -> None:
        """Log the hidden states of the tree's root and of the nodes in `path`."""
        if self.logs.states:
            self.logs.append(self.length, np.array([self._tree_states[node] for node in (0, *path)]))

    def _head_view(self, head: Head) -> SelfDraftView[Any]:
        if head.method not in self.facts.capabilities.self_draft_methods:
            raise CapabilityError(
                f"{self.facts.name} does not support draft heads for the {head.method} method, because of its"
                f" architecture ({self.facts.architecture!r}) or this version of llama.cpp",
                "choose another method, such as model or suffix",
                code="head_not_supported",
            )
        return self._heads.view(self, head)
