"""Tests of the benchmark scripts: what they measure, which runs they keep, and the statistics of loads."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from edgespec.system.cores import usable_cores
from scripts import bench_busy, bench_host, bench_load, bench_tables
from scripts.bench_load import Measurement, TimedReply, report
from scripts.bench_tables import Model
from scripts.peers.configurations import rotated_order
from tests.backends.tiny_models import write_llama
from tests.scripts.running import run_script

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


@pytest.mark.long
def test_a_resumed_chat_restores_all_its_tokens() -> None:
    (row,) = run_script("bench_resume.py", "--lengths", "300", "--repeats", "1", "--json")["rows"]
    assert row["restored_tokens"] >= row["tokens"]
    assert row["speedup"] > 0


_RUN = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"replies\": []}'); sys.exit(%d)"


@pytest.mark.parametrize("status", [0, 1, 130])
def test_only_complete_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    results = tmp_path / "model.json"
    monkeypatch.setattr(bench_tables, "MODELS", (Model("a model", "model.gguf"),))
    monkeypatch.setattr(Model, "results", results)
    monkeypatch.setattr(Model, "command", lambda self, server: ["-c", _RUN % status, "the results"])
    monkeypatch.setattr(sys, "argv", ["bench_tables.py", "--llama-server", "llama-server"])
    assert bench_tables.main() == status
    assert results.exists() == (status == 0)


@pytest.mark.long
def test_every_combination_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_llama(tmp_path / "tiny.gguf", context=1024)
    arguments = ["--target", str(target), "--draft", "none"]
    arguments += ["--loads", "idle,busy", "--repeats", "1", "--max-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["bench_busy.py", *arguments])
    bench_busy.main()
    _, *lines = capsys.readouterr().out.splitlines()
    threads = ["auto", *map(str, range(1, usable_cores() + 1))]
    cases = [line.split() for line in lines]
    assert [case[:3] for case in cases] == [
        [load, method, count] for load in ("idle", "busy") for method in ("none", "auto") for count in threads
    ]
    assert {case[-1] for case in cases} == {"1/1"}


def test_the_other_program_is_ended() -> None:
    with pytest.raises(KeyboardInterrupt), bench_busy.other_program("alternating"):
        raise KeyboardInterrupt


OPTIONS = ["--vocabularies", "20000", "--passes", "16", "--repeats", "1"]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["llamacpp", "mlx"])
def test_each_time_is_measured(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    monkeypatch.setattr(sys, "argv", ["bench_host.py", *OPTIONS, "--backend", backend, "--json", str(path)])
    bench_host.main()
    ((times,),) = json.loads(path.read_text(encoding="utf-8"))
    assert list(times) == [f"20,000 {name}" for name in bench_host.SETTINGS]
    for case in times.values():
        assert min(case["pass"], case["cold pass"], case["drafted token"]) > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in times)
    assert "row, accepted" in printed


@pytest.mark.long
def test_two_checkouts_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    this = Path(bench_host.__file__).parent.parent
    monkeypatch.setattr(sys, "argv", ["bench_host.py", *OPTIONS, "--against", str(this)])
    bench_host.main()
    assert "this checkout / other checkout" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(("options", "prompts"), [(["--every", "12"], 2), (["--long", "300"], 1)])
def test_every_setting_is_measured_with_and_without_drafting(
    options: list[str], prompts: int, tmp_path: Path
) -> None:
    target = write_llama(tmp_path / "tiny.gguf", context=2048)
    options = [str(target), "--tokens", "8", "--repeats", "1", *options, "--json"]
    (result,) = run_script("bench_exactness.py", *options)["models"]
    assert len(result["prompts"]) == prompts
    assert [load["requested"] for load in result["loads"]] == ["off", "auto", "bits"]
    # What `auto` chooses depends on the machine.
    assert [load["effective"] for load in result["loads"]][::2] == ["rounding", "bits"]
    assert all(load["first_load_seconds"] > 0 < load["next_load_seconds"] for load in result["loads"])
    rows = {(row["method"], row["setting"]): row for row in result["rows"]}
    assert list(rows) == [*product(("none", "auto"), ("off", "auto", "bits"))]
    for (_, setting), row in rows.items():
        # The mean of a single ratio is that ratio only up to rounding.
        assert row["worst"][1] * 0.999 <= row["ratio"] <= row["best"][1] * 1.001
        assert (row["ratio"] == 1) == (setting == "off")
        assert row["milliseconds_per_token"] > 0 < row["first_token_seconds"]
