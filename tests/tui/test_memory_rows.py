"""The rows of /memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec import MemoryPlan, MemoryUse, PrefixCacheUsage
from edgespec.memory.budget import Budget
from edgespec.memory.plan import Decision, Item
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.texts import memory_rows, show_rows
from tests.tui.scripted import METHOD, ScriptedRuntime, as_runtime

_ITEMS = (Item("target", "target weights", "weights", 2 * 10**9),)


def _rows(budget: Budget, *decisions: Decision) -> dict[str, str]:
    plan = MemoryPlan(budget, 4096, "f16", _ITEMS, decisions)
    return dict(memory_rows(MemoryUse(1, 2, 3, PrefixCacheUsage(), plan)))


def test_plan_of_one_memory_pool() -> None:
    rows = _rows(Budget(3 * 10**9, "--memory"), Decision("no draft model", "it is short", 5))
    assert rows["planned"] == "up to 1.9 GiB, without cached chats"
    assert rows["memory limit"] == (
        "2.8 GiB: the limit that you have set; to change it, type /set memory and a size"
    )
    assert rows["to save memory"] == "no draft model: it is short"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (
            "--memory, more than this machine's 2.0 GiB",
            "the limit that you have set, more than this machine's 2.0 GiB; to change it",
        ),
        (
            "the memory limit of this container, which is below --memory",
            "the memory limit of this container, which is below the limit that you have set",
        ),
        ("the memory available on this machine", "the memory available on this machine"),
    ],
)
def test_the_memory_limit_says_who_has_set_it(source: str, shown: str) -> None:
    limit = _rows(Budget(3 * 10**9, source))["memory limit"]
    assert limit.removesuffix(", type /set memory and a size") == f"2.8 GiB: {shown}"


def test_the_memory_in_use_and_the_plan_name_the_cached_chats() -> None:
    runtime = ScriptedRuntime()
    plan = MemoryPlan(Budget(3 * 10**9, "here"), 4096, "f16", _ITEMS, prefix_cache_bytes=10**9)

    def memory() -> str:
        return dict(show_rows(as_runtime(runtime), OpenChat(), METHOD, None))["memory"]

    assert memory() == "117 MiB in use, of which 42.9 MiB for cached chats"
    runtime.plan = plan
    assert memory() == (
        "117 MiB in use, of which 42.9 MiB for cached chats; planned: up to 1.9 GiB, up to 954 MiB more for"
        " cached chats"
    )
    runtime.plan = replace(plan, budget=Budget(3 * 10**9, "here", gpu_bytes=8 * 10**9), prefix_cache_bytes=0)
    assert memory().endswith("planned: up to 1.9 GiB, up to 0 B on the GPU")


def test_plan_with_gpu_memory() -> None:
    rows = _rows(Budget(3 * 10**9, "here", gpu_bytes=8 * 10**9))
    assert rows["planned on the GPU"] == "up to 0 B of 7.5 GiB"
    assert "to save memory" not in rows


def test_memory_rows_without_a_plan() -> None:
    rows = dict(memory_rows(MemoryUse(1, 2, 3, PrefixCacheUsage())))
    assert "planned" not in rows
    assert rows["cache hits"] == "none yet"


def test_free_and_reclaimed_memory_are_shown() -> None:
    use = MemoryUse(
        1,
        2,
        3,
        PrefixCacheUsage(),
        context_tokens=2048,
        max_context_tokens=8192,
        available_bytes=400 * 2**20,
        reclaimed_bytes=96 * 2**20,
        last_reclaim="little memory was free: gave back 96.0 MiB of kept texts",
    )
    rows = dict(memory_rows(use))
    assert rows["context"] == "8,192 tokens; memory for 2,048 so far"
    assert rows["cached chats"] == "0 prompts, 0 B of at most 0 B"
    assert rows["free"] == "400 MiB on this machine"
    assert rows["freed"].startswith("96.0 MiB so far, for other programs; last: little")
    assert not {"context", "free", "freed"} & set(dict(memory_rows(MemoryUse(1, 2, 3, PrefixCacheUsage()))))


def test_context_of_full_size_shows_one_number() -> None:
    use = MemoryUse(1, 2, 3, PrefixCacheUsage(), context_tokens=1024, max_context_tokens=1024)
    assert dict(memory_rows(use))["context"] == "1,024 tokens"
