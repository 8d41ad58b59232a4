"""In rejection mode, suffix decoding preserves the target's distribution, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from edgespec.engine.acceptance import Rejection
from edgespec.engine.loop import decode
from edgespec.engine.stats import Stats
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.suffix.drafter import SuffixConfig, SuffixCorpus, SuffixDrafter
from edgespec.methods.suffix.indexes import SuffixArray
from tests.engine.exact import AllChances, ExactModel, ExactSampler, Path, Table, assert_law, random_table

ROOT = (0,)
# The token 0 is followed by 1 0 0, 1 1 0, 0 1 1 and 2 0, which gives branches at every level.
KNOWN = ([0, 1, 0, 0], [2, 0, 1, 1, 0], [1, 0, 0, 1, 1], [1, 0, 2, 0])
WIDE = SuffixConfig(length_factor=4.0, length_offset=3.0, min_probability=0.01)


def suffix(rule: SuffixConfig, vocab_size: int) -> SuffixDrafter:
    texts = [[token % vocab_size for token in text] for text in KNOWN]
    index = SuffixArray(np.array(text, np.int32) for text in texts)
    return SuffixDrafter(lambda: SuffixCorpus(index), config=rule)


def law_of(
    target: Table, make: Any, *, block_verification: bool, depth: int, max_tokens: int
) -> tuple[dict[Path, Fraction], int]:
    """Return the distribution of the emitted tokens and the width of the largest tree."""
    chance = AllChances()
    widest = 0

    def experiment() -> Path:
        nonlocal widest
        drafter = make()
        drafter.begin(ROOT)
        stats = Stats()
        steps = decode(
            ExactModel(target, len(target(()))),  # type: ignore[arg-type]
            drafter,
            Rejection(chance, block_verification=block_verification),
            ExactSampler(ROOT),  # type: ignore[arg-type]
            ROOT[0],
            vocab_size=len(target(())),
            draft_length=depth,
            max_tokens=max_tokens,
            is_stop=lambda token: False,
            is_cancelled=lambda: False,
            stats=stats,
        )
        tokens = tuple(token for step in steps for token in step.tokens)
        widest = max(widest, stats.drafted_tokens)
        return tokens

    return chance.outcomes(experiment), widest


@pytest.mark.long
@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize(
    "rule", [WIDE, SuffixConfig(length_factor=4.0, can_branch=False)], ids=["tree", "chain"]
)
@pytest.mark.parametrize("seed", range(4))
def test_one_round(rule: SuffixConfig, block: bool, seed: int) -> None:
    target = random_table(seed, 3)
    emitted, drafted = law_of(
        target, lambda: suffix(rule, 3), block_verification=block, depth=3, max_tokens=3
    )
    assert_law(emitted, target, ROOT, 3)
    assert drafted >= (5 if rule.can_branch else 2), "the drafts are too small to prove anything"


@pytest.mark.parametrize("seed", range(2))
def test_several_rounds(seed: int) -> None:
    target = random_table(seed + 10, 2, zeros=0.1)
    emitted, _ = law_of(target, lambda: suffix(WIDE, 2), block_verification=True, depth=2, max_tokens=4)
    assert_law(emitted, target, ROOT, 2)


def test_combined_with_a_draft_model() -> None:
    target, draft = random_table(5, 2, zeros=0), random_table(6, 2, zeros=0)

    def both() -> CombinedDrafter:
        model: Any = ExactModel(draft, 2)
        return CombinedDrafter([ModelDrafter(model, 2), suffix(WIDE, 2)])

    emitted, _ = law_of(target, both, block_verification=True, depth=2, max_tokens=3)
    assert_law(emitted, target, ROOT, 2)
