"""Record the hidden states of a model's passes, and keep those of committed tokens for heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from edgespec.backends.hidden_state_log import POST_NORM, HiddenStateLog
from edgespec.backends.mlx.layers import Body, HiddenStateHooks
from edgespec.errors import CapabilityError

__all__ = ["HiddenStateLogs", "PassStates"]

PassStates: TypeAlias = tuple[mx.array, ...]
"""The hidden states [tokens, row size] of a pass in float32, for each open log."""


class _OpenLog(NamedTuple):
    log: HiddenStateLog
    states: tuple[int, ...]


class HiddenStateLogs:
    """The open logs of a model. While there are any, every pass of the whole model is recorded.

    Args:
        net: An mlx-lm model.
    """

    def __init__(self, net: Any) -> None:
        self._net = net
        self._open: list[_OpenLog] = []
        self._hooks: HiddenStateHooks | None = None
        self._body: Body | None = None

    def __bool__(self) -> bool:
        return bool(self._open)

    def open(self, states: Sequence[int], size: int) -> HiddenStateLog:
        """Open a log of the hidden states `states`, each of which has `size` values per token.

        Raises:
            CapabilityError: The model's hidden states cannot be recorded, or one of `states` does not exist.
        """
        self._hooks = hooks = self._hooks or HiddenStateHooks(self._net)
        for state in states:
            if not POST_NORM <= state <= hooks.count:
                raise CapabilityError(f"the model has no hidden state {state}, because it has {hooks.count} layers")
        if POST_NORM in states:
            self._body = self._body or Body(self._net)
        log = HiddenStateLog(len(states) * size)
        self._open.append(_OpenLog(log, tuple(states)))
        return log

    def close(self, log: HiddenStateLog) -> None:
        self._open = [one for one in self._open if one.log is not log]

    @contextmanager
    def recording(self) -> Iterator[list[mx.array]]:
        """Record the pass whose graph is built inside the block.

        Yields:
            A list to which the hidden states are added when the block ends. See `PassStates`.
        """
        recorded: list[mx.array] = []
        if not self._open:
            yield recorded
            return
        hooks, wanted = self._hooks, {state for one in self._open for state in one.states}
        assert hooks is not None
        with ExitStack() as stack:
            # The output of the last layer is recorded together with its input.
            stack.enter_context(hooks.on({min(state, hooks.count - 1) for state in wanted - {POST_NORM}}))
            if POST_NORM in wanted:
                assert self._body is not None
                stack.enter_context(self._body.recorded())
            yield recorded
        for one in self._open:
            parts = [self._state(hooks, state) for state in one.states]
            recorded.append(mx.concatenate(parts, axis=-1)[0].astype(mx.float32))

    def _state(self, hooks: HiddenStateHooks, state: int) -> mx.array:
        if state == POST_NORM:
            assert self._body is not None
            assert self._body.output is not None
            return self._body.output
        return hooks.inputs[state] if state < hooks.count else hooks.outputs[state - 1]

    def append(self, position: int, passes: Sequence[PassStates], rows: Sequence[int]) -> None:
        """Append the hidden states of committed tokens, which follow the first `position` tokens.

        Args:
            position: Position of the first committed token.
            passes: The hidden states of the passes that ran the tokens.
            rows: The rows of the committed tokens in these passes together.
        """
        for one, recorded in zip(self._open, zip(*passes, strict=True), strict=True):
            one.log.append(position, np.concatenate([np.array(states) for states in recorded])[list(rows)])

    def truncate(self, length: int) -> None:
        """Forget the hidden states from position `length` on."""
        for one in self._open:
            one.log.truncate(length)
