"""docs/policy.md shows the results of the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.simulation import MACHINES
from scripts.simulation.cases import CASES, row

PAGE = (Path(__file__).parents[3] / "docs" / "policy.md").read_text(encoding="utf-8")
# Rows that are quick to recompute. The others come from the same run.
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
