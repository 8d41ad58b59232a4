"""The statistics and the report of the comparison with other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.peers.configurations import Configuration
from scripts.peers.figures import (
    MeasuredReply,
    Speeds,
    compare,
    count_equal,
    decode_speed,
    fastest,
)
from scripts.peers.replies import Run
from scripts.peers.tables import comparison_table, report

EDGESPEC, SERVER, SERVER_WITH_DRAFT = (
    Configuration("edgespec", "none"),
    Configuration("llama-server", "none"),
    Configuration("llama-server", "draft:4"),
)


def measured_reply(
    configuration: Configuration,
    prompt: str,
    speed: float,
    repeat: int = 0,
    tokens: Sequence[int] = (1, 2, 3, 4, 5),
) -> MeasuredReply:
    run = Run(tuple(tokens), 10, 10 / speed, 20 / speed, 0, len(tokens))
    return MeasuredReply(configuration, prompt, prompt[0], 0.0, repeat, run, ended=tokens[-1] == 0)


speeds_of_prompts = st.lists(st.tuples(st.floats(0.1, 100.0), st.floats(0.1, 100.0)), min_size=2, max_size=8)


@pytest.mark.long
@given(speeds_of_prompts, st.floats(0.1, 10.0))
def test_ratios_are_paired_by_prompt_and_lie_within_their_interval(
    pairs: list[tuple[float, float]], faster: float
) -> None:
    measured = [
        measured_reply(configuration, f"{number % 2}-{number}", speed * scale)
        for number, both in enumerate(pairs)
        for configuration, speed, scale in ((EDGESPEC, both[0], faster), (SERVER, both[1], 1.0))
    ]
    found = compare(Speeds(measured, decode_speed), EDGESPEC, SERVER)
    assert found
    assert found.low <= found.ratio * (1 + 1e-9)
    assert found.ratio <= found.high * (1 + 1e-9)
    assert found.worst == pytest.approx(min(a / b for a, b in pairs) * faster)
    own = compare(
        Speeds([measured_reply(EDGESPEC, "a", 3.0), measured_reply(EDGESPEC, "b", 3.0)], decode_speed),
        EDGESPEC,
        EDGESPEC,
    )
    assert own
    assert own.ratio == own.low == own.high == 1.0


def test_the_ratio_of_a_prompt_is_the_median_of_its_paired_repeats() -> None:
    measured = [measured_reply(EDGESPEC, "a", speed, repeat) for repeat, speed in enumerate((2.0, 40.0, 6.0))]
    measured += [measured_reply(SERVER, "a", speed, repeat) for repeat, speed in enumerate((1.0, 4.0, 2.0))]
    speeds = Speeds(measured, decode_speed)
    found = compare(speeds, EDGESPEC, SERVER)
    assert found
    assert found.ratio == pytest.approx(3.0)
    assert speeds.mean(EDGESPEC) == pytest.approx(6.0)
    assert compare(speeds, EDGESPEC, SERVER_WITH_DRAFT) is None


def test_the_fastest_configuration_has_the_highest_mean() -> None:
    measured = [measured_reply(SERVER, "a", 10.0), measured_reply(SERVER, "b", 10.0)]
    measured += [measured_reply(SERVER_WITH_DRAFT, "a", 30.0), measured_reply(SERVER_WITH_DRAFT, "b", 4.0)]
    speeds = Speeds(measured, decode_speed)
    assert fastest(speeds, [SERVER, SERVER_WITH_DRAFT]) == SERVER_WITH_DRAFT
    assert fastest(speeds, [EDGESPEC]) is None


def test_equality_ignores_end_of_reply_tokens() -> None:
    measured = [
        measured_reply(EDGESPEC, "a", 1.0, tokens=(1, 2, 3)),
        measured_reply(EDGESPEC, "b", 1.0, tokens=(1, 2)),
    ]
    measured += [
        measured_reply(SERVER, "a", 1.0, tokens=(1, 2, 3, 0)),
        measured_reply(SERVER, "b", 1.0, tokens=(1, 3)),
    ]
    assert count_equal(measured, EDGESPEC, SERVER) == (1, 2)


def test_the_report_compares_with_the_best_of_the_others_and_shows_the_used_method() -> None:
    measured = [
        measured_reply(each, f"{skill}-1", speed)
        for skill in "ab"
        for each, speed in ((EDGESPEC, 6.0), (SERVER, 3.0), (SERVER_WITH_DRAFT, 4.0))
    ]
    run = Run((1, 2, 3, 4, 5), 10, 1.0, 2.0, 0, 5, method="suffix")
    auto = Configuration("edgespec", "auto")
    measured.append(MeasuredReply(auto, "a-1", "a", 0.0, 0, run, ended=False))
    text = report([SERVER, SERVER_WITH_DRAFT, EDGESPEC, auto], measured)
    assert "decode, speed-up over llama-server draft:4:" in text
    assert "edgespec none        1.500x [1.500, 1.500], worst prompt 1.50x; a 1.50x, b 1.50x" in text
    assert "decode, speed-up over edgespec none:" in text
    assert next(line for line in text.splitlines() if "edgespec auto" in line).endswith("used: suffix")


def test_the_table_shows_the_worst_prompt_and_the_best_setting_of_the_other_program() -> None:
    auto = Configuration("edgespec", "auto")
    speeds = {
        SERVER: (10.0, 10.0),
        SERVER_WITH_DRAFT: (15.0, 15.0),
        EDGESPEC: (10.0, 10.0),
        auto: (12.0, 27.0),
    }
    replies = [
        measured_reply(configuration, prompt, speed)
        for configuration, both in speeds.items()
        for prompt, speed in zip("ab", both, strict=True)
    ]
    assert [MeasuredReply.from_json(json.loads(json.dumps(each.to_json()))) for each in replies] == replies
    row = comparison_table([("model", replies)]).splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["model", "0", "2"]
    assert cells[4:] == [
        "1.00 (1.00)",
        "1.80 (1.80)",
        "1.20 (1.20)",
        "`draft:4` 1.50 (1.50)",
        "1.20 (1.20)",
        "2 of 2",
    ]
