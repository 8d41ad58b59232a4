"""`edgespec bench`: tables, JSON and pictures of real replies, and partial results after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import Runtime
from edgespec.bench import figures, runs
from edgespec.methods.costs.curve import CostCurve
from edgespec.model.base import Progress
from tests.cli.conftest import Run, json_of, one_line_error

LINES = (
    {"id": "copy-1", "prompt": "Repeat this: one two three one two three one two three"},
    {"id": "2", "prompt": "List files by size", "category": "howto"},
)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "my prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)), encoding="utf-8")
    return str(file)


@pytest.fixture
def quick(prompts: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Use two prompts and eight tokens. Other tests measure pass costs."""
    curve = CostCurve((1, 2, 4), (0.001, 0.0012, 0.002))
    monkeypatch.setattr(Runtime, "measure_costs", lambda self, progress: curve)
    return ("bench", "--threads", "1", "--context", "256", "--prompts", prompts, "-n", "8")


def test_json_and_everything_in_a_file(run: Run, prompts: str, tmp_path: Path) -> None:
    saved, pictures = tmp_path / "runs.json", tmp_path / "pictures"
    args = (
        "bench", "--threads", "1", "--context", "256", "--prompts", prompts, "-n", "8", "--repeats", "1",
        "--methods", "auto,model,suffix", "--draft-lengths", "2,4", "--temperatures", "0,0.8",
        "--control",
    )  # fmt: skip
    told = json_of(run(*args, "--json", "--save", str(saved), "--plots", str(pictures)))
    assert (told["target"], told["draft"], told["ending"]) == ("demo", "demo-draft", "complete")
    assert told["replies"] == told["planned_replies"] == 2 * 2 * 7
    configs = [
        ("none", None),
        ("none", None),
        ("auto", None),
        ("model", 2),
        ("model", 4),
        ("suffix", 2),
        ("suffix", 4),
    ]
    of_all = [each for each in told["figures"] if each["category"] is None and each["temperature"] == 0]
    assert [(each["config"]["method"], each["config"]["draft_length"]) for each in of_all] == configs
    assert {each["category"] for each in told["figures"]} == {None, "copy", "howto"}
    for each in told["figures"]:
        assert each["compared"] == each["identical"] == each["replies"]
        assert each["worst"] <= each["speed_up"] * (1 + 1e-9)
        assert min(each["seconds"].values()) >= 0
        assert each["ttft_seconds"] > 0
    assert not any(each["best"]["again"] for each in told["oracle_comparisons"])
    for each in told["oracle_comparisons"]:
        assert each["oracle_speed_up"] >= each["best_speed_up"] >= 1
        assert each["share_of_best"] == pytest.approx(each["auto_speed_up"] / each["best_speed_up"])
    assert told["curve"]["widths"][:3] == [1, 2, 3]
    assert told["machine"]["cores"] >= 1
    whole = json.loads(saved.read_text())
    rows = whole.pop("rows")
    assert whole == told
    assert len(rows) == 28
    assert sum(row["again"] for row in rows) == 4
    assert all(row["reply"]["stats"]["cached_prompt_tokens"] == 0 for row in rows)
    assert len(list(pictures.glob("*.png"))) == 4


def test_tables_and_pictures_in_the_terminal(run: Run, quick: tuple[str, ...]) -> None:
    result = run(*quick, "--draft", "none", "--temperatures", "0", "--repeats", "1", "--plot")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("model demo (Q8_0), draft model none, invariant acceptance")
    heads = [line.split("  ")[0] for line in lines if line.isupper()]
    assert heads == ["CATEGORY", "METHOD", "MS PER TOKEN", "CATEGORY"]
    (at,) = (i for i, line in enumerate(lines) if line.startswith("CATEGORY  METHOD"))
    assert [line.split()[:2] for line in lines[at + 1 : at + 4]] == [
        ["all", "auto"],
        ["suffix", lines[at + 2].split()[1]],
        ["ngram", lines[at + 3].split()[1]],
    ]
    assert any(line.startswith("speed-up over plain decoding") for line in lines)
    assert any("Peak memory" in line for line in lines)
    assert "incomplete" not in result.stdout


