"""`edgespec verify`: the evidence of losslessness, and a meaningful exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import edgespec
from edgespec.losslessness import verify as verify_module
from edgespec.losslessness.cases import Prompt
from edgespec.losslessness.replay import Reason
from edgespec.losslessness.report import Divergence, MethodResult, VerifyReport
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.target_costs import TargetCosts
from tests.backends.tiny_models import write_llama
from tests.cli.conftest import Run, json_of, one_line_error
from tests.losslessness.faults import share_cells

QUICK = ("--temperatures", "0,0.8", "--draft-lengths", "3", "-n", "8")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "my prompts.jsonl"
    lines = [{"prompt": "List files"}, {"messages": [{"role": "user", "content": "Hello 😀"}]}]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(file)


@pytest.mark.long
def test_json(run: Run, prompts: str) -> None:
    report = json_of(run("verify", *QUICK, "--prompts", prompts, "--json"))
    assert (report["target"], report["draft"], report["acceptance"]) == ("demo", "demo-draft", "invariant")
    assert report["methods"].keys() == {"model", "suffix", "ngram", "model+suffix"}
    for method in report["methods"].values():
        assert method["prompts"] == 2
        assert method["identical"] + method["rounding"] == 2
        assert method["faults"] == 0


@pytest.mark.parametrize(
    ("acceptance", "replies", "rest"),
    [
        # Two prompts at two temperatures, with four methods, and without the speed-up.
        ("invariant", 20, "and without the speed-up"),
        # At temperature 0.8, each of the eight cases is sampled 200 times.
        ("rejection", 1610, "above temperature 0, each is sampled many times"),
    ],
)
def test_the_number_of_replies_is_printed_first(
    run: Run, prompts: str, monkeypatch: pytest.MonkeyPatch, acceptance: str, replies: int, rest: str
) -> None:
    monkeypatch.setattr(verify_module, "verify", Verified(prompts=2, identical=2))
    result = run("verify", *QUICK, "--prompts", prompts, "--acceptance", acceptance)
    plan = result.stderr.splitlines()[-1]
    assert plan.startswith(
        f"plan: {replies:,} replies of up to 8 tokens: 2 prompts x 2 temperatures x 1 draft"
    )
    assert f"4 methods (model, suffix, ngram, model+suffix){',' if replies == 20 else ';'} {rest}" in plan


@pytest.mark.long
def test_to_the_last_bit(run: Run, prompts: str) -> None:
    report = json_of(run("verify", *QUICK, "--prompts", prompts, "--methods", "model", "--exact", "--json"))
    method = report["methods"]["model"]
    assert (method["identical"], method["rounding"], method["faults"]) == (2, 0, 0)
    assert method["drafted_tokens"] > 0


@pytest.mark.long
def test_table(run: Run, prompts: str) -> None:
    result = run("verify", *QUICK, "--prompts", prompts, "--methods", "ngram,model")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "model demo, draft model demo-draft, invariant acceptance"
    counts = ["PROMPTS", "REPLIES", "IDENTICAL", "ROUNDING", "FAULTS", "LARGEST-DIFF", "DRAFTED", "ACCEPTED"]
    assert lines[2].split() == ["METHOD", *counts]
    # Two prompts at two temperatures, with two methods.
    assert lines[-1].startswith("Passed: the speed-up did not change a single token of these 8 replies")
    assert [line.split()[0] for line in lines[3:-2]] == ["ngram", "model"]
    for line in lines[3:-2]:
        assert line.split()[1:3] == ["2", "4"]
        assert line.split()[6] == "-"
        drafted, accepted = map(int, line.split()[7:9])
        assert drafted > 0
        assert drafted >= accepted


@pytest.mark.long
def test_the_head_is_checked_and_named(run: Run, prompts: str) -> None:
    lines = run("verify", *QUICK, "--prompts", prompts, "--head", "demo-head").stdout.splitlines()
    assert lines[0] == "model demo, head demo-head, invariant acceptance"
    assert [line.split()[0] for line in lines[3:-2]] == ["eagle", "suffix", "ngram"]


@pytest.mark.long
def test_methods_guess_whether_or_not_it_pays(
    run: Run, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetCosts, "curve", lambda *_: CostCurve((1, 2), (1.0, 1000.0)))
    args = ("--prompts", prompts, "--methods", "lookahead,auto", "--json")
    methods = json_of(run("verify", *QUICK, *args))["methods"]
    assert methods.keys() == {"lookahead", "auto"}
    assert all(method["drafted_tokens"] > 0 for method in methods.values())
    assert "lookahead runs" in methods["lookahead"]["note"]


@pytest.mark.long
def test_nothing_drafted_is_no_proof(run: Run, prompts: str) -> None:
    """A one-token reply has no room for a draft. `none` is not expected to draft."""
    args = ("verify", "--prompts", prompts, "--methods", "model,none", "-n", "1", "--temperatures", "0")
    result = run(*args)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "model proposed no tokens, so nothing was checked"
    result = run(*args, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["nothing_drafted"] == ["model"]
    assert report["methods"]["model"]["identical"] == 2


@pytest.mark.long
def test_replies_at_once(run: Run, prompts: str) -> None:
    args = ("verify", *QUICK, "--prompts", prompts, "--methods", "none,suffix", "--parallel", "2")
    report = json_of(run(*args, "--json"))
    assert (report["parallel"], report["nothing_shared"]) == (2, [])
    for method in report["methods"].values():
        assert (method["identical"] + method["rounding"], method["faults"]) == (2, 0)
    first_line = run(*args).stdout.splitlines()[0]
    assert first_line == "model demo, draft model demo-draft, invariant acceptance, 2 replies at once"


class TestTwinsInRepliesAtOnce:
    """Every token has a twin whose logit differs by less than the rounding errors of a shared context."""

    def verify(self, run: Run, folder: Path) -> Result:
        model = write_llama(folder / "twins.gguf", layers=2, twins=True)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(f'{{"prompt": "List file {number}"}}\n' for number in range(4)))
        return run(
            *(
                "verify",
                "--target",
                str(model),
                "--draft",
                "none",
                "--methods",
                "none,suffix",
                "--parallel",
                "3",
            ),
            *("--temperatures", "0", "--draft-lengths", "3", "-n", "24", "--context", "256"),
            *("--prompts", str(prompts), "--json"),
        )

    @pytest.mark.long
    def test_twins_that_swap_are_rounding(self, run: Run, tmp_path: Path) -> None:
        result = self.verify(run, tmp_path)
        assert result.exit_code == 0, result.output
        found = [each for method in json_of(result)["methods"].values() for each in method["divergences"]]
        assert found
        for each in found:
            assert each["verdict"] == "rounding"
            assert each["plain_token"] // 2 == each["other_token"] // 2
            assert 0 < each["largest_difference"] < 0.1
            assert each["reason"] is None
            assert each["leak"] == 0

    @pytest.mark.long
    def test_twins_do_not_hide_cells_of_another_reply(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        share_cells(monkeypatch, 12)
        result = self.verify(run, tmp_path)
        assert result.exit_code == 1
        methods = json.loads(result.stdout)["methods"]
        found = [each for method in methods.values() for each in method["divergences"]]
        assert sum(method["faults"] for method in methods.values()) == len(found) > 0
        assert sum(method["rounding"] for method in methods.values()) == 0
        assert all(each["leak"] > 0 for each in found)
        assert all(each["reason"] == "other_replies" for each in found)


def test_replies_at_once_need_shared_passes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "verify", Verified(parallel=2, prompts=2, identical=2))
    result = run("verify", "--methods", "model", "--parallel", "2")
    assert result.exit_code == 1
    assert (
        "no replies with model were computed together, so nothing was checked" in result.stdout.splitlines()
    )


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("--acceptance", "rejection"), "option_conflict"),
        (("--methods", "suffix", "--temperatures", "0"), "option_without_effect"),
    ],
)
def test_replies_at_once_are_refused_before_a_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], code: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "List files"}', encoding="utf-8")
    monkeypatch.setattr(edgespec, "load", lambda **_: pytest.fail("a model was loaded"))
    quick = ("--temperatures", "0,0.8", "--draft-lengths", "3", "--prompts", str(file))
    result = run("verify", *quick, "--parallel", "2", *args)
    one_line_error(result, 2, "--parallel", code=code)


@pytest.mark.long
def test_without_a_draft_only_lookups_are_compared(run: Run, prompts: str) -> None:
    report = json_of(run("verify", *QUICK, "--prompts", prompts, "--draft", "none", "--json"))
    assert report["methods"].keys() == {"suffix", "ngram"}


class Verified:
    """Replaces `verify`. Records its arguments, and returns the test's report."""

    def __init__(self, parallel: int = 1, *, exact: bool = False, **found: Any) -> None:
        self.asked: dict[str, Any] = {}
        self._parallel, self._exact, self._found = parallel, exact, found
        self.divergence = Divergence("howto-01", 0.8, 4, 12, 5, 6, "fault", Reason.REJECTED_TOKENS, leak=0.25)

    def __call__(self, runtime: object, prompts: list[Prompt], **asked: Any) -> VerifyReport:
        self.asked = asked | {"prompts": prompts}
        found = {"drafted_tokens": 9} | self._found
        result = MethodResult(**found, divergences=[self.divergence])
        models = ("demo", "demo-draft", asked["acceptance"])
        return VerifyReport(*models, {"model": result}, self._parallel, exact=self._exact)


