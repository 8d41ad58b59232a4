"""docs/workers-simulation.md shows the results of the simulation."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from scripts.simulate_workers import KINDS, NETWORKS, TARGETS, machines_needed, speeds, tables

PAGE = Path(__file__).parents[3] / "docs" / "workers-simulation.md"


def test_the_page_shows_the_current_tables() -> None:
    assert tables() in PAGE.read_text(encoding="utf-8"), "scripts/simulate_workers.py --write"


@pytest.mark.parametrize("machine", KINDS, ids=lambda machine: machine.name)
def test_more_machines_and_slower_networks_are_not_faster(machine: object) -> None:
    for kind in (each for each in KINDS if each is machine):
        for target in TARGETS:
            plain = [[speeds(kind, target, count, each)[0] for each in NETWORKS] for count in (1, 2, 4, 8)]
            assert all(
                slower <= faster
                for one, two in itertools.pairwise(plain)
                for faster, slower in zip(one, two, strict=True)
            )
            assert len(set(plain[0])) == 1
            assert min(plain[-1]) == plain[-1][2], "Wi-Fi is the slowest network"


def test_a_model_needs_more_machines_with_less_memory() -> None:
    needed = [machines_needed(machine, TARGETS[2]) for machine in KINDS]
    assert needed == [2, 1, 3, 1]
