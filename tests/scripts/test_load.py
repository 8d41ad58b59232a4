"""The load benchmark: order of methods, statistics, and replies of concurrent runtimes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import bench_load
from scripts.peers.configurations import rotated_order
from scripts.peers.load_figures import Measurement, TimedReply, report

REPLY = TimedReply("a", (1, 2, 3), ((0.5, 1), (1.0, 1), (4.0, 1)), 3, 0, 0)
PLAIN = Measurement(0, 0, 1, "none", 2.0, (REPLY,))


def test_goodput_counts_tokens_until_a_runtime_is_idle() -> None:
    assert PLAIN.goodput == 1.0
    assert replace(PLAIN, full_seconds=4.0).goodput == 0.75


def test_every_method_is_first_and_last_in_some_order() -> None:
    names = ["none", "model:4", "auto"]
    orders = [rotated_order(names, index) for index in range(6)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(names)


def test_ratios_compare_with_plain_decoding_of_the_same_list_and_concurrency() -> None:
    drafted = replace(REPLY, arrivals=((0.5, 4),), drafting_rounds=1, drafted_tokens=6, tokens=(1, 2, 4))
    table = report(
        [
            PLAIN,
            replace(PLAIN, concurrency=2, full_seconds=4.0),
            replace(PLAIN, concurrency=2, method="auto", replies=(drafted,)),
        ]
    )
    row = table.splitlines()[-1].split()
    assert row == ["auto", "2.00", "2.667", "33%", "3.00", "0/1"]


@pytest.mark.long
def test_concurrent_replies_equal_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "load.json"
    arguments = ["--every", "9", "--max-tokens", "6", "--concurrency", "1,2", "--methods", "model:2,auto"]
    monkeypatch.setattr(sys, "argv", ["bench_load.py", *arguments, "--json", str(path)])
    bench_load.main()
    assert "2 replies at once" in capsys.readouterr().out
    measurements = json.loads(path.read_text())["measurements"]
    assert [each["concurrency"] for each in measurements] == [1, 1, 1, 2, 2, 2]
    plain = {reply["prompt"]: reply["tokens"] for reply in measurements[0]["replies"]}
    assert len(plain) >= 2
    for each in measurements:
        assert {reply["prompt"]: reply["tokens"] for reply in each["replies"]} == plain
        assert each["goodput"] > 0.0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--methods", "model:x"], "not a method"),
        (["--every", "30", "--concurrency", "8"], "too short for 8 replies at once"),
    ],
)
def test_invalid_arguments_are_rejected_before_a_model_is_loaded(
    arguments: list[str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_load.py", *arguments])
    monkeypatch.setattr(bench_load, "_load", lambda *_: pytest.fail("a model is loaded"))
    with pytest.raises(SystemExit, match=error):
        bench_load.main()
