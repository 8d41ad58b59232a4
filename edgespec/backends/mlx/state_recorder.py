"""Record a model's hidden states in each pass, and keep those of committed tokens for heads to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.layers import Body, HiddenStateHooks
from edgespec.backends.mlx.model_skeleton import trace_one_token
from edgespec.errors import CapabilityError
from edgespec.model.hidden_states import POST_NORM, HiddenStateLog, OpenLogs

__all__ = ["StateRecorder"]


class StateRecorder:
    """Records hidden states, numbered as in `HiddenStateSource`, and adds them to logs.

    Args:
        net: An mlx-lm model.
        logs: The model's logs.

    Attributes:
        state_size: Number of values per hidden state.
        last: Hidden states [tokens, states, size] of the last recorded pass, in float32.

    Raises:
        CapabilityError: The model does not store its layers in a single list.
    """

    def __init__(self, net: Any, logs: OpenLogs) -> None:
        self._net = net
        self._logs = logs
        self._hooks = HiddenStateHooks(net)
        self._body: Body | None = None
        self.last: mx.array | None = None
        with self._hooks.on([0]):
            trace_one_token(net)
        self.state_size: int = self._hooks.inputs[0].shape[-1]

    @property
    def layer_count(self) -> int:
        return self._hooks.count

    @property
    def states(self) -> Sequence[int]:
        """The hidden states that open logs need. If there are any, every pass must be recorded."""
        return self._logs.states

    def open(self, states: Sequence[int]) -> HiddenStateLog:
        """Open a log of these hidden states.

        Raises:
            CapabilityError: The model does not have these hidden states, or they cannot be recorded.
        """
        for state in states:
            if not POST_NORM <= state <= self.layer_count:
                raise CapabilityError(
                    f"hidden state {state} does not exist in a model with {self.layer_count} layers",
                    "choose the draft head that was published for this model",
                    code="head_mismatch",
                )
        if POST_NORM in states and self._body is None:
            self._body = Body(self._net)
        log = self._logs.open(states, self.state_size)
        try:
            with self.recorded():
                trace_one_token(self._net)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            self._logs.close(log)
            raise CapabilityError(f"the model's hidden states cannot be read: {error}") from error
        return log

    def close(self, log: HiddenStateLog) -> None:
        self._logs.close(log)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the hidden states of the pass inside the block, and store them in `last`."""
        hooks, body = self._hooks, self._body
        with ExitStack() as stack:
            # Index `hooks.count` is the last layer's output, which is recorded along with its input.
            layers = {min(state, hooks.count - 1) for state in self.states if state != POST_NORM}
            stack.enter_context(hooks.on(layers))
            if body is not None:
                stack.enter_context(body.recorded())
            yield
        found = [self._recorded_state(state) for state in self.states]
        self.last = mx.concatenate(found).transpose(1, 0, 2).astype(mx.float32) if found else None

    def _recorded_state(self, state: int) -> mx.array:
        if state == POST_NORM:
            assert self._body is not None
            assert self._body.output is not None
            return self._body.output
        hooks = self._hooks
        return hooks.inputs[state] if state < hooks.count else hooks.outputs[state - 1]

    def append(self, position: int, passes: Sequence[mx.array], rows: Sequence[int]) -> None:
        """Append the hidden states of committed tokens to all logs.

        Args:
            position: Number of previously committed tokens.
            passes: The hidden states of the passes that processed the tokens.
            rows: The rows of the committed tokens in the concatenated hidden states of `passes`.
        """
        if len(rows):
            recorded = np.concatenate([np.array(states) for states in passes])
            self._logs.append(position, recorded[list(rows)])
