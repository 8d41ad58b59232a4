"""Verification tells rounding from faults, and its statistics detect wrong distributions."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import edgespec
from edgespec import Message, Runtime
from edgespec.decode import idle
from edgespec.engine import acceptance
from edgespec.engine.acceptance import AcceptedPath, Invariant
from edgespec.engine.logits import HostLogits
from edgespec.engine.sampling import Distribution
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, OptionError
from edgespec.losslessness.cases import Prompt, count_replies, read_prompts
from edgespec.losslessness.replay import Reason
from edgespec.losslessness.report import VerifyReport, holm, p_value
from edgespec.losslessness.verify import verify
from tests.tables import Saying, near, runtime, table, with_drafter
from tests.tabular import TabularModel

PROMPTS = [Prompt(f"p{i}", (Message("user", text),)) for i, text in enumerate(("abc", "fed", "aaaa", "cab"))]
METHODS = ("model", "ngram", "model+ngram")


class Rounding(TabularModel):
    """A table model whose wide passes are slightly inaccurate, like quantised kernels.

    As in real kernels, a row depends on the width of the pass, but not on the tokens of other rows.
    """

    error = 0.05

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        logits = super().verify(tree, first)
        if tree.width == 1:
            return logits
        rows = logits.rows.copy()
        for row, (_, path) in zip(rows, self._round, strict=True):
            random = np.random.default_rng([len(self._tokens), tree.width, *path])
            row += random.uniform(-self.error, self.error, row.shape).astype(np.float32)
        return HostLogits(rows)


def rounding(error: float) -> Runtime:
    target = Rounding(table(1)._table)
    target.error = error
    return runtime(target, near(table(1), 2))


def prove(pair: Runtime, **options: Any) -> VerifyReport:
    defaults: dict[str, Any] = {
        "methods": METHODS,
        "temperatures": (0.0, 0.8),
        "draft_lengths": (1, 3),
        "max_tokens": 40,
        "seed": 3,
    }
    return verify(pair, options.pop("prompts", PROMPTS), **defaults | options)


class TestInvariantMode:
    def test_identical_replies_are_no_fault(self) -> None:
        with runtime(table(1), near(table(1), 2)) as pair:
            report = prove(pair)
        assert report.faults == 0
        for result in report.methods.values():
            assert (result.prompts, result.identical, result.rounding, result.faults) == (4, 4, 0, 0)
            assert result.replies == 4 * 2 * 2
            assert result.drafted_tokens >= result.accepted_tokens > 0
            assert result.tokens - result.accepted_tokens <= result.target_passes < result.tokens
            assert result.divergences == []
            assert result.smallest_corrected_p_value is None

    def test_report_as_json(self) -> None:
        with runtime(table(1), near(table(1), 2)) as pair:
            report = json.loads(json.dumps(prove(pair).to_json()))
        assert set(report) == {
            *("target", "draft", "heads", "acceptance", "methods", "parallel"),
            *("nothing_drafted", "nothing_shared", "exact", "broken_promises"),
        }
        assert report["heads"] == []
        assert report["nothing_drafted"] == report["nothing_shared"] == []
        assert set(report["methods"]) == set(METHODS)
        expected = {
            "prompts",
            "identical",
            "rounding",
            "faults",
            "largest_difference",
            "divergences",
            "smallest_corrected_p_value",
            "drafted_tokens",
            "accepted_tokens",
            "target_passes",
            "note",
        }
        for result in report["methods"].values():
            assert expected <= set(result)

    @pytest.mark.parametrize("error", [0.05, 3.0])
    def test_rounding_is_measured_however_large(self, error: float) -> None:
        with rounding(error) as pair:
            report = prove(pair, prompts=_many(6), temperatures=(0.0, 0.7, 1.2))
        found = [divergence for result in report.methods.values() for divergence in result.divergences]
        assert found, "nothing diverged: this shows nothing"
        assert (report.faults, report.broken_promises) == (0, 0)
        for divergence in found:
            assert (divergence.verdict, divergence.reason) == ("rounding", None)
            assert 0 < (divergence.largest_difference or 0) <= error + 0.001
            assert divergence.plain_token != divergence.other_token
        for result in report.methods.values():
            assert result.identical + result.rounding == result.prompts == 6
            assert result.largest_difference == max(
                (each.largest_difference or 0 for each in result.divergences), default=None
            )

    def test_rounding_breaks_the_promise_of_exact(self) -> None:
        with rounding(0.05) as pair:
            with pair.borrowed_target() as target:
                target.facts = replace(
                    target.facts, capabilities=replace(target.facts.capabilities, exact=True)
                )
            report = prove(pair, prompts=_many(6), temperatures=(0.0, 0.7, 1.2))
        assert report.exact
        assert report.faults == 0
        assert report.broken_promises == report.rounding > 0

    def test_a_wrong_rule_is_a_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def accept(self: object, tree: TokenTree, logits: Any, sampler: Any) -> AcceptedPath:
            path = (1,) if tree.drafted else ()
            for node in path:
                sampler.push(tree.tokens[node])
            token = sampler.token(logits, path[-1] if path else 0)
            sampler.pop(len(path))
            return AcceptedPath(path, token)

        monkeypatch.setattr(Invariant, "accept", accept)
        with runtime(table(1), near(table(1), 2)) as pair:
            report = prove(pair, methods=("model",))
        result = report.methods["model"]
        assert result.faults == report.faults == 4
        assert result.identical == result.rounding == 0
        assert {d.reason for d in result.divergences} == {Reason.NOT_REPRODUCED}

    def test_a_reply_that_is_too_long_or_too_short_is_a_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with runtime(table(1), near(table(1), 2)) as pair:
            whole = Runtime.stream_tokens

            def shorter(self: Runtime, tokens: Any, **options: Any) -> Any:
                if options["method"] != "none":
                    options["max_tokens"] = 3
                return whole(self, tokens, **options)

            monkeypatch.setattr(Runtime, "stream_tokens", shorter)
            report = prove(pair, methods=("model",))
        (first, *_) = report.methods["model"].divergences
        assert (first.position, first.other_token, first.reason) == (3, None, Reason.ENDING)

    def test_penalties_and_filters_are_replayed(self) -> None:
        with rounding(0.05) as pair:
            report = prove(
                pair, prompts=_many(8), temperatures=(0.9,), presence_penalty=0.5, top_p=0.8, typical_p=0.9
            )
        assert report.faults == 0
        assert report.rounding > 0


def _many(count: int) -> list[Prompt]:
    letters = np.random.default_rng(0).integers(0, 7, (count, 6))
    return [
        Prompt(f"p{i}", (Message("user", "".join(chr(97 + letter) for letter in row)),))
        for i, row in enumerate(letters.tolist())
    ]


class TestRejectionMode:
    def test_identical_replies_are_no_fault(self) -> None:
        with runtime(table(1), near(table(1), 2), branches=(2,)) as pair:
            report = prove(pair, prompts=PROMPTS[:2], acceptance="rejection", samples=60)
        assert report.faults == 0
        for result in report.methods.values():
            assert result.identical == 2
            assert result.smallest_corrected_p_value is not None
            assert result.smallest_corrected_p_value > 0.001

    def test_a_wrong_distribution_is_a_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(acceptance, "_residual", lambda target, law, scale=1: target)
        with runtime(table(1), near(table(1), 2, noise=2.0)) as pair:
            report = prove(pair, prompts=PROMPTS[:2], acceptance="rejection", samples=300, methods=("model",))
        result = report.methods["model"]
        assert result.faults > 0
        assert result.smallest_corrected_p_value is not None
        assert result.smallest_corrected_p_value < 0.001


class Learner(Saying):
    """Drafts nothing before its first idle work. `lessons` is how often it has idle work to do."""

    has_idle_work = True

    def __init__(self, lessons: float) -> None:
        super().__init__(lambda tokens, length: [1] * length if self.rested else [])
        self.lessons = lessons
        self.rested = 0

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        while self.rested < self.lessons and should_continue():
            self.rested += 1

    def note(self) -> str:
        return f"it has rested {self.rested} times"


class TestDraftedTokens:
    @pytest.fixture(autouse=True)
    def no_other_rests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(idle, "QUIET_SECONDS", 1e6)

    def prove(self, drafter: Learner, **options: Any) -> VerifyReport:
        with with_drafter(table(1), drafter) as runtime:
            return prove(runtime, methods=("model", "none"), **options)

    @pytest.mark.parametrize("acceptance", ["invariant", "rejection"])
    def test_idle_work_runs_after_each_reply_until_it_is_done(self, acceptance: str) -> None:
        report = self.prove(Learner(1), idle_seconds=1e6, acceptance=acceptance, samples=2)
        result = report.methods["model"]
        assert report.nothing_drafted == ()
        assert result.drafted_tokens > 0
        assert result.note == "it has rested 1 times"

    def test_without_idle_time_an_untrained_drafter_drafts_nothing(self) -> None:
        report = self.prove(Learner(1), idle_seconds=0)
        assert report.nothing_drafted == ("model",)
        assert report.methods["model"].identical == 4
        assert report.methods["model"].note == "it has rested 0 times"

    def test_idle_work_can_be_cancelled(self) -> None:
        drafter = Learner(math.inf)
        with pytest.raises(CancelledError):
            self.prove(drafter, idle_seconds=1e6, progress=lambda *_: drafter.rested < 5)
        assert drafter.rested == 5

    def test_a_method_without_drafters_has_a_reason(self) -> None:
        with runtime(table(1)) as alone:
            report = prove(alone, methods=("auto",))
            reason = alone.method_for("auto").reason
        assert report.nothing_drafted == ("auto",)
        assert report.methods["auto"].note == reason


class TestOptions:
    @pytest.fixture
    def pair(self) -> Iterator[Runtime]:
        with runtime(table(1), near(table(1), 2)) as pair:
            yield pair

    @pytest.mark.parametrize(
        "options",
        [
            {"prompts": []},
            {"methods": ()},
            {"temperatures": ()},
            {"draft_lengths": ()},
            {"draft_lengths": (0,)},
            {"methods": ("modle",)},
            {"temperatures": (-1.0,)},
            {"max_tokens": 0},
            {"samples": 0},
            {"idle_seconds": -1},
            {"idle_seconds": math.nan},
            {"idle_seconds": "2"},
            {"acceptance": "sometimes"},
            {"prompts": [PROMPTS[0], PROMPTS[0]]},
        ],
    )
    def test_invalid_options_raise_an_error(self, pair: Runtime, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError):
            prove(pair, **options)

    def test_progress_increases_and_can_cancel(self, pair: Runtime) -> None:
        seen: list[float] = []

        def watch(what: str, fraction: float) -> bool:
            seen.append(fraction)
            return len(seen) < 1000

        prove(pair, progress=watch)
        assert seen == sorted(seen)
        assert seen[-1] == 1.0
        with pytest.raises(CancelledError):
            prove(pair, progress=lambda what, fraction: fraction < 0.5)
        assert prove(pair).faults == 0

    @pytest.mark.parametrize("acceptance", ["invariant", "rejection"])
    def test_the_number_of_replies_is_known_before(self, pair: Runtime, acceptance: str) -> None:
        fractions: list[float] = []
        asked: dict[str, Any] = {
            "methods": ("none", "ngram"),
            "temperatures": (0.0, 0.8),
            "draft_lengths": (1, 3),
            "acceptance": acceptance,
            "samples": 3,
        }
        verify(
            pair,
            PROMPTS,
            **asked,
            max_tokens=3,
            idle_seconds=0,
            progress=lambda _, fraction: not fractions.append(fraction),  # type: ignore[func-returns-value]
        )
        replies = count_replies(PROMPTS, **asked)
        assert replies == {"invariant": 32, "rejection": 4 + 12 + 12 * 3}[acceptance]
        # All replies here have at most three tokens, so each is an equal part of the progress.
        assert sorted(set(fractions)) == pytest.approx([done / replies for done in range(replies + 1)])


@pytest.mark.parametrize(("acceptance", "every"), [("invariant", 24), ("rejection", 36)])
def test_the_demo_pair(acceptance: str, every: int) -> None:
    with edgespec.load("demo") as pair:
        report = verify(
            pair,
            read_prompts()[::every],
            methods=METHODS,
            temperatures=(0.0, 1.0),
            draft_lengths=(4,),
            max_tokens=20,
            seed=5,
            acceptance=acceptance,
            samples=30,
        )
    assert report.faults == 0


def test_replays_use_the_sampling_settings_of_the_model(smollm2: Path) -> None:
    """SmolLM2 recommends its own top-p, which decides some of these tokens."""
    with edgespec.load(str(smollm2), "none", context=512, threads=1, exactness="off") as runtime:
        assert runtime.reply_defaults()["top_p"] == 0.9
        prompts = [prompt for prompt in read_prompts() if prompt.name in ("howto-01", "multi-turn-01")]
        report = verify(
            runtime, prompts, methods=("suffix",), temperatures=(0.8,), draft_lengths=(4,), max_tokens=16
        )
    assert len(prompts) == 2
    assert report.faults == 0


class TestStatistics:
    LAW = Distribution(np.arange(30), np.array([0.3, 0.2, 0.1] + [0.4 / 27] * 27))

    def draws(self, seed: int, count: int, law: Distribution) -> Counter[int]:
        return Counter(np.random.default_rng(seed).choice(law.tokens, count, p=law.probs).tolist())

    def test_p_values_are_uniform_under_the_null_hypothesis(self) -> None:
        values = [p_value([(self.draws(seed, 80, self.LAW), self.LAW)]) or 0.0 for seed in range(200)]
        assert stats.kstest(values, "uniform").pvalue > 1e-3

    def test_another_distribution_is_detected(self) -> None:
        other = Distribution(self.LAW.tokens, np.roll(self.LAW.probs, 1))
        p = p_value([(self.draws(1, 80, other), self.LAW)])
        assert p is not None
        assert p < 1e-4

    def test_impossible_tokens_are_detected(self) -> None:
        law = Distribution(np.arange(3), np.array([0.5, 0.5, 0.0]))
        p = p_value([(Counter({0: 50, 1: 49, 2: 1}), law)])
        assert p is not None
        assert p < 1e-4

    def test_a_single_bin_gives_no_p_value(self) -> None:
        certain = Distribution(np.array([7]), np.array([1.0]))
        assert p_value([(Counter({7: 100}), certain)]) is None
        assert p_value([]) is None

    def test_holm(self) -> None:
        assert holm([]) == []
        assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
        assert holm([0.5, 0.9]) == [1.0, 1.0]
