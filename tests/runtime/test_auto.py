"""`auto` says what plain decoding says, however its ledger, its clock and its user behave."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.drafters.combined import CombinedDrafter
from edgespec.drafters.guarded import GuardedDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.acceptance import Rejection
from edgespec.engine.loop import decode
from edgespec.engine.stats import Stats
from edgespec.policy.curve import CostCurve
from edgespec.policy.ledger import Ledger, Terms
from edgespec.policy.live import LiveCosts
from tests.engine.exact import AllChances, ExactModel, ExactSampler, Path, assert_law, random_table

ROOT = (0,)


class SlowDraft(ExactModel):
    """A draft each of whose passes takes so many seconds of a clock of its own; its last letter is an end."""

    def __init__(self, *table: Any, pass_seconds: float) -> None:
        super().__init__(*table, ends=True)
        self.now = 0.0
        self._pass_seconds = pass_seconds

    def clock(self) -> float:
        return self.now

    def verify(self, *tree: Any) -> Any:
        self.now += self._pass_seconds
        return super().verify(*tree)


class TestTheLaw:
    """In rejection mode too a bound on time must not choose among drafts by what was drawn."""

    @pytest.mark.parametrize("block", [True, False], ids=["block", "token-wise"])
    @pytest.mark.parametrize("branches", [(), (2,)], ids=str)
    @pytest.mark.parametrize(
        ("pass_seconds", "seconds"),
        [(0.55, (1.0, 1.01, 1.02, 1.03)), (0.01, (1.0, 2.5, 1.2, 1.1))],
        ids=["slow draft", "dear width"],
    )
    @pytest.mark.parametrize("seed", range(2))
    def test_a_draft_is_not_cut_by_its_own_luck(
        self,
        seed: int,
        pass_seconds: float,
        seconds: tuple[float, ...],
        branches: tuple[int, ...],
        block: bool,
    ) -> None:
        """A draft that is longer, for it has not come to an end, is dearer: the ledger may bear one only."""
        target, draft = random_table(seed, 2, zeros=0), random_table(seed + 100, 2, zeros=0)
        chance = AllChances()
        drafted = set()

        def experiment() -> Path:
            model: Any = SlowDraft(draft, 2, pass_seconds=pass_seconds)
            costs = LiveCosts(CostCurve((1, 2, 3, 4), seconds))
            own = ModelDrafter(model, 2, branches=branches)
            both = CombinedDrafter([own], True, curve=costs.v, clock=model.clock)
            auto = GuardedDrafter(both, Ledger(Terms(0.0, 1.3)), costs, clock=model.clock)
            auto.begin(ROOT)
            stats = Stats()
            steps = decode(
                ExactModel(target, 2),  # type: ignore[arg-type]
                auto,
                Rejection(chance, block=block),
                ExactSampler(ROOT),  # type: ignore[arg-type]
                ROOT[0],
                vocab_size=2,
                draft_length=2,
                max_tokens=4,
                is_stop=lambda token: False,
                is_cancelled=lambda: False,
                stats=stats,
            )
            tokens = tuple(token for step in steps for token in step.tokens)
            drafted.add(stats.drafted_tokens)
            return tokens

        assert_law(chance.outcomes(experiment), target, ROOT, 2)
        assert max(drafted) > 0, "nothing was drafted: this shows nothing"