def test_a_fault_is_shown_and_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "verify", Verified(prompts=2, identical=1, faults=1))
    result = run("verify", "--methods", "model")
    assert result.exit_code == 1
    assert "position 12" in result.stdout
    assert "leak 0.25, fault: rejected draft tokens changed later tokens" in result.stdout


@pytest.mark.parametrize(("exact", "status"), [(False, 0), (True, 1)])
def test_rounding_fails_only_where_equal_bits_are_promised(
    run: Run, monkeypatch: pytest.MonkeyPatch, exact: bool, status: int
) -> None:
    verified = Verified(prompts=2, replies=4, identical=1, rounding=1, largest_difference=0.725, exact=exact)
    verified.divergence = replace(verified.divergence, verdict="rounding", reason=None, leak=None)
    monkeypatch.setattr(verify_module, "verify", verified)
    result = run("verify", "--methods", "model")
    assert result.exit_code == status
    assert "0.725" in result.stdout
    passed = "Passed: 1 of these 4 replies differ by rounding, and there are no faults" in result.stdout
    assert passed is not exact
    assert ("promise of identical replies does not hold for this build" in result.stdout) is exact


def test_what_silent_drafters_say_of_themselves(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = Verified(prompts=2, identical=2, drafted_tokens=0, note="it looks for layers\x1b[2J")
    monkeypatch.setattr(verify_module, "verify", verified)
    result = run("verify", "--methods", "model", "--idle-time", "0.5")
    assert (
        "model proposed no tokens, so nothing was checked: it looks for layers[2J"
        in result.stdout.splitlines()
    )
    assert (result.exit_code, verified.asked["idle_seconds"]) == (1, 0.5)


@pytest.mark.long
@pytest.mark.parametrize(("p_value", "status"), [(0.0002, 1), (0.4, 0), (None, 0)])
def test_a_small_p_value_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch, p_value: float | None, status: int
) -> None:
    verified = Verified(prompts=2, identical=2, smallest_corrected_p_value=p_value)
    monkeypatch.setattr(verify_module, "verify", verified)
    assert run("verify", "--acceptance", "rejection", "--json").exit_code == status
    assert verified.asked["acceptance"] == "rejection"