def test_only_some_categories(run: Run, quick: tuple[str, ...]) -> None:
    args = (*quick, "--methods", "ngram", "--temperatures", "0", "--repeats", "1", "--categories")
    told = json_of(run(*args, "howto", "--json"))
    assert {each["category"] for each in told["figures"]} == {None, "howto"}
    assert told["oracle_comparisons"][0]["auto_speed_up"] is None
    one_line_error(run(*args, "maths"), 2, "howto", code="option_invalid")


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_keeps_what_was_measured(
    run: Run, quick: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    replies = []
    stopped: list[bool] = []
    cancel, clear_cache = Runtime.cancel, Runtime.clear_cache

    def begin(self: Runtime) -> None:
        replies.append(0)
        if len(replies) == 6:
            os.kill(os.getpid(), signal.SIGINT)
            while not stopped:
                pass
        clear_cache(self)

    def cancelled(self: Runtime) -> None:
        cancel(self)
        stopped.append(True)

    monkeypatch.setattr(Runtime, "cancel", cancelled)
    monkeypatch.setattr(Runtime, "clear_cache", begin)
    saved = tmp_path / "runs.json"
    result = run(
        *quick, "--methods", "ngram", "--temperatures", "0", "--save", str(saved), *["--json"][: int(as_json)]
    )
    assert result.exit_code == 130, result.output
    whole = json.loads(saved.read_text())
    assert (whole["ending"], whole["replies"], whole["planned_replies"]) == ("cancelled", 5, 8)
    if as_json:
        assert json.loads(result.stdout)["ending"] == "cancelled"
    else:
        assert result.stdout.splitlines()[2] == "incomplete: 5 of 8 replies (interrupted)"
        assert "SPEED-UP" in result.stdout
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["plan"]


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_before_anything_was_measured(run: Run, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: Runtime, progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while progress("measuring", 0.0):
            pass

    monkeypatch.setattr(Runtime, "measure_costs", measure)
    result = run("bench", "--threads", "1", "--context", "256", "--prompts", prompts, "-n", "8")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr.splitlines()[1:] == ["interrupted: the benchmark was cancelled"]


def test_who_guessed_nothing_is_named(run: Run, quick: tuple[str, ...]) -> None:
    one_token = ("-n", "1", "--temperatures", "0", "--repeats", "1")  # leaves nothing to guess
    result = run(*quick, *one_token, "--methods", "suffix")
    assert result.exit_code == 0
    assert [line for line in result.stdout.splitlines() if line.startswith("suffix proposed no tokens")] != []
    assert "none proposed no tokens" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith("No method drafted any tokens")


@pytest.mark.long
def test_a_method_that_drafted_nothing_is_not_called_the_fastest(
    run: Run, quick: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def altered(*args: Any, **options: Any) -> figures.BenchReport:
        found = real(*args, **options)
        speeds = {"auto": (3.0, 0), "suffix": (2.0, 5), "none": (1.0, 0)}
        changed = []
        for each in found.figures:
            speed_up, drafted = speeds[each.config.method]
            changed.append(replace(each, speed_up=speed_up, drafted_tokens=drafted))
        return replace(found, figures=tuple(changed))

    real = figures.make_report
    monkeypatch.setattr(figures, "make_report", altered)
    result = run(*quick, "--methods", "auto,suffix", "--temperatures", "0", "--repeats", "1")
    assert "The fastest method is suffix: speed-up 2.00x" in result.stdout


@pytest.mark.long
def test_without_replies_no_memory_is_reported(
    run: Run, quick: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*args: Any, **options: Any) -> runs.BenchRun:
        return replace(real(*args, **options), rows=(), ending="time")

    real = runs.run
    monkeypatch.setattr(runs, "run", empty)
    result = run(*quick, "--methods", "ngram", "--temperatures", "0", "--repeats", "1")
    assert result.exit_code == 0
    assert "Peak memory" not in result.stdout


@pytest.mark.long
def test_the_number_of_replies_is_printed_first(run: Run, quick: tuple[str, ...]) -> None:
    result = run(*quick, "--methods", "ngram,suffix", "--temperatures", "0", "--max-seconds", "90", "--json")
    assert json_of(result)["planned_replies"] == 12
    assert result.stderr.splitlines()[-1] == (
        "plan: 12 replies of up to 8 tokens (2 prompts x 1 temperature x 2 repeats x 3 methods: none, ngram,"
        " suffix); no new ones start after 1 min 30 s"
    )


@pytest.mark.long
def test_time_that_is_over_is_no_failure(run: Run, quick: tuple[str, ...]) -> None:
    result = run(*quick, "--methods", "ngram", "--repeats", "2000", "--max-seconds", "1")
    assert result.exit_code == 0
    assert "of 16000 replies (time limit reached)" in result.stdout


def test_a_failure_half_way_is_told_after_what_was_measured(
    run: Run, quick: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, **options: Any) -> runs.BenchRun:
        return replace(real(*args, **options), ending="failed", error="the device is gone; plug it in")

    real = runs.run
    monkeypatch.setattr(runs, "run", failing)
    result = run(*quick, "--methods", "ngram", "--temperatures", "0", "--repeats", "1")
    assert result.exit_code == 1
    assert "incomplete: 4 of 4 replies (an error occurred)" in result.stdout
    assert result.stderr.splitlines()[-1] == "error: the device is gone; plug it in"


@pytest.mark.long
def test_replies_that_differ_are_told(
    run: Run, quick: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Runtime.stream_tokens

    def shorter(self: Runtime, tokens: Any, **options: Any) -> Any:
        if options["method"] == "ngram":
            options["max_tokens"] = min(options["max_tokens"], 3)
        return whole(self, tokens, **options)

    monkeypatch.setattr(Runtime, "stream_tokens", shorter)
    args = (*quick, "--methods", "ngram", "--repeats", "1")
    result = run(*args, "--temperatures", "0")
    assert result.exit_code == 0
    assert "2 replies differ from those without the speed-up" in result.stdout
    assert "0 of 2" in result.stdout
    rejecting = run(*args, "--acceptance", "rejection", "--temperatures", "0.8")
    assert "replies differ" not in rejecting.stdout


def test_nonsense_is_refused_before_anything_is_loaded(
    run: Run, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(*args: object, **options: object) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr("edgespec.load", no)
    for args, quoted, code in (
        (["--remember"], "--remember", "option_conflict"),
        (["--temperatures", "-1"], "--temperatures", "option_invalid"),
        (["--methods", "model,model", "--temperatures", "0,0"], "temperatures", "option_invalid"),
        (["--save", str(tmp_path)], tmp_path, "file_not_written"),
        (["--save", str(tmp_path / "nowhere" / "x.json")], "x.json", "file_not_written"),
        (["--plots", prompts], "--plots", "option_invalid"),
        (["--max-seconds", "0"], "--max-seconds", "option_invalid"),
        (["--repeats", "0"], "--repeats", "option_invalid"),
        (["-n", "0"], "--max-tokens", "option_invalid"),
    ):
        one_line_error(run("bench", "--prompts", prompts, *args), 2, quoted, code=code)


def test_pictures_without_matplotlib_name_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.bench.charts.find_spec", lambda name: None)
    one_line_error(run("bench", "--plots", "somewhere"), 1, "scripts/setup dev", code="backend_missing")
