"""`edgespec tune`: correct predictions, measurements with the real demo, and clear output."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec
from edgespec.api.runtime import Runtime
from edgespec.bench.tuning import DrafterResult, Tuning, _drafter_result, _verdict, break_even, tune
from edgespec.decode.drafter_set import DrafterSet
from edgespec.decode.reply import MethodReport, Reply
from edgespec.engine.stats import Stats
from edgespec.errors import CancelledError
from edgespec.losslessness.cases import read_prompts
from edgespec.methods.costs.curve import CostCurve
from tests.cli.conftest import Run, json_of, one_line_error
from tests.raising import raises
from tests.saved_facts import saved_facts
from tests.tables import VOCAB
from tests.tabular import TabularModel


@given(st.floats(1.0, 70.0), st.integers(2, 64))
def test_at_break_even_a_pass_gives_what_it_costs(v: float, width: int) -> None:
    agreement = break_even(v, width)
    if agreement is None:
        assert v > width
    else:
        assert 0.0 <= agreement <= 1.0
        assert sum(agreement**i for i in range(width)) == pytest.approx(v, rel=1e-6)


def found(name: str, expected: float, drafted: int = 50) -> DrafterResult:
    return DrafterResult(name, 1.0, 0.8, 0.1, 3, expected, drafted)


@pytest.mark.parametrize(
    ("limit", "drafters", "says"),
    [
        (1.02, [found("model", 1.0)], "Drafting cannot help on this machine"),
        (3.0, [found("model", 0.9), found("suffix", 1.04)], "No available method makes replies faster"),
        (3.0, [found("model", 0.9), found("suffix", 1.5)], "Use --method suffix --draft-length 3"),
        (
            3.0,
            [found("model", 1.0), found("suffix", 9.0, drafted=0)],
            "No available method makes replies faster",
        ),
        (3.0, [found("suffix", 9.0, drafted=0)], "The replies were too short"),
        (3.0, [], "No available method makes replies faster"),
    ],
)
def test_it_says_plainly_whether_it_pays(limit: float, drafters: list[DrafterResult], says: str) -> None:
    assert _verdict(limit, drafters).startswith(says)


@pytest.mark.parametrize(
    ("auto", "expected", "says"),
    [
        (1.3, 1.2, "Keep the default"),
        (1.3, 1.0, "Keep the default"),
        (1.1, 1.2, "Use --method suffix"),
        (1.0, 0.9, "No available method makes replies faster"),
    ],
)
def test_it_keeps_the_default_if_no_method_is_faster(auto: float, expected: float, says: str) -> None:
    assert _verdict(3.0, [found("suffix", expected)], auto).startswith(says)


def test_it_says_why_nothing_helps() -> None:
    why = "On this machine, checking two tokens at once takes 1.98 times as long as one token."
    assert _verdict(1.02, [], None, why).endswith(f"Use --method none. {why}")
    assert _verdict(3.0, [found("model", 1.0)], None, why).endswith(f"Use --method none. {why}")
    assert why not in _verdict(3.0, [found("model", 1.5)], None, why)


def reply(drafted: list[int], accepted: list[int], passes: int) -> Reply:
    """Return a reply of which only the counts matter. Drafting is free, and each pass takes 0.1 seconds."""
    stats = Stats(
        generated_tokens=passes + sum(accepted),
        target_passes=passes,
        drafted_tokens=sum(drafted),
        accepted_tokens=sum(accepted),
        drafted_per_position=drafted,
        accepted_per_position=accepted,
        verify_seconds=0.1 * passes,
    )
    return Reply("", (), "length", 1, "t", None, MethodReport("m", "m", ""), stats)


@pytest.mark.parametrize("children", [1, 3])
def test_a_tree_is_reckoned_as_a_chain_that_is_right_as_often(children: int) -> None:
    flat = CostCurve((1, 2, 1000), (0.1, 0.1, 0.1))
    tried = [reply([10 * children, 10 * children, 10 * children, 10 * children], [8, 4, 2, 1], 10)]
    told = _drafter_result("model", tried, [reply([], [], 10)], flat)
    assert told.acceptance == pytest.approx(15 / 24)
    assert told.expected == pytest.approx(1 / (1 - 15 / 24), rel=0.01)


def test_a_broader_tree_pays_for_its_width() -> None:
    steep = CostCurve((1, 2, 3), (0.1, 0.12, 0.14))
    plain = [reply([], [], 10)]
    chain, tree = (
        _drafter_result("model", [reply([10 * n] * 4, [8, 4, 2, 1], 10)], plain, steep).expected
        for n in (1, 3)
    )
    assert chain > tree > 0.0


class Rigid(TabularModel):
    """Its memory goes back to nothing or not at all."""

    def truncate(self, length: int) -> None:
        super().truncate(length if length >= self.length else 0)


def test_a_model_that_cannot_roll_back_says_why() -> None:
    target = Rigid(np.zeros((VOCAB, VOCAB), np.float32), rollback=False)
    target.facts = replace(
        target.facts, capabilities=replace(target.facts.capabilities, reason="its memory cannot be cut back")
    )
    with Runtime(target, None, DrafterSet(target, why_no_draft="none")) as runtime:
        told = tune(runtime, read_prompts()[:1], max_tokens=4)
    assert told.verdict == "Drafting does not work with this model: its memory cannot be cut back."
    assert [each.width for each in told.passes] == [1]


@pytest.mark.long
def test_costs_that_cannot_be_kept_are_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(blocked))
    with edgespec.load("demo", "none", context=256, threads=1) as runtime:
        assert "cannot be saved" in tune(runtime, read_prompts()[:1], max_tokens=4).notice


def test_a_cancelled_measurement_measures_nothing() -> None:
    with edgespec.load("demo", "none", context=256, threads=1) as runtime:
        with pytest.raises(CancelledError):
            runtime.measure_costs(lambda *_: False)
        assert runtime.generate("Hello", max_tokens=2).tokens


def test_its_own_replies_are_not_looked_up(run: Run) -> None:
    one_line_error(run("tune", "--remember"), 2, "--remember", code="option_conflict")


@pytest.mark.long
def test_the_demo_is_measured_and_the_curve_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    with edgespec.load("demo", context=256, threads=1, method="model") as runtime:
        assert not saved_facts("costs")
        tuning = tune(runtime, read_prompts()[:2], max_tokens=16)
    assert saved_facts("costs")
    assert (tuning.target, tuning.draft) == ("demo", "demo-draft")
    assert tuning.auto is None
    assert [each.width for each in tuning.passes][:5] == [1, 2, 3, 4, 5]
    assert tuning.passes[0].v == tuning.passes[0].limit == 1.0
    assert tuning.limit == max(each.width / each.v for each in tuning.passes)
    by_name = {each.name: each for each in tuning.drafters}
    assert set(by_name) == {"model", "suffix", "ngram"}
    assert by_name["model"].drafted > 10
    assert 0.3 < by_name["model"].acceptance <= 1.0
    # The time of a lookup, compared with the draft model, depends on what else is running.
    assert by_name["model"].c > 0.0
    assert by_name["ngram"].c >= 0.0
    assert all(each.speed_up > 0.0 and each.expected > 0.0 for each in tuning.drafters)


@pytest.mark.long
def test_it_can_be_cancelled() -> None:
    with edgespec.load("demo", "none", context=256, threads=1, method="suffix") as runtime:
        with raises(CancelledError, "tuning"):
            tune(runtime, read_prompts()[:1], max_tokens=8, progress=lambda what, _: "trying" not in what)
        assert runtime.generate("Hello", max_tokens=2).tokens


def test_on_the_command_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Tuning] = []

    def tune_once(*args: Any, **options: Any) -> Tuning:
        """Measure only for the first command. The second one prints the same results as JSON."""
        if not measured:
            measured.append(tune(*args, **options))
        return measured[0]

    monkeypatch.setattr("edgespec.bench.tuning.tune", tune_once)
    args = ["tune", "--draft", "none", "--threads", "1", "--context", "256", "-n", "8"]
    told = run(*args)
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith("model demo, draft model none\n")
    assert "BREAK-EVEN" in told.stdout
    report = json_of(run(*args, "--json"))
    if "Use --method none." in told.stdout:
        assert re.search(r"checking two tokens at once takes \d.\d\d times", told.stdout)
        assert "`edgespec recommend` shows which models it would help" in told.stdout
    assert told.stdout.splitlines()[-1].split(" ")[0] in ("Drafting", "Keep", "No", "Nothing", "Use")
    assert {each["name"] for each in report["drafters"]} == {"suffix", "ngram"}
    assert told.stdout.splitlines()[-1] == report["verdict"]
    assert report["auto"] > 0.0
    assert "The speed-up with the default method, auto, was " in told.stdout