def test_what_is_asked_by_default(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = Verified(prompts=1, identical=1)
    monkeypatch.setattr(verify_module, "verify", verified)
    assert run("verify", "--seed", "5").exit_code == 0
    asked = verified.asked
    told = " ".join(run("verify", "--help").stdout.split())
    assert "[default: the methods that use repeated text, and those of the loaded draft heads;" in told
    assert f"[default: {len(asked['prompts'])} built-in prompts]" in told
    assert "Others, such as `auto`, are checked only if you name them" in told
    assert asked["methods"] == ("model", "suffix", "ngram", "model+suffix")
    assert (asked["temperatures"], asked["draft_lengths"]) == ((0.0, 0.8, 1.2), (1, 4, 8))
    assert (asked["seed"], asked["acceptance"], asked["idle_seconds"]) == (5, "invariant", 2)
    assert not asked["at_once"]
    skills = [prompt.name.rpartition("-")[0] for prompt in asked["prompts"]]
    assert {"howto", "code", "math"} <= set(skills)
    assert max(map(skills.count, skills)) == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--methods", "modl"], "'model'"),
        (["--temperatures", "0,-1"], "--temperatures"),
        (["--temperatures", "warm"], "--temperatures"),
        (["--draft-lengths", "0"], "--draft-lengths"),
        (["--idle-time", "-1"], "--idle-time"),
    ],
)
def test_wrong_usage(run: Run, args: list[str], says: str) -> None:
    one_line_error(run("verify", *args), 2, says, code="option_invalid")
