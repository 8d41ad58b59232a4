"""`auto` gives the tokens of plain decoding, whatever its loss limit and clock are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest

import edgespec
from edgespec import Runtime
from edgespec.engine.acceptance import Rejection
from edgespec.engine.loop import decode
from edgespec.engine.stats import Stats
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.auto.controller import AutoController
from edgespec.methods.auto.live_costs import LiveCosts
from edgespec.methods.auto.loss_limit import LossLimits, LossTracker
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.target_costs import TargetCosts
from edgespec.methods.model.drafter import ModelDrafter
from tests.api.questions import HOWTO, REPEATS
from tests.engine.exact import AllChances, ExactModel, ExactSampler, Path, Table, assert_law, random_table

ROOT = (0,)


class SlowDraft(ExactModel):
    """A draft model with slow passes on a simulated clock. Its last letter is an EOS token."""

    def __init__(self, table: Table, vocab_size: int, pass_seconds: float) -> None:
        super().__init__(table, vocab_size, ends=True)
        self.now = 0.0
        self._pass_seconds = pass_seconds

    def clock(self) -> float:
        return self.now

    def verify(self, *tree: Any) -> Any:
        self.now += self._pass_seconds
        return super().verify(*tree)


class TestTheLaw:
    """A time limit must not select drafts by their drawn tokens. This also applies to rejection sampling."""

    @pytest.mark.long
    @pytest.mark.parametrize("block", [True, False], ids=["block", "token-wise"])
    @pytest.mark.parametrize("branches", [(), (2,)], ids=str)
    @pytest.mark.parametrize(
        ("pass_seconds", "seconds"),
        [(0.55, (1.0, 1.01, 1.02, 1.03)), (0.01, (1.0, 2.5, 1.2, 1.1))],
        ids=["slow draft", "dear width"],
    )
    @pytest.mark.parametrize("seed", range(2))
    def test_draft_length_does_not_depend_on_the_drawn_tokens(
        self,
        seed: int,
        pass_seconds: float,
        seconds: tuple[float, ...],
        branches: tuple[int, ...],
        block: bool,
    ) -> None:
        """A draft that does not end early costs more, and the allowance covers only one such draft."""
        target, draft = random_table(seed, 2, zeros=0), random_table(seed + 100, 2, zeros=0)
        chance = AllChances()
        drafted = set()

        def experiment() -> Path:
            model: Any = SlowDraft(draft, 2, pass_seconds)
            costs = LiveCosts(CostCurve((1, 2, 3, 4), seconds))
            own = ModelDrafter(model, 2, branches=branches)
            both = CombinedDrafter([own], v=costs.v, clock=model.clock)
            auto = AutoController(both, LossTracker(LossLimits(0.0, 1.3)), costs, clock=model.clock)
            auto.begin(ROOT)
            stats = Stats()
            steps = decode(
                ExactModel(target, 2),  # type: ignore[arg-type]
                auto,
                Rejection(chance, block_verification=block),
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


class Ticks:
    """A simulated clock on which drafting takes almost no time, and all target passes take equally long.

    Now and then, the clock jumps.
    """

    def __init__(self, jumps: float) -> None:
        self._random = random.Random(0)
        self._jumps = jumps
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 0.003 if self._random.random() < self._jumps else 1e-6
        return self._now

    def slowly(self, run: Any) -> Any:
        """`run`, which takes its time."""

        def passes(*args: Any) -> Any:
            self._now += self._random.uniform(0.0008, 0.0012)
            return run(*args)

        return passes


class TestSameness:
    """The controller on a clock by which drafting sometimes saves time: paused, drafting and cut short."""

    @pytest.fixture(params=[0.0, 0.003], ids=["steady", "jumps"])
    def hurried(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath
    ) -> Iterator[Runtime]:
        # Use an empty cache, so that facts that other tests learned about the demo with a real clock are
        # unknown.
        monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
        curve = CostCurve((1, 16), (0.001, 0.0011))
        monkeypatch.setattr(TargetCosts, "curve", lambda *_: curve)
        with edgespec.load("demo", context=256, methods=("model", "suffix")) as runtime:
            drafters = runtime._session.drafters
            auto: Any = drafters.choose(drafters.resolve("auto"))
            ticks = Ticks(request.param)
            auto._clock = auto._drafter._clock = auto.parts[0]._growth._clock = ticks
            target = runtime._session.target
            monkeypatch.setattr(target, "verify", ticks.slowly(target.verify))
            yield runtime

    def test_methods_in_turn_with_abandoned_replies(self, hurried: Runtime) -> None:
        """Drafters of one draft model take turns on its memory, and find it as they left it or not at all."""
        dice, drafted = random.Random(1), 0
        for turn in range(14):
            method = dice.choice(["auto", "auto", "model", "suffix"])
            prompt = dice.choice([HOWTO, REPEATS, "Tell me about `tar`. " * 12])
            options: dict[str, Any] = {
                "seed": turn,
                "temperature": dice.choice([0.0, 0.8, 2.0]),
                "max_tokens": dice.choice([1, 40, None]),
            }
            stream = hurried.stream(prompt, method=method, draft_length=dice.choice([1, 4, 9]), **options)
            given_up = dice.choice([None, None, 3])
            for i, _ in enumerate(stream):
                if i == given_up:
                    stream.cancel()
            got, plain = stream.reply, hurried.generate(prompt, method="none", **options)
            whole = len(plain.tokens) if got.finish_reason != "cancelled" else len(got.tokens)
            assert got.tokens == plain.tokens[:whole]
            drafted += got.stats.drafted_tokens if method == "auto" else 0
        assert drafted > 10
