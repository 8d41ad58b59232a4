"""Test MethodFigures with replies whose figures are known, and the statistics that they use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.bench.figures import (
    MethodFigures,
    figures,
    geometric_mean,
    interval,
    oracle,
    oracle_comparisons,
    typical,
    worst,
)
from edgespec.bench.runs import Measurement, MethodConfig
from edgespec.decode.reply import MethodReport
from tests.bench.making import TOKENS, row

PLAIN, AUTO, MODEL, SUFFIX = (
    MethodConfig("none"),
    MethodConfig("auto"),
    MethodConfig("model", 4),
    MethodConfig("suffix"),
)
WAYS = (PLAIN, AUTO, MODEL, SUFFIX)

# Seconds per token of each configuration. The best fixed ones are model on a, suffix on b, and plain on c.
SECONDS = {
    "a": {PLAIN: 1.0, AUTO: 0.5, MODEL: 0.25, SUFFIX: 1.0},
    "b": {PLAIN: 2.0, AUTO: 0.5, MODEL: 2.0, SUFFIX: 0.5},
    "c": {PLAIN: 1.0, AUTO: 1.0, MODEL: 2.0, SUFFIX: 4.0},
}
CATEGORIES = {"a": "code", "b": "code", "c": "story"}
ratio = st.floats(0.1, 10.0)
repeats = st.lists(ratio, min_size=1, max_size=4)


def rows(repeats: int = 2) -> list[Measurement]:
    """Return every reply twice, the second time from a machine that is three times as slow."""
    return [
        row(
            prompt,
            config,
            seconds * 3**repeat,
            repeat=repeat,
            category=CATEGORIES[prompt],
            drafted_tokens=int(config != PLAIN),
        )
        for repeat in range(repeats)
        for prompt, configs in SECONDS.items()
        for config, seconds in configs.items()
    ]


def told(
    measured: list[Measurement], *, equal: bool = True
) -> dict[tuple[str | None, MethodConfig], MethodFigures]:
    found = figures(measured, WAYS, equal_tokens=lambda temperature: equal)
    return {(each.category, each.config): each for each in found}


def test_speeds_are_of_pairs_and_drift_does_not_matter() -> None:
    found = told(rows())
    assert [key for key in found if key[0] is None] == [(None, config) for config in WAYS]
    assert [key[0] for key in found][:: len(WAYS)] == [None, "code", "story"]
    model = found[None, MODEL]
    assert (model.prompts, model.replies) == (3, 6)
    assert model.speed_up == pytest.approx((4 * 1 * 0.5) ** (1 / 3))
    assert model.worst == pytest.approx(0.5)
    assert 0.5 <= (model.low or 0.0) < (model.speed_up or 0.0) < (model.high or 0.0) <= 4.0
    assert found["code", SUFFIX].speed_up == pytest.approx(2.0)
    assert found["story", SUFFIX].speed_up == pytest.approx(0.25)
    plain = found[None, PLAIN]
    assert (plain.speed_up, plain.worst, plain.low, plain.high) == (1.0, 1.0, None, None)
    assert found["story", PLAIN].tokens_per_second == pytest.approx(3**-0.5)
    assert found["story", PLAIN].tpot_seconds == pytest.approx(2.0)
    assert found["story", PLAIN].seconds["verify"] == pytest.approx(4.0 * TOKENS)


def test_oracle_comparison() -> None:
    by_category = {each.category: each for each in oracle_comparisons(rows(), WAYS)}
    code = by_category["code"]
    assert (code.prompts, code.best) == (2, MODEL)
    assert code.best_speed_up == pytest.approx(2.0)
    assert code.oracle_speed_up == pytest.approx(4.0)
    assert code.auto_speed_up == pytest.approx(8**0.5)
    assert code.share_of_best == pytest.approx(2**0.5)
    assert code.share_of_oracle == pytest.approx(8**0.5 / 4)
    assert by_category["story"].best == PLAIN
    assert by_category["story"].share_of_oracle == pytest.approx(1.0)
    assert by_category[None].oracle_speed_up == pytest.approx(16 ** (1 / 3))


def test_a_method_that_drafted_nothing_is_never_the_best() -> None:
    silent = [
        replace(each, reply=replace(each.reply, stats=replace(each.reply.stats, drafted_tokens=0)))
        if each.config == MODEL
        else each
        for each in rows()
    ]
    by_category = {each.category: each for each in oracle_comparisons(silent, WAYS)}
    assert by_category["code"].best == SUFFIX
    assert by_category["story"].best == PLAIN


def test_without_auto_nothing_is_said_of_it() -> None:
    configs = (PLAIN, MODEL)
    (found, *_) = oracle_comparisons([each for each in rows() if each.config in configs], configs)
    assert (found.auto_speed_up, found.share_of_best, found.share_of_oracle) == (None, None, None)


def test_what_was_cut_short_is_compared_as_far_as_it_can_be() -> None:
    whole = rows(1)
    found = told([each for each in whole if not (each.prompt == "b" and each.config == PLAIN)])
    assert found["code", MODEL].replies == 2
    assert found["code", MODEL].speed_up == pytest.approx(4.0)  # of prompt a alone
    only_a = [each for each in whole if each.prompt == "a" or (each.prompt == "c" and each.config == PLAIN)]
    assert found[None, AUTO].prompts == 3
    assert {each.category: each.prompts for each in oracle_comparisons(only_a, WAYS)} == {None: 1, "code": 1}
    cut = [row("a", MODEL, 1.0), row("a", SUFFIX, 1.0)]
    assert figures(cut, WAYS, equal_tokens=lambda temperature: True) == []
    assert oracle_comparisons(cut, WAYS) == []
    alone = told([row("a", PLAIN, 1.0), row("b", MODEL, 1.0)])
    assert (alone[None, MODEL].speed_up, alone[None, MODEL].worst, alone[None, MODEL].low) == (None,) * 3


def test_replies_that_are_not_plain_decodings_are_counted() -> None:
    measured = [row("a", PLAIN, 1.0), row("a", MODEL, 1.0), row("a", SUFFIX, 1.0, tokens=(1, 2))]
    found = told(measured)
    assert (found[None, MODEL].compared, found[None, MODEL].identical) == (1, 1)
    assert (found[None, SUFFIX].compared, found[None, SUFFIX].identical) == (1, 0)
    assert told(measured, equal=False)[None, SUFFIX].compared == 0


def test_counts_and_bytes() -> None:
    drafted = [
        row("a", MODEL, 1.0, drafted_tokens=6, accepted_tokens=3,
            drafted_per_position=[4, 2], accepted_per_position=[2, 1], draft_seconds=2.0,
            draft_weight_bytes=70, draft_kv_bytes=7, draft_other_bytes=5, prefill_seconds=4.0),
        row("b", MODEL, 1.0, drafted_tokens=4, accepted_tokens=1,
            drafted_per_position=[4], accepted_per_position=[1], draft_seconds=1.0),
    ]  # fmt: skip
    plain = [row("a", PLAIN, 1.0), row("b", PLAIN, 1.0)]
    found = told([*plain, *drafted])
    model = found[None, MODEL]
    assert model.drafted_tokens == 10
    assert model.acceptance == pytest.approx(0.4)
    assert model.acceptance_by_depth == pytest.approx((3 / 8, 1 / 2))
    assert (model.draft_weight_bytes, model.draft_kv_bytes, model.draft_other_bytes) == (70, 7, 5)
    assert (model.seconds["draft"], model.seconds["prefill"]) == (3.0, 4.0)
    assert found[None, PLAIN].acceptance is None
    assert found[None, PLAIN].acceptance_by_depth == ()


def test_why_a_way_is_silent_is_kept() -> None:
    measured = [row("a", PLAIN, 1.0), row("a", AUTO, 1.0), row("a", SUFFIX, 1.0), row("a", MODEL, 1.0)]
    reports = [
        MethodReport("none", "none", "asked for"),
        MethodReport("auto", "none", "nothing pays"),
        MethodReport("suffix", "suffix", "asked for", "it was dear"),
        MethodReport("model", "model", "asked for"),
    ]
    pairs = zip(measured, reports, strict=True)
    found = told([replace(each, reply=replace(each.reply, method=method)) for each, method in pairs])
    assert [found[None, config].note for config in WAYS] == ["", "nothing pays", "", "it was dear"]
    assert found[None, AUTO].effective == ("none",)


def test_each_temperature_by_itself() -> None:
    measured = [
        row("a", config, seconds, temperature=temperature)
        for temperature, fast in ((0.0, 0.5), (0.8, 0.25))
        for config, seconds in ((PLAIN, 1.0), (MODEL, fast))
    ]
    found = figures(measured, (PLAIN, MODEL), equal_tokens=lambda temperature: temperature == 0)
    speeds = {(each.temperature, each.config): each for each in found if each.category is None}
    assert speeds[0.0, MODEL].speed_up == pytest.approx(2.0)
    assert speeds[0.8, MODEL].speed_up == pytest.approx(4.0)
    assert (speeds[0.0, MODEL].compared, speeds[0.8, MODEL].compared) == (1, 0)


def test_by_hand() -> None:
    assert typical([1.0, 4.0]) == pytest.approx(2.0)
    assert typical([0.5, 8.0, 2.0]) == pytest.approx(2.0)
    ratios = [[1.0, 4.0], [8.0], [0.25, 0.5, 9.0]]  # typically 2, 8 and 0.5
    assert geometric_mean(ratios) == pytest.approx(2.0)
    assert worst(ratios) == pytest.approx(0.5)
    # The best of each prompt: 2, 8 and 2.
    assert oracle([ratios, [[1.0], [1.0], [2.0]]]) == pytest.approx(32 ** (1 / 3))


@given(ratio, st.integers(1, 5), st.integers(1, 3))
def test_what_is_always_so_much_faster_is_so_much_faster(factor: float, prompts: int, times: int) -> None:
    ratios = [[factor] * times] * prompts
    assert geometric_mean(ratios) == pytest.approx(factor)
    assert worst(ratios) == pytest.approx(factor)
    found = interval(ratios)
    assert found is None if prompts * times == 1 else found == pytest.approx((factor, factor))


@pytest.mark.long
@given(st.lists(repeats, min_size=2, max_size=6), st.integers(0, 5))
def test_an_interval_lies_between_the_least_and_the_most(ratios: list[list[float]], seed: int) -> None:
    found = interval(ratios, seed)
    assert found is not None
    low, high = found
    everything = [each for prompt in ratios for each in prompt]
    assert min(everything) * (1 - 1e-9) <= low <= high <= max(everything) * (1 + 1e-9)
    assert interval(ratios, seed) == found


@pytest.mark.long
@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(repeats, min_size=n, max_size=n), min_size=1)))
def test_hindsight_is_never_beaten(fixed: list[list[list[float]]]) -> None:
    assert oracle(fixed) >= max(geometric_mean(ratios) for ratios in fixed) * (1 - 1e-9)


@pytest.mark.long
def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        ratios = np.exp(random.normal(np.log(1.3), 0.2, (24, 2))).tolist()
        low, high = interval(ratios, trial) or (0.0, 0.0)
        covered += low <= 1.3 <= high
    assert 180 <= covered <= 199


def test_more_prompts_make_it_narrower() -> None:
    random = np.random.default_rng(2)
    widths = []
    for count in (6, 96):
        low, high = interval(np.exp(random.normal(0.0, 0.3, (count, 1))).tolist()) or (0.0, 0.0)
        widths.append(high / low)
    assert widths[1] ** 2 < widths[0]
