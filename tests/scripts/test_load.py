"""The load run: its turns, its figures, and replies at once that are those of plain decoding alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import bench_load
from scripts.bench_load import Answer, Measured, in_turn, report

ANSWER = Answer("a", (1, 2, 3), ((0.5, 1), (1.0, 1), (4.0, 1)), 3, 0, 0)
PLAIN = Measured(0, 0, 1, "none", 2.0, (ANSWER,))


def test_tokens_count_while_all_are_at_work() -> None:
    assert PLAIN.goodput == 1.0
    assert replace(PLAIN, full_seconds=4.0).goodput == 0.75


def test_every_method_comes_first_and_last_in_turn() -> None:
    names = ["none", "model:4", "auto"]
    orders = [in_turn(names, number) for number in range(6)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(names)


def test_ratios_are_to_plain_decoding_of_the_same_list_with_as_many_at_once() -> None:
    twice = replace(ANSWER, moments=((0.5, 4),), drafting_rounds=1, drafted_tokens=6, tokens=(1, 2, 4))
    said = report(
        [
            PLAIN,
            replace(PLAIN, at_once=2, full_seconds=4.0),
            replace(PLAIN, at_once=2, method="auto", answers=(twice,)),
        ]
    )
    row = said.splitlines()[-1].split()
    assert row == ["auto", "2.00", "2.667", "33%", "3.00", "0/1"]


def test_replies_at_once_are_those_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "load.json"
    told = ["--every", "9", "--max-tokens", "6", "--at-once", "1,2", "--methods", "model:2,auto"]
    monkeypatch.setattr(sys, "argv", ["bench_load.py", *told, "--json", str(kept)])
    bench_load.main()
    said = capsys.readouterr().out
    assert "2 at once" in said
    measured = json.loads(kept.read_text())["measured"]
    assert [each["at_once"] for each in measured] == [1, 1, 1, 2, 2, 2]
    plain = {answer["prompt"]: answer["tokens"] for answer in measured[0]["answers"]}
    assert len(plain) >= 2
    for each in measured:
        assert {answer["prompt"]: answer["tokens"] for answer in each["answers"]} == plain
        assert each["goodput"] > 0.0


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (["--methods", "model:x"], "no method"),
        (["--every", "30", "--at-once", "8"], "cannot keep 8 replies going"),
    ],
)
def test_what_cannot_be_measured_is_said(
    told: list[str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_load.py", *told])
    monkeypatch.setattr(bench_load, "_load", lambda *_: pytest.fail("it is loaded for nothing"))
    with pytest.raises(SystemExit, match=error):
        bench_load.main()
