"""What speculation can bring here: reckoned right, measured on the real demo, said plainly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec
from edgespec.errors import CancelledError
from edgespec.sameness import read_prompts
from edgespec.tuning import DrafterFound, _verdict, break_even, tune
from tests.cli.conftest import Run, json_of


@given(st.floats(1.0, 70.0), st.integers(2, 64))
def test_at_break_even_a_pass_gives_what_it_costs(v: float, width: int) -> None:
    agreement = break_even(v, width)
    if agreement is None:
        assert v > width
    else:
        assert 0.0 <= agreement <= 1.0
        assert sum(agreement**i for i in range(width)) == pytest.approx(v, rel=1e-6)


def found(name: str, expected: float, drafted: int = 50) -> DrafterFound:
    return DrafterFound(name, 1.0, 0.8, 0.1, 3, expected, drafted)


@pytest.mark.parametrize(
    ("limit", "drafters", "says"),
    [
        (1.02, [found("model", 1.0)], "speculation cannot pay here"),
        (3.0, [found("model", 0.9), found("suffix", 1.04)], "no drafter at hand pays here"),
        (3.0, [found("model", 0.9), found("suffix", 1.5)], "suffix pays here: --draft-length 3"),
        (3.0, [found("suffix", 9.0, drafted=0)], "no drafter at hand pays here"),
        (3.0, [], "no drafter at hand pays here"),
    ],
)
def test_it_says_plainly_whether_it_pays(limit: float, drafters: list[DrafterFound], says: str) -> None:
    assert _verdict(limit, drafters).startswith(says)


def test_the_demo_is_measured_and_the_curve_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    with edgespec.load("demo", context=256, threads=1, method="model") as runtime:
        assert not list(tmp_path.rglob("costs-*"))
        tuning = tune(runtime, read_prompts()[:2], max_tokens=16)
    assert list(tmp_path.rglob("costs-*"))
    assert (tuning.target, tuning.draft) == ("demo", "demo-draft")
    assert [each.width for each in tuning.passes][:5] == [1, 2, 3, 4, 5]
    assert tuning.passes[0].v == tuning.passes[0].limit == 1.0
    assert tuning.limit == max(each.width / each.v for each in tuning.passes)
    by_name = {each.name: each for each in tuning.drafters}
    assert set(by_name) == {"model", "suffix", "ngram"}
    assert by_name["model"].drafted > 10
    assert 0.3 < by_name["model"].acceptance <= 1.0
    assert by_name["model"].c > by_name["ngram"].c >= 0.0
    assert all(each.speed_up > 0.0 and each.expected > 0.0 for each in tuning.drafters)


def test_it_can_be_cancelled() -> None:
    with edgespec.load("demo", "none", context=256, threads=1, method="suffix") as runtime:
        with pytest.raises(CancelledError, match="tuning was cancelled"):
            tune(runtime, read_prompts()[:1], max_tokens=8, progress=lambda what, _: "trying" not in what)
        assert runtime.generate("Hello", max_tokens=2).tokens


def test_on_the_command_line(run: Run) -> None:
    args = ["tune", "--draft", "none", "--threads", "1", "--context", "256", "-n", "8"]
    told = run(*args)
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith("target demo, draft none, plain step ")
    assert "BREAK-EVEN" in told.stdout
    report = json_of(run(*args, "--json"))
    assert told.stdout.splitlines()[-1].split(" ")[0] in ("speculation", "no", "suffix", "ngram")
    assert {each["name"] for each in report["drafters"]} == {"suffix", "ngram"}
    assert report["verdict"]
