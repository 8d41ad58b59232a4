"""The demo models' heads draft well, and change no reply."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.losslessness.cases import read_prompts
from edgespec.store.catalogue import models_folder
from edgespec.store.heads import head_options
from edgespec.store.reference import resolve
from tests.saved_facts import saved_facts

HEADS = {"demo": "demo-head", "demo-mlx": "demo-mlx-head"}


@pytest.mark.long
@pytest.mark.parametrize("every", [16, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("target", HEADS)
def test_the_head_of_a_demo_model_drafts_well_and_changes_no_reply(target: str, every: int) -> None:
    questions = [each.messages[0].content for each in read_prompts(None) if len(each.messages) == 1]
    with edgespec.load(target, "none", method="eagle", head=HEADS[target], context=1024) as runtime:
        tokens = passes = 0
        for question in questions[::every]:
            asked: dict[str, Any] = {"max_tokens": 48, "temperature": 0.0, "draft_length": 4}
            reply = runtime.generate(question, method="eagle", **asked)
            assert reply.tokens == runtime.generate(question, method="none", **asked).tokens
            tokens += reply.stats.generated_tokens
            passes += reply.stats.target_passes
    assert tokens / passes > 2.5


@pytest.mark.parametrize("target", HEADS)
def test_the_head_of_a_demo_model_is_listed_but_must_be_named(target: str) -> None:
    (option,) = head_options(resolve(target))
    assert option.name == HEADS[target]
    assert option.head is not None
    assert not option.is_usable
    assert option.must_be_named
    assert not option.problem


@pytest.mark.long
def test_the_statistics_of_each_head_are_saved_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    other = tmp_path / "other.gguf"
    shutil.copyfile(models_folder() / "demo-head-q8_0.gguf", other)
    heads: list[str | Path] = ["demo-head", "demo-head", other]
    for count, head in enumerate(heads):
        with edgespec.load("demo", "none", head=head, context=256) as runtime:
            runtime.generate("How do I list files?", max_tokens=4)
        assert len(saved_facts("drafting")) == max(1, count)
