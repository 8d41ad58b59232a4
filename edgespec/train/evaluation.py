"""Evaluate a drafter on held-out conversations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgespec.errors import CancelledError
from edgespec.model.base import Progress
from edgespec.model.drafter_training import Guesser
from edgespec.train.conversations import Conversation, batch_of, batches

__all__ = ["BRANCHES", "DEPTH", "DrafterFigures", "TokensPerPass", "measure_drafter"]

# Draft length during evaluation, in tokens.
DEPTH = 4
# Number of alternatives per token at each depth of the draft trees used in evaluation. Deeper tokens have no
# alternatives. This is the example in the help of `--draft-branches`, with 21 tokens per tree.
BRANCHES = (3, 2)

# Expected tokens per target pass with drafts of `DEPTH` tokens.
TokensPerPass = Annotated[float, Field(ge=1, le=DEPTH + 1)]
_Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """A drafter's accuracy in predicting the target's top tokens.

    Attributes:
        tokens_per_pass: Expected tokens per target pass with drafts of `DEPTH` tokens.
        acceptance_per_depth: Acceptance rate of the draft token at each depth (0 to 1), given that all
            earlier draft tokens were accepted.
        tokens_per_pass_by_kind: `tokens_per_pass` for each kind of text.
        tokens_per_pass_in_trees: Expected tokens per target pass with draft trees of the shape `BRANCHES`.
        draft_tokens: Number of tokens in the draft vocabulary.
        coverage: Fraction of the tokens in the replies that are in the draft vocabulary (0 to 1).
    """

    tokens_per_pass: TokensPerPass
    acceptance_per_depth: tuple[_Fraction, ...]
    tokens_per_pass_by_kind: dict[str, TokensPerPass]
    tokens_per_pass_in_trees: TokensPerPass
    draft_tokens: int
    coverage: _Fraction

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return {
            "tokens_per_pass": round(self.tokens_per_pass, 3),
            "acceptance_per_depth": [round(each, 3) for each in self.acceptance_per_depth],
            "tokens_per_pass_by_kind": {
                kind: round(each, 3) for kind, each in self.tokens_per_pass_by_kind.items()
            },
            "tokens_per_pass_in_trees": round(self.tokens_per_pass_in_trees, 3),
            "draft_tokens": self.draft_tokens,
            "coverage": round(self.coverage, 4),
        }


def measure_drafter(
    drafter: Guesser, conversations: Sequence[Conversation], batch_tokens: int, progress: Progress
) -> DrafterFigures:
    """Draft from every position in the replies, and compare the drafts with the target's top tokens.

    Args:
        drafter: The head or draft model to evaluate.
        conversations: Held-out conversations.
        batch_tokens: Maximum number of tokens per batch.
        progress: Called before each batch. Returning False cancels the evaluation.

    Raises:
        CancelledError: `progress` returned False.
    """
    drafts: dict[str, list[NDArray[np.bool_]]] = defaultdict(list)
    in_trees: list[NDArray[np.bool_]] = []
    branches = np.array([*BRANCHES, *[1] * (DEPTH - len(BRANCHES))])
    divided = batches(conversations, batch_tokens, np.random.default_rng(0))
    for done, batch in enumerate(divided):
        if not progress("measuring", done / len(divided)):
            raise CancelledError("the evaluation was cancelled")
        ranks, owners = drafter.ranks(batch_of(batch), DEPTH)
        in_trees.append(_accepted(ranks < branches))
        for index, conversation in enumerate(batch):
            drafts[conversation.kind].append(_accepted(ranks[owners == index] == 0))
    by_kind = {kind: np.concatenate(found) for kind, found in sorted(drafts.items())}
    accepted = np.concatenate(list(by_kind.values()))
    reached = [len(accepted), *accepted.sum(axis=0)]
    replies = np.concatenate([each.tokens[each.prompt_length :] for each in conversations])
    return DrafterFigures(
        _tokens_per_pass(accepted),
        tuple(float(after / max(1, before)) for before, after in pairwise(reached)),
        {kind: _tokens_per_pass(found) for kind, found in by_kind.items() if len(found)},
        _tokens_per_pass(np.concatenate(in_trees)),
        len(drafter.draft_tokens),
        float(np.isin(replies, drafter.draft_tokens).mean()),
    )


def _accepted(right: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which drafted tokens are accepted, which are those before the first wrong one, per draft."""
    return np.cumprod(right, axis=1).astype(np.bool_)


def _tokens_per_pass(accepted: NDArray[np.bool_]) -> float:
    return 1.0 + float(accepted.sum()) / max(1, len(accepted))
