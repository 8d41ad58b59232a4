"""Growing and shrinking contexts of table models, whose sizes are known exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import ContextFullError
from edgespec.memory.context_resize import ResizableContext
from edgespec.model.base import Progress
from tests.tables import runtime, table
from tests.tabular import TabularModel

SMALL, LARGE = 256, 1024


class Padded(TabularModel):
    """A model whose passes are padded to exact widths, so its context keeps two tokens free."""

    def __init__(self) -> None:
        super().__init__(table(1, end=-50.0)._table, context_tokens=SMALL)
        able = replace(self.facts.capabilities, exact=True, pass_widths=(2, 3, 6))
        assert able.padding_tokens == 2
        self.facts = replace(self.facts, requested_context_tokens=LARGE, capabilities=able)

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:
        self._check(len(tokens))
        return np.ones(1, np.float32)


@pytest.mark.parametrize("count", range(SMALL - 4, SMALL + 2))
def test_the_context_grows_for_a_prompt_that_almost_fills_it(count: int) -> None:
    with runtime(Padded()) as made:
        reply = made.stream_tokens([1] * count, method="none", max_tokens=1).wait()
        assert len(reply.tokens) == 1


@pytest.mark.parametrize("count", range(SMALL - 4, SMALL + 2))
def test_the_context_grows_for_an_embedding_that_almost_fills_it(count: int) -> None:
    with runtime(Padded()) as made:
        assert len(made._session.embed([[1] * count])) == 1


class Unshrinkable(TabularModel):
    """A draft model that holds more tokens than its length, as with a different vocabulary."""

    def resize(self, context_tokens: int) -> None:
        raise ContextFullError(
            f"the cached tokens do not fit in a context of {context_tokens} tokens", "truncate the cache"
        )


def test_the_target_shrinks_even_if_the_draft_model_cannot() -> None:
    target, draft = (each(table(1)._table, context_tokens=SMALL) for each in (TabularModel, Unshrinkable))
    context = ResizableContext(target, draft)
    for model in (target, draft):
        model.facts = replace(model.facts, context_tokens=LARGE)
    context.shrink()
    assert (target.facts.context_tokens, draft.facts.context_tokens) == (SMALL, LARGE)
