"""`edgespec race`: the result for people and scripts, and the saved pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run, json_of, one_line_error

QUESTION = "How do I list files by size?"


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_json(run: Run, temperature: str) -> None:
    result = json_of(
        run("race", "--threads", "1", "--json", "--temperature", temperature, "-n", "24", QUESTION)
    )
    assert result["same_text"] is True
    assert result["prompt"] == QUESTION
    assert result["plain"]["tokens"] == result["other"]["tokens"]
    assert result["plain"]["method"]["effective"] == "none"
    assert result["other"]["method"]["requested"] == "auto"
    speeds = [result[lane]["race_tokens_per_second"] for lane in ("plain", "other")]
    assert result["speed_up"] == pytest.approx(speeds[1] / speeds[0])


def test_in_a_pipe_it_prints_the_result(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "race.svg"
    result = run("race", "--threads", "1", "-n", "24", "--method", "ngram", "--to", str(path), QUESTION)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(("ngram was ", "The comparison was not fair"))
    assert "\x1b" not in result.stdout
    assert path.read_text("utf-8").startswith("<svg ")


@pytest.mark.parametrize(
    ("args", "quoted", "code"),
    [
        (["--to", "race.gif"], "'race.gif'", "option_invalid"),
        (["--to", "race.cast"], ".svg", "option_removed"),
        (["--remember"], "--remember", "option_conflict"),
        (["--method", "none"], "none", "option_invalid"),
        (["--acceptance", "rejection"], "`rejection`", "option_conflict"),
        (["--sped"], "--sped", "option_unknown"),
    ],
)
def test_what_cannot_be_raced_is_refused(run: Run, args: list[str], quoted: str, code: str) -> None:
    one_line_error(run("race", "--threads", "1", *args, QUESTION), 2, quoted, code=code)
