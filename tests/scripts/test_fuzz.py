"""The fuzzer finds planted bugs, resumes and minimises, and handles a sample of its inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.fuzzing.__main__ import SUBJECTS
from scripts.fuzzing.campaign import Campaign, Subject, minimise, replay, table
from scripts.fuzzing.process import Limits
from scripts.fuzzing.worker import Files, random_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workers are POSIX processes")
_QUICK = Limits(seconds=0.5)


def planted(bug: str) -> Subject:
    return Subject(bug, f"tests.scripts.planted:{bug.capitalize()}", 100)


def campaign_of(folder: Path, *subjects: Subject, seed: int = 0, limits: Limits | None = None) -> Campaign:
    return Campaign(folder, subjects, seed, limits, report=lambda _: None, minimise_seconds=2.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("bug", "kind", "signature", "count"),
    [
        ("crash", "crash", "SIGABRT in unknown place", 20),
        ("hang", "hang", "hang in unknown place", 8),
        ("traceback", "traceback", "ValueError in planted.py, run", 20),
        ("leak", "memory", "growth of memory", 100),
    ],
)
def test_a_planted_bug_is_found(bug: str, kind: str, signature: str, count: int, tmp_path: Path) -> None:
    campaign = campaign_of(tmp_path, planted(bug), limits=_QUICK)
    campaign.run(count, 60.0)
    results = campaign.results[bug]
    assert list(results.findings) == [signature]
    assert getattr(results, kind) == results.findings[signature]
    (finding,) = (json.loads(path.read_text()) for path in tmp_path.glob("*/finding.json"))
    assert (finding["kind"], finding["signature"]) == (kind, signature)
    if kind != "memory":
        # Every input without an X passes, and the input of the finding is now reduced to one X.
        assert results.accepted == count - results.findings[signature] > 0
        folder = tmp_path / f"{bug}-{finding['number']}"
        assert finding["replay"] == f"scripts/fuzz --replay {folder}"
        assert (folder / "input" / "input").read_bytes() == b"X"
        assert replay(folder, _QUICK).kind == kind


def test_an_input_that_needs_too_much_memory_is_stopped(tmp_path: Path) -> None:
    # Memory is measured while an input runs, so the hanging inputs exceed this limit.
    campaign = campaign_of(tmp_path, planted("hang"), limits=Limits(resident_bytes=1 << 20))
    campaign.run(8, 60.0)
    results = campaign.results["hang"]
    assert list(results.findings) == ["too much memory"]
    assert results.memory == results.findings["too much memory"] >= 1
    assert results.hang == 0


@pytest.mark.long
def test_a_campaign_resumes_and_drops_findings_that_are_fixed(tmp_path: Path) -> None:
    whole = campaign_of(tmp_path / "whole", planted("traceback"))
    whole.run(20, 60.0)
    for count in (7, 20):
        resumed = campaign_of(tmp_path / "parts", planted("traceback"))
        resumed.run(count, 60.0)
        assert resumed.results["traceback"].next_number == count
    assert resumed.results["traceback"].findings == whole.results["traceback"].findings
    found = resumed.results["traceback"].traceback
    (input_file,) = (tmp_path / "parts").glob("*/input/input")
    resumed.recheck()
    assert resumed.results["traceback"].traceback == found
    input_file.write_bytes(b"a")  # an input that no longer fails stands for a bug that was fixed
    resumed.recheck()
    results = resumed.results["traceback"]
    assert (results.accepted, results.traceback, results.findings) == (20, 0, {})


@pytest.mark.long
def test_inputs_depend_on_nothing_but_the_seed_and_the_number() -> None:
    script = """if True:
        import hashlib
        from pkgutil import resolve_name
        from scripts.fuzzing.__main__ import SUBJECTS
        from scripts.fuzzing.worker import random_for
        for subject in SUBJECTS:
            make = resolve_name(subject.place).make
            files = [sorted(make(random_for(1, subject.name, number)).items()) for number in range(5)]
            print(hashlib.sha256(repr(files).encode()).hexdigest())
    """
    command = [sys.executable, "-c", script]
    first, second = (subprocess.check_output(command) for _ in range(2))
    assert first == second
    assert random_for(1, "chat", 2).random() != random_for(1, "chat", 3).random()


def test_minimising_removes_files_and_bytes_that_do_not_matter() -> None:
    def fails(files: Files) -> bool:
        return b"k" in files.get("a", b"") and b"z" in files["a"]

    files = {"a": b"abc" * 50 + b"k" + b"abc" * 50 + b"z", "b": b"other"}
    assert minimise(files, fails, 10.0) == {"a": b"kz"}
    assert minimise(files, fails, 0.0) == files


@pytest.mark.long
@pytest.mark.parametrize("inputs", [250, pytest.param(1500, marks=pytest.mark.long)])
def test_a_share_of_the_inputs_is_handled_without_findings(tmp_path: Path, inputs: int) -> None:
    slow = ("gguf-plan", "gguf-load", "mlx-load", "template")
    subjects = [subject for subject in SUBJECTS if subject.name not in slow]
    campaign = campaign_of(tmp_path, *subjects, seed=1)
    campaign.run(inputs, 20.0)
    found = {name: results.findings for name, results in campaign.results.items() if results.findings}
    assert not found, found
    assert "| chat |" in table(campaign)
