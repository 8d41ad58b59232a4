"""Draft tokens with a chain of multi-token prediction (MTP) modules."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from edgespec.backends.mlx.eagle import EagleHead
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.mtp_network import MtpChain
from edgespec.engine.tree import TokenTree

__all__ = ["ChainedMtpHead"]


class ChainedMtpHead(EagleHead):
    """A chain of MTP modules. Each was trained to predict one token further ahead than the preceding module.

    The first module predicts the root's children in the draft tree, the second one predicts their children,
    and so on. The last module also predicts all deeper nodes. Modules cannot share keys and values, so every
    module processes all tokens.
    """

    _network: MtpChain

    def _run_known(self, tokens: Sequence[int]) -> None:
        for step in range(len(self._network.steps)):
            self._network.select(step)
            super()._run_known(tokens)

    def _run_tree(self, tree: TokenTree, first: int) -> DeviceLogits:
        before = self._network.step
        self._network.select(before + 1 if first else 0)
        if first and self._network.step != before:
            self._run_again(tree, first)
        return super()._run_tree(tree, first)

    def _run_again(self, tree: TokenTree, count: int) -> None:
        """Run the first `count` nodes of the tree with the selected module, to fill its cache."""
        known = self._known_nodes
        self._set_layout(0, count)
        states = [self._target_states(self._length, known)]
        if known < count:
            states.append(self._states_before(tree, known, count))
        self._run(tree.tokens[:count], mx.concatenate(states))

    def commit(self, path: tuple[int, ...]) -> None:
        """Remove the cache rows of all nodes. The next prefill runs the accepted tokens in all modules."""
        self._known_nodes = 0
        super().commit(path)
