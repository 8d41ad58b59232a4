"""/memory tells the plan: what was planned of what there was, and what was given up."""

from __future__ import annotations

from edgespec import KeptUse, MemoryPlan, MemoryUse
from edgespec.memory import Budget, Decision, Item
from edgespec.tui.texts import memory_rows

_ITEMS = (
    Item("target", "target weights", "weights", 2 * 10**9),
    Item("shared", "kept texts, at most", "kept", 5 * 10**8),
)


def _rows(budget: Budget, *decisions: Decision) -> dict[str, str]:
    plan = MemoryPlan(budget, 4096, "f16", _ITEMS, decisions)
    return dict(memory_rows(MemoryUse(1, 2, 3, KeptUse(), plan)))


def test_one_memory() -> None:
    rows = _rows(Budget(3 * 10**9, "--memory"), Decision("no draft model", "it is short", 5))
    assert rows["planned"] == "1.9 GiB of 2.8 GiB"
    assert rows["budget"] == "--memory"
    assert rows["given up"] == "no draft model: it is short"


def test_cards_beside_it() -> None:
    rows = _rows(Budget(3 * 10**9, "here", gpu_bytes=8 * 10**9))
    assert rows["on cards"] == "0 B of 7.5 GiB"
    assert "given up" not in rows


def test_without_a_plan() -> None:
    assert "planned" not in dict(memory_rows(MemoryUse(1, 2, 3, KeptUse())))
