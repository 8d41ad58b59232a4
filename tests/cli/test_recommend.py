"""`edgespec recommend` prints a table, a recommendation and a command, and `plan` shows the same speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import edgespec.costs.machine_speed as machine_speed
from edgespec.backends.registry import format_of
from tests.assembly.test_recommendation import machine
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def measured_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    machine_speed._store(format_of("gguf")).save(machine_speed._to_arrays(machine(50)))


def test_the_report_names_a_model_and_its_command(run: Run) -> None:
    done = run("recommend", "--memory", "16GiB")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert any(line.startswith("Recommended: ") for line in lines)
    assert any(line.strip().startswith("edgespec chat --target ") for line in lines)
    assert "TOKENS/S" in done.stdout


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


def test_plan_says_what_to_run_first(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "empty"))
    assert "run `edgespec recommend`" in run("plan").stdout
    assert json.loads(run("plan", "--json").stdout)["prediction"] is None
