"""The comparison at scale: shards resume, and wrong replies and unproven methods are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.losslessness.cases import Prompt
from edgespec.losslessness.report import Divergence, MethodResult, VerifyReport
from edgespec.options.methods import head_names, method_names
from scripts.proving import shards
from scripts.proving.configurations import CONFIGURATIONS, GROUPS, Configuration
from scripts.proving.prompts import KINDS, draw_prompts
from scripts.proving.shards import TEMPERATURES, Block, Shards
from scripts.proving.table import is_proved, summary, table

SMALL = Configuration("llama.cpp", "demo model Q8_0", "demo", "demo-draft", ("model", "ngram"), prompts=2)
METHODS = {(each.backend, each.model, method) for each in CONFIGURATIONS for method in each.methods}


class Bytes:
    """A vocabulary in which every byte is a token."""

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token])


@pytest.fixture(autouse=True)
def short_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MAX_TOKENS", 12)
    monkeypatch.setattr("scripts.proving.prompts._LONG_SHARE", 0.0)


def run(path: Path, tokens: int, configuration: Configuration = SMALL) -> Shards:
    found = Shards(path, [configuration], report=lambda _: None)
    found.run(tokens)
    return found


@pytest.mark.long
def test_finished_shards_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "shards.jsonl"
    first = run(path, 200)
    assert first.tokens >= 200
    assert is_proved(first.lines)
    assert {line["temperature"] for line in first.lines} == set(TEMPERATURES)
    assert {line["drafts"] for line in first.lines} == {"chains", "trees"}
    written = path.read_text("utf-8")
    assert len(run(path, 200).lines) == len(first.lines)
    assert path.read_text("utf-8") == written
    # A program killed while writing leaves an incomplete line. Only that shard runs again.
    path.write_text(written[:-30], "utf-8")
    again = run(path, first.tokens)
    assert path.read_text("utf-8").startswith(written[:-30] + "\n")
    same = {"backend", "model", "method", "temperature", "block", "replies", "tokens", "identical"}
    assert [{key: line[key] for key in same} for line in again.lines] == [
        {key: line[key] for key in same} for line in first.lines
    ]


@pytest.mark.long
def test_a_method_with_a_grammar_gets_prompts_with_a_schema(tmp_path: Path) -> None:
    configuration = Configuration("llama.cpp", "demo model Q8_0", "demo", "none", ("grammar",), prompts=1)
    (line,) = run(tmp_path / "shards.jsonl", 1, configuration).lines
    assert line["drafted_tokens"]
    assert is_proved([line])


def replace_verify(monkeypatch: pytest.MonkeyPatch, verdict: str, *, exact: bool) -> None:
    def verify(
        _: Any, prompts: list[Prompt], *, methods: list[str], temperatures: Any, **__: Any
    ) -> VerifyReport:
        divergence = Divergence(prompts[0].name, temperatures[0], 4, 7, 1, 2, verdict)  # type: ignore[arg-type]
        count = {"faults" if verdict == "fault" else "rounding": 1}
        wrong = MethodResult(2, replies=2, tokens=24, drafted_tokens=9, identical=1, **count)  # type: ignore[arg-type]
        wrong.divergences.append(divergence)
        return VerifyReport("demo", None, "invariant", dict.fromkeys(methods, wrong), exact=exact)

    monkeypatch.setattr(shards, "verify", verify)


@pytest.mark.long
@pytest.mark.parametrize(("verdict", "exact"), [("fault", False), ("rounding", True)])
def test_a_wrong_reply_ends_the_run_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, exact: bool
) -> None:
    replace_verify(monkeypatch, verdict, exact=exact)
    reported: list[str] = []
    found = Shards(tmp_path / "shards.jsonl", [SMALL], reported.append)
    found.run(10_000)
    assert [line["method"] for line in found.lines] == ["model", "ngram"]
    assert not is_proved(found.lines)
    counts = "0 | 2" if verdict == "fault" else "2 | 0"
    assert f"| all |  |  | 48 | 18 | 0 | 4 | 2 | {counts} |" in table(found.lines)
    assert reported[0].startswith(f"{verdict}: llama.cpp, demo model Q8_0, model, block 0, prompt ")
    assert "position 7, token 2 instead of 1" in reported[0]
    # The text of the prompt is saved, so the block can run again.
    assert list(found.lines[0]["messages"]) == [found.lines[0]["divergences"][0]["prompt"]]
    found.drop_wrong()
    assert (found.lines, (tmp_path / "shards.jsonl").read_text()) == ([], "")


def test_prompts_can_have_a_chosen_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_verify(monkeypatch, "rounding", exact=False)
    found = Shards(tmp_path / "shards.jsonl", [SMALL], lambda _: None, lengths=(30, 40))
    found.run(1)
    (tokens,) = (int(name.split("-")[1]) for name in found.lines[0]["prompt_tokens"])
    assert 30 <= tokens <= 40


def test_methods_and_shapes_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_verify(monkeypatch, "rounding", exact=False)
    path = tmp_path / "shards.jsonl"
    found = Shards(path, [SMALL], lambda _: None, methods=("auto", "ngram"), drafts="trees")
    found.run(1)
    (line,) = found.lines
    assert (line["method"], line["drafts"]) == ("ngram", "trees")


def test_chosen_methods_take_turns_in_blocks() -> None:
    configuration = next(each for each in CONFIGURATIONS if len(each.methods) > each.methods_per_block)
    assert set(configuration.block_methods(3, ("auto", "suffix"))) == {"auto", "suffix"}
    assert configuration.block_methods(3, ("none",)) == []
    chosen = configuration.methods[:-1]
    blocks = [configuration.block_methods(number, chosen) for number in range(len(chosen))]
    assert {len(set(methods)) for methods in blocks} == {configuration.methods_per_block}
    assert {method for methods in blocks for method in methods} == set(chosen)


def test_rounding_without_a_promise_is_counted_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_verify(monkeypatch, "rounding", exact=False)
    found = run(tmp_path / "shards.jsonl", 100)
    assert found.tokens >= 100
    assert is_proved(found.lines)


def test_a_method_that_drafts_nothing_is_not_proved() -> None:
    line = {"backend": "MLX", "model": "a", "method": "model", "drafted_tokens": 0}
    line |= {"faults": 0, "rounding": 0, "exact": True}
    assert not is_proved([line])
    assert is_proved([line | {"drafted_tokens": 1}])
    # If the passes of one model are too narrow, another one proves the method.
    assert is_proved([line, line | {"model": "b", "drafted_tokens": 1}])
    assert not is_proved([line, line | {"backend": "llama.cpp", "drafted_tokens": 1}])


def test_the_table_has_one_row_for_each_model_and_source_of_drafts() -> None:
    line: dict[str, Any] = dict.fromkeys(
        ("tokens", "drafted_tokens", "accepted_tokens", "replies", "identical", "rounding", "faults"), 1000
    )
    lines = [
        line | {"backend": backend, "model": model, "method": method}
        for backend, model, method in sorted(METHODS)
    ]
    rows = table(lines).splitlines()
    assert len(rows) < 50
    assert rows[2].startswith("| llama.cpp | SmolLM2 Q4_K_M | draft model | 3,000 | 3,000 |")
    assert rows[-1].startswith(f"| all |  |  | {len(lines):,},000 |")


def test_the_summary_counts_temperatures_shapes_and_prompts() -> None:
    line = {"backend": "MLX", "model": "a", "method": "model", "block": 0, "temperature": 0.8, "tokens": 1200}
    line |= {
        "drafted_tokens": 0,
        "drafts": "trees",
        "prompt_tokens": {"story-7": 9, "order-1": 33},
        "largest_difference": 0.5,
    }
    text = summary([line, line | {"method": "ngram", "temperature": 0.0}])
    assert "Tokens by temperature: temperature 0 1,200, temperature 0.8 1,200." in text
    assert "By shape of the drafts: trees 2,400." in text
    assert "The 2 prompts have 9 to 33 tokens: JSON 1, story 1." in text
    assert "prove nothing: `model` for a (MLX), `ngram` for a (MLX)." in text
    assert "The largest difference by rounding is 0.5 logits." in text
    assert summary([])


def test_prompts_have_all_kinds_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.proving.prompts._LONG_SHARE", 1.0)
    drawn = [draw_prompts(f"seed {block}", len(KINDS), Bytes(), 3000) for block in range(40)]
    assert drawn[3] == draw_prompts("seed 3", len(KINDS), Bytes(), 3000)
    assert len({json.dumps([str(prompt.messages) for prompt in prompts]) for prompts in drawn}) == 40
    for prompts in drawn:
        assert {prompt.category for prompt in prompts} == set(KINDS)
        assert all(message.content.strip() for prompt in prompts for message in prompt.messages)
    lengths = [len(prompt.messages[-1].content.encode()) for prompts in drawn for prompt in prompts]
    assert min(lengths) <= 3
    assert max(lengths) > 2000
    limited = draw_prompts("seed", len(KINDS), Bytes(), 50)
    assert max(len(prompt.messages[-1].content.encode()) for prompt in limited) <= 50


def test_the_blocks_of_a_configuration_have_all_settings_and_methods() -> None:
    for each in CONFIGURATIONS:
        shapes = ("chains", "trees") if each.has_trees else ("chains",)
        expected = {(temperature, drafts) for temperature in TEMPERATURES for drafts in shapes}
        blocks = [Block.of(each, number) for number in range(60)]
        assert {(block.temperature, block.drafts) for block in blocks[:6]} == expected
        for method in each.methods:
            with_method = [block for block in blocks if method in each.block_methods(block.number)]
            assert {(block.temperature, block.drafts) for block in with_method} == expected


def test_configurations_share_no_method() -> None:
    assert len(METHODS) == sum(len(each.methods) for each in CONFIGURATIONS)
    assert len({each.name for each in CONFIGURATIONS}) == len(CONFIGURATIONS)
    grouped = [method for methods in GROUPS.values() for method in methods]
    assert len(set(grouped)) == len(grouped)
    assert {method for _, _, method in METHODS} == set(grouped)


def test_every_drafter_is_proved_and_documented() -> None:
    root = Path(__file__).parents[2]
    methods = {name for _, _, method in METHODS for name in method.split("+")}
    for name in method_names():
        # scripts/proving/heads.py proves heads.
        assert (name in methods) == (name not in head_names())
        for page in ("README.md", "docs/methods.md"):
            assert f"`{name}`" in (root / page).read_text("utf-8"), page
