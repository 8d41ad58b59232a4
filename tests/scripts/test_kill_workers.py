"""`scripts/kill_workers.py` loses workers and finds no error."""

from __future__ import annotations

import pytest

from tests.scripts.running import run_script


@pytest.mark.long
def test_a_lost_worker() -> None:
    results = run_script("kill_workers.py", "--losses", "1", "--seed", "1")
    assert results["errors"] == []
    assert sum(results["outcomes"].values()) == 1


@pytest.mark.long
def test_many_lost_workers() -> None:
    assert run_script("kill_workers.py", "--losses", "200")["errors"] == []
