"""The order of replies cancels drift, and the bundled prompts are as documented."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgespec
from edgespec import Message
from edgespec.bench.runs import BenchPlan, MethodConfig, bench_prompts, method_configs
from edgespec.errors import OptionError
from edgespec.losslessness.cases import Prompt, prompt_tokens, read_prompts
from tests.raising import raises


def prompts(*categories: str) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(f"{category}-{i}", (Message("user", "abc"),), category)
        for i, category in enumerate(categories)
    )


WAYS = method_configs(["auto", "suffix", "ngram", "model"])


@pytest.mark.long
@given(st.integers(1, 5), st.integers(2, 5), st.integers(1, 3), st.integers(1, 3))
def test_of_two_repeats_one_runs_backwards(count: int, configs: int, temperatures: int, pairs: int) -> None:
    plan = BenchPlan(
        prompts(*"abcdefg"[:count]),
        WAYS[:configs],
        temperatures=tuple(float(t) for t in range(temperatures)),
        repeats=2 * pairs,
    )
    places: dict[tuple[object, ...], list[int]] = defaultdict(list)
    rounds = list(plan.rounds())
    for each in rounds:
        assert Counter(each.configs) == Counter(plan.configs)
        for place, config in enumerate(each.configs):
            places[each.prompt.name, each.temperature, each.repeat // 2, config].append(place)
    # The average position over every two repeats is the same, so gradual changes within a round cancel.
    assert all(sum(both) == configs - 1 for both in places.values())
    assert sum(len(each.configs) for each in rounds) == plan.replies


def test_every_way_comes_first_equally_often() -> None:
    plan = BenchPlan(prompts(*"abcdefghij"), WAYS, repeats=1)
    assert Counter(each.configs[0] for each in plan.rounds()) == dict.fromkeys(WAYS, 2)


def test_a_run_that_ends_early_has_every_category() -> None:
    plan = BenchPlan(prompts("a", "a", "b", "a", "c", "b"), WAYS, repeats=1)
    assert [each.prompt.category for each in plan.rounds()] == ["a", "b", "c", "a", "b", "a"]


def test_draft_lengths_are_for_those_that_take_one() -> None:
    assert method_configs(["auto", "model", "none", "model"], [2, 4]) == (
        MethodConfig("none"),
        MethodConfig("auto"),
        MethodConfig("model", 2),
        MethodConfig("model", 4),
    )
    assert [config.name for config in method_configs(["model"], [2])] == ["none", "model k=2"]
    assert [config.name for config in method_configs(["auto"], control=True)] == [
        "none",
        "none again",
        "auto",
    ]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"prompts": ()}, "measure"),
        ({"prompts": (*prompts("a"), *prompts("a"))}, "prompts"),
        ({"configs": (MethodConfig("auto"),)}, "measure"),
        ({"configs": (*WAYS, WAYS[1])}, "methods"),
        ({"temperatures": ()}, "measure"),
        ({"temperatures": (0.7, 0.0, 0.7)}, "temperatures"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {"prompts": prompts("a"), "configs": WAYS}
    BenchPlan(**good)
    with raises(OptionError, says):
        BenchPlan(**good | wrong)


def test_the_prompts_that_come_along() -> None:
    mine = bench_prompts()
    kinds = ("chat", "code", "edit", "summarise", "extract", "maths", "translate", "story")
    assert Counter(prompt.category for prompt in mine) == dict.fromkeys(kinds, 3)
    assert len({prompt.name for prompt in mine}) == 24
    by_kind = {kind: [len(p.messages[-1].content) for p in mine if p.category == kind] for kind in kinds}
    assert all(min(by_kind[kind]) > 400 for kind in ("edit", "summarise", "extract"))
    with edgespec.load("demo", "none", threads=1) as runtime:
        assert max(len(prompt_tokens(runtime, prompt)) for prompt in mine) + 64 < runtime.context_tokens


def test_where_the_category_of_a_prompt_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "a-b-1", "prompt": "x"},
        {"id": "a-1", "prompt": "x", "skill": "s"},
        {"id": "a-2", "prompt": "x", "skill": "s", "category": "c"},
        {"prompt": "x"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [prompt.category for prompt in read_prompts(file)] == ["a-b", "s", "c", "other"]
    assert {prompt.category for prompt in read_prompts()} >= {"howto", "code", "edit"}
