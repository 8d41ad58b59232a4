"""Compute the logits of Medusa heads (arXiv 2401.10774) and Hydra heads (arXiv 2402.05109)."""

from __future__ import annotations

import numpy as np

from edgespec.heads.products import Array, Product, WeightLoader, silu
from edgespec.heads.residual_layout import ResidualHead, ResidualHeads

__all__ = ["ResidualNetwork"]


class ResidualNetwork:
    """Medusa or Hydra heads with loaded weights.

    Args:
        heads: The heads' layout.
        loader: Loads the heads' weights.
        shared_output: Multiplies by the target's LM head, for heads without output matrices.

    Raises:
        ModelFileError: The weights cannot be read, or contain infinite values or NaN.
    """

    def __init__(
        self, heads: ResidualHeads, loader: WeightLoader, shared_output: Product | None = None
    ) -> None:
        self._heads = [_Head(head, loader, shared_output) for head in heads.heads]

    def logits(self, head: int, inputs: Array) -> Array:
        """Return a head's logits [rows, vocabulary].

        Args:
            head: Index of the head.
            inputs: Hidden states [rows, size]. If the heads read tokens, each row also contains the
                embeddings of `head + 1` tokens after the hidden state.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self._heads[head](inputs)
        # Very large weights can make logits overflow. Replace NaN, so that the drafts are useless but still
        # valid.
        return logits if np.isfinite(logits).all() else np.nan_to_num(logits)


class _Head:
    def __init__(self, head: ResidualHead, loader: WeightLoader, shared_output: Product | None) -> None:
        self._blocks = [
            (loader.linear(*linear), None if shortcut is None else loader.linear(*shortcut))
            for linear, shortcut in head.blocks
        ]
        output = loader.linear(*head.output) if head.output else shared_output
        assert output is not None
        self._output: Product = output

    def __call__(self, x: Array) -> Array:
        for linear, shortcut in self._blocks:
            x = (x if shortcut is None else shortcut(x)) + silu(linear(x))
        return self._output(x)
