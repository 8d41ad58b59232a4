"""Tests of the comparison at scale: shards resume, and violations and methods without drafts are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.losslessness import VerifyReport
from edgespec.losslessness.report import MethodResult
from edgespec.method_names import DRAFTER_NAMES, HEADS
from scripts.proving import shards
from scripts.proving.__main__ import is_proved, table
from scripts.proving.shards import CONFIGURATIONS, TEMPERATURES, Configuration, Shards, prompts_of

SMALL = Configuration("llama.cpp", "demo", "demo-draft", ("model", "ngram"))


@pytest.fixture(autouse=True)
def short_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MAX_TOKENS", 12)
    monkeypatch.setattr(shards, "_PROMPTS_PER_BLOCK", 2)


def run(path: Path, tokens: int) -> Shards:
    found = Shards(path, [SMALL], report=lambda _: None)
    found.run(tokens)
    return found


def test_finished_shards_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "shards.jsonl"
    first = run(path, 150)
    assert first.tokens >= 150
    assert is_proved(first.lines)
    assert {line["temperature"] for line in first.lines} == set(TEMPERATURES)
    written = path.read_text("utf-8")
    assert run(path, 150).lines == first.lines
    # A program that is killed while it writes leaves part of a line. Only that shard runs again.
    path.write_text(written[:-30], "utf-8")
    again = run(path, first.tokens)
    assert path.read_text("utf-8").startswith(written[:-30] + "\n")
    same = {"backend", "method", "temperature", "block", "replies", "tokens", "identical"}
    assert [{key: line[key] for key in same} for line in again.lines] == [
        {key: line[key] for key in same} for line in first.lines
    ]


def test_a_violation_ends_the_run_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(*_: Any, methods: list[str], **__: Any) -> VerifyReport:
        wrong = MethodResult(2, replies=2, tokens=24, drafted_tokens=9, identical=1, violations=1)
        return VerifyReport("demo", None, "invariant", dict.fromkeys(methods, wrong))

    monkeypatch.setattr(shards, "verify", verify)
    found = run(tmp_path / "shards.jsonl", 10_000)
    assert [line["violations"] for line in found.lines] == [1]
    assert not is_proved(found.lines)
    assert "| llama.cpp | `model` | 0 | 24 | 2 | 1 | 0 | 1 |" in table(found.lines)
    assert "| all |  |  | 24 | 2 | 1 | 0 | 1 |" in table(found.lines)


def test_a_method_that_drafts_nothing_is_not_proved() -> None:
    line = {"backend": "MLX", "method": "model", "drafted_tokens": 0, "violations": 0}
    assert not is_proved([line])
    assert is_proved([line | {"drafted_tokens": 1}])


def test_the_prompts_of_blocks_differ() -> None:
    texts = [json.dumps([str(prompt.messages) for prompt in prompts_of(block)]) for block in range(50)]
    assert len(set(texts)) == 50
    assert prompts_of(3) == prompts_of(3)
    backends = [configuration.backend for configuration in CONFIGURATIONS]
    assert len(set(backends)) == len(backends)


def test_every_drafter_is_proved_and_documented() -> None:
    root = Path(__file__).parents[2]
    methods = {name for each in CONFIGURATIONS for method in each.methods for name in method.split("+")}
    for name in DRAFTER_NAMES:
        # The parity test proves heads with random weights, and constraints. The demo models have no heads.
        assert (name in methods) == (name not in (*HEADS, "grammar"))
        for page in ("README.md", "docs/methods.md"):
            assert f"`{name}`" in (root / page).read_text("utf-8"), page
