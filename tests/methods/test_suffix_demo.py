"""Suffix decoding with the embedded target emits several tokens per pass for copies and edits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import Reply, Runtime
from edgespec.backends import llamacpp
from edgespec.methods.suffix.corpus import suffix_drafter
from edgespec.methods.suffix.drafter import SuffixDrafter
from edgespec.model.base import LanguageModel, LoadOptions
from tests.cases import first
from tests.tables import with_drafter

COPY = "Repeat this command list exactly:\n\n```sh\ntar -xzf archive.tar.gz\ntar -czf archive.tar.gz dir\n```"
EDIT = (
    "In this code, replace `delete` with `text`:\n\n```python\ndef delete(self, *items):\n"
    '    """Delete all specified items."""\n    for item in items:\n        self.remove(item)\n```'
)
HOWTO = "How do I list files by size?"


@pytest.fixture(scope="module")
def target(demo_target: Path) -> Iterator[LanguageModel]:
    model = llamacpp.load(str(demo_target), "demo", LoadOptions(context_tokens=1024))
    yield model
    model.close()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


def drafting(target: LanguageModel, **options: Any) -> tuple[Runtime, SuffixDrafter]:
    drafter, _ = suffix_drafter(target.vocabulary, **options)
    return with_drafter(target, drafter), drafter


def ask(runtime: Runtime, prompt: str, method: str = "suffix", **options: Any) -> Reply:
    options = {"temperature": 0.0, "seed": 3, "max_tokens": 48} | options
    return runtime.generate(prompt, method=method, draft_length=8, **options)


def tokens_per_pass(reply: Reply) -> float:
    return reply.stats.tokens_per_target_pass or 0.0


@pytest.mark.long
@pytest.mark.parametrize("prompt", [COPY, EDIT], ids=["copy", "edit"])
def test_copies_and_edits_emit_several_tokens_per_pass(target: LanguageModel, prompt: str) -> None:
    runtime, _ = drafting(target)
    plain, got = ask(runtime, prompt, "none"), ask(runtime, prompt)
    assert (got.tokens, got.finish_reason) == (plain.tokens, plain.finish_reason)
    assert tokens_per_pass(plain) == 1.0
    assert tokens_per_pass(got) > 2.5


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 1.2]))
@pytest.mark.parametrize("prompt", [COPY, EDIT, HOWTO], ids=["copy", "edit", "howto"])
def test_sampled_replies_are_identical(target: LanguageModel, prompt: str, temperature: float) -> None:
    runtime, _ = drafting(target)
    for seed in (1, 2):
        plain = ask(runtime, prompt, "none", temperature=temperature, seed=seed)
        got = ask(runtime, prompt, temperature=temperature, seed=seed)
        assert (got.tokens, got.finish_reason) == (plain.tokens, plain.finish_reason)


def test_greedy_replies_are_identical_in_rejection_mode(target: LanguageModel) -> None:
    runtime, _ = drafting(target)
    assert ask(runtime, EDIT, acceptance="rejection").tokens == ask(runtime, EDIT, "none").tokens


@pytest.mark.usefixtures("elsewhere")
def test_a_saved_reply_is_drafted_from(target: LanguageModel) -> None:
    first_runtime, first = drafting(target, remember=True)
    before = ask(first_runtime, HOWTO)
    first.close()
    runtime, _ = drafting(target, remember=True)
    after = ask(runtime, HOWTO)
    assert after.tokens == before.tokens
    assert tokens_per_pass(after) > 2 * tokens_per_pass(before)


@pytest.mark.long
@pytest.mark.usefixtures("elsewhere")
def test_a_corpus_is_drafted_from(target: LanguageModel, tmp_path: Path) -> None:
    runtime, _ = drafting(target)
    before = ask(runtime, HOWTO)
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "notes.md").write_text(f"# Notes\n\n{before.text}\n")
    with_notes, _ = drafting(target, corpus=folder)
    after = ask(with_notes, HOWTO)
    assert after.tokens == before.tokens
    assert tokens_per_pass(after) > 1.5 * tokens_per_pass(before)
