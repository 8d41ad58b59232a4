"""Low-bit drafts on the target's own KV cache leave replies identical, and are often accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import Runtime
from edgespec.backends import llamacpp
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.base import Drafter
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.ngram.drafter import NgramDrafter
from edgespec.model.base import LanguageModel, LoadOptions, LowBit
from tests.api.questions import HOWTO, REPEATS, equal
from tests.cases import first
from tests.tables import with_drafter

LONG = "Tell me about `tar`, `find`, `du`, `sort` and what else lists files by size. " * 6


@pytest.fixture(scope="module")
def target(demo_target: Path) -> Iterator[LanguageModel]:
    loaded = llamacpp.load(str(demo_target), "demo", LoadOptions(context_tokens=768))
    yield loaded
    loaded.close()


def low_bit(target: LanguageModel, copy: Path, how: str) -> Drafter:
    """Return a drafter of this kind."""
    window = int(how.split()[1]) if "window" in how else None
    view = target.self_draft(LowBit(str(copy), 4, window))
    branches = (3, 2) if how == "tree" else ()
    drafter = ModelDrafter(view, target.facts.vocab_size, branches=branches, name="lowbit")
    return CombinedDrafter([drafter, NgramDrafter()]) if "ngram" in how else drafter


@pytest.mark.long
@pytest.mark.parametrize("how", first(["chain", "tree", "window 16", "window 64", "with ngram"], 3))
@pytest.mark.parametrize("temperatures", [(0.0, 0.8), pytest.param((1.2,), marks=pytest.mark.long)], ids=str)
def test_replies_are_identical(
    target: LanguageModel, low_bit_copy: Path, how: str, temperatures: tuple[float, ...]
) -> None:
    drafter = low_bit(target, low_bit_copy, how)
    runtime = with_drafter(target, drafter)
    for prompt in (HOWTO, REPEATS, LONG):
        for temperature in temperatures:
            options: dict[str, Any] = {"seed": 5, "max_tokens": 16, "temperature": temperature}
            plain = runtime.generate(prompt, method="none", **options)
            for draft_length in (1, 4):
                reply = runtime.generate(prompt, method="lowbit", draft_length=draft_length, **options)
                equal(reply, plain)
                assert reply.stats.drafted_tokens > 0
            if temperature == 0.0:
                greedy = {**options, "acceptance": "rejection"}
                equal(runtime.generate(prompt, method="lowbit", draft_length=4, **greedy), plain)
    drafter.close()


@pytest.mark.long
@pytest.mark.parametrize("kv_type", first(["q8_0", "q8_0/f16"]))
def test_replies_are_identical_with_a_quantised_cache(
    demo_target: Path, low_bit_copy: Path, kv_type: str
) -> None:
    target = llamacpp.load(str(demo_target), "demo", LoadOptions(context_tokens=512, kv_type=kv_type))
    for how in ("chain", "window 32"):
        drafter = low_bit(target, low_bit_copy, how)
        runtime = with_drafter(target, drafter)
        options: dict[str, Any] = {"seed": 5, "max_tokens": 40, "temperature": 0.8}
        plain = runtime.generate(HOWTO, method="none", **options)
        equal(runtime.generate(HOWTO, method="lowbit", draft_length=3, **options), plain)
        drafter.close()
    target.close()


@pytest.mark.long
def test_switched_and_regenerated_chats(target: LanguageModel, low_bit_copy: Path) -> None:
    drafter = low_bit(target, low_bit_copy, "window 24")
    runtime = with_drafter(target, drafter)
    asked = [HOWTO, LONG, HOWTO, REPEATS, LONG, LONG]
    options: dict[str, Any] = {"seed": 2, "max_tokens": 24, "temperature": 0.8}
    plain = [runtime.generate(prompt, method="none", **options) for prompt in asked]
    for prompt, expected in zip(asked, plain, strict=True):
        equal(runtime.generate(prompt, method="lowbit", draft_length=4, **options), expected)
    drafter.close()


@pytest.mark.long
def test_a_shared_cache_drafts_as_well_as_an_own_one(target: LanguageModel, low_bit_copy: Path) -> None:
    own = llamacpp.load(str(low_bit_copy), "copy", LoadOptions(context_tokens=768))
    size = target.facts.vocab_size
    rates = []
    for drafter in (low_bit(target, low_bit_copy, "chain"), ModelDrafter(own, size)):
        runtime: Runtime = with_drafter(target, drafter)
        accepted = drafted = 0
        for prompt in (
            HOWTO,
            REPEATS,
            LONG,
            "Write a short story.",
            "What is 7 times 8?",
            "Say it in French.",
        ):
            reply = runtime.generate(prompt, method="lowbit", draft_length=4, max_tokens=64, temperature=0.0)
            accepted += reply.stats.accepted_tokens
            drafted += reply.stats.drafted_tokens
        rates.append(accepted / drafted)
        drafter.close()
    assert rates[0] > 0.5
    assert rates[0] >= rates[1] - 0.05


def test_memory_use_beside_the_target(target: LanguageModel, low_bit_copy: Path) -> None:
    drafter, windowed = (low_bit(target, low_bit_copy, how) for how in ("chain", "window 64"))
    assert drafter.memory_use.weight_bytes == windowed.memory_use.weight_bytes < target.facts.weight_bytes
    assert drafter.memory_use.cache_bytes == target.facts.kv_bytes == 3 * windowed.memory_use.cache_bytes
    drafter.close()
    windowed.close()
