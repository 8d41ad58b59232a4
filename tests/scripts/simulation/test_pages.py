"""docs/policy.md and docs/workers-simulation.md show the results of the simulations."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from scripts.simulate_workers import KINDS, NETWORKS, TARGETS, machines_needed, speeds, tables
from scripts.simulation import MACHINES
from scripts.simulation.cases import CASES, row

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "policy.md").read_text(encoding="utf-8")
# What is cheap to say again; the rest comes from the same run.
SHOWN = ("0.85", "0.85, after 3 replies", "recorded, T 0.8")


def _numbers(cells: tuple[str, ...]) -> list[float]:
    return [float(cell.removesuffix("%")) for cell in cells if cell]


def _shown(machine: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of a machine's table."""
    table = PAGE.split(f"**{machine}**")[1].split("\n\n")[1].partition("<!--")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()[2:]]
    return {first: tuple(rest) for first, *rest in rows}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_page_lists_every_machine_and_reply(machine: object) -> None:
    names = [case.name for case in CASES]
    assert [list(_shown(one.name)) for one in MACHINES if one is machine] == [names]


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SHOWN], ids=lambda case: case.name)
def test_page_shows_the_current_numbers(case: object) -> None:
    machine = MACHINES[0]
    (found,) = [row(machine, one) for one in CASES if one is case]
    # Another processor may round a cost differently, which can change a decision.
    assert _numbers(_shown(machine.name)[found[0]]) == pytest.approx(
        _numbers(found[1:]), rel=0.02, abs=0.3
    ), "scripts/simulate_policy.py --write"


def test_workers_page_shows_the_current_tables() -> None:
    assert tables() in (DOCS / "workers-simulation.md").read_text(encoding="utf-8"), (
        "scripts/simulate_workers.py --write"
    )


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
