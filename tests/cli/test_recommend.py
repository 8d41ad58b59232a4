"""`edgespec recommend` prints a table, a recommendation and a command, and `plan` shows the same speed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import edgespec.loading.recommendation as recommendation
import edgespec.methods.costs.machine_speed as machine_speed
from edgespec.loading.recommendation import draft_advice
from edgespec.model.registry import format_of
from tests.cli.conftest import Run
from tests.loading.test_recommendation import machine


@pytest.fixture(autouse=True)
def measured_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    machine_speed.save_machine_speed(format_of("gguf"), machine(50))


def test_the_report_names_a_model_and_its_command(run: Run) -> None:
    done = run("recommend", "--memory", "16GiB")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert any(line.startswith("Recommended: ") for line in lines)
    assert any(line.strip().startswith("edgespec chat --target ") for line in lines)
    assert "TOKENS/S" in done.stdout


def test_a_draft_model_that_saves_no_time_is_not_named(run: Run) -> None:
    assert "with the draft model" in run("recommend", "--memory", "12GiB").stdout.split("Recommended:")[1]
    slow = machine(50, extra_cost=1.0)
    machine_speed.save_machine_speed(format_of("gguf"), slow)
    said = run("recommend", "--memory", "12GiB").stdout.split("Recommended:")[1]
    assert "with the draft model" not in said
    assert "--draft" not in said
    assert "checking two tokens at once takes 2.00 times as long as one token" in said
    assert said.endswith("; no model in the catalogue would be faster with a draft model.\n"), said


def test_the_model_or_quantisation_that_gains_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = machine(50, extra_cost=1.0), machine(50)
    assert draft_advice(12 << 30).startswith("qwen")
    assert "as fast with the draft model" in draft_advice(12 << 30)
    types = {"Q4_K": slow.types["Q4_K"], "Q6_K": slow.types["Q4_K"], "Q8_0": fast.types["Q4_K"]}
    machine_speed.save_machine_speed(format_of("gguf"), replace(slow, types=types))
    assert "models in the quantisation Q8_0 gain most" in draft_advice(12 << 30)
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", "/nonexistent")
    assert draft_advice() == ""


def test_models_show_says_why_nothing_helps_and_what_to_do(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("edgespec.store.constants.MIN_ESTIMABLE_BYTES", 1)

    def shown() -> dict[str, str]:
        lines = run("models", "show", "demo-draft").stdout.splitlines()
        return dict(re.split("  +", line, maxsplit=1) for line in lines)

    assert "--draft" in shown()["suggested draft models"]
    assert "--draft" in shown()["chosen draft model"]
    assert "--head" in shown()["head"]
    speed_up = shown()["speed-up on this machine"]
    assert "checking two tokens at once takes 1.10 times as long as one token" in speed_up
    # The model that is named depends on the memory that is free.
    assert re.search("as fast with the draft model|gain most", speed_up)
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "empty"))
    assert "`edgespec recommend`" in shown()["speed-up on this machine"]


def test_the_json_report_has_one_entry_per_model(run: Run) -> None:
    report = json.loads(run("recommend", "--memory", "16GiB", "--json").stdout)
    assert report["recommended"] in {each["model"] for each in report["models"]}
    assert report["command"].startswith("edgespec chat")
    assert report["machine"]["Q4_K"]["pass_costs"]["2"] == pytest.approx(1.1)
    for each in report["models"]:
        assert each["tokens_per_second"] > 0
        assert each["speedup"] >= 1
        assert set(each["pass_costs"]) == {"2", "4", "8"}


def test_too_little_memory_is_said_plainly(run: Run) -> None:
    done = run("recommend", "--memory", "100MiB")
    assert done.exit_code == 0
    assert "No model in the catalogue fits in 100 MiB of memory" in done.stdout


def test_an_unknown_task_is_refused(run: Run) -> None:
    assert run("recommend", "--task", "poetry").exit_code == 2


def test_plan_shows_the_expected_speed(run: Run) -> None:
    assert "tokens per second, " in run("plan").stdout
    prediction = json.loads(run("plan", "--json").stdout)["prediction"]
    assert prediction["tokens_per_second"] == pytest.approx(50e9 / 12.28e6, rel=0.01)


def test_the_list_of_models_shows_the_expected_speed(run: Run) -> None:
    report = json.loads(run("recommend", "--memory", "16GiB", "--json").stdout)
    listed = json.loads(run("models", "list", "--json").stdout)["models"]
    expected = next(each for each in report["models"] if each["model"] == "8b-q4")
    entry = next(each for each in listed if "8b-q4" in each["aliases"])
    assert entry["expected_speed"]["tokens_per_second"] == pytest.approx(expected["tokens_per_second"])
    assert listed[0]["expected_speed"] is None
    header, *rows = run("models", "list").stdout.splitlines()
    assert "TOKENS/S" in header
    assert any(line.startswith("llama-3.1-8b ") for line in rows)


def test_speeds_from_a_busy_machine_are_marked_everywhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    remark = "other programs were busy"
    assert all(remark not in run(*words).output for words in (("plan",), ("models", "list")))
    busy = replace(machine(50), busy_cores=1.0)
    machine_speed.save_machine_speed(format_of("gguf"), busy)
    monkeypatch.setattr(recommendation, "CPU_LOAD", SimpleNamespace(busy_cores=lambda: 1.0))
    for words in (("plan",), ("models", "list")):
        assert remark in " ".join(run(*words).output.split())
    assert "other programs kept 1.0 processor cores busy" in run("recommend", "--memory", "16GiB").stderr
    assert json.loads(run("plan", "--json").stdout)["prediction"]["measured_while_busy"] is True


def test_plan_says_what_to_run_first(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "empty"))
    assert "run `edgespec recommend`" in run("plan").stdout
    assert json.loads(run("plan", "--json").stdout)["prediction"] is None
