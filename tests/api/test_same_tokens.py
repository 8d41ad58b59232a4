"""Every method gives the tokens of plain decoding, at every draft length, temperature and penalty."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import cycle, product
from typing import Any

import pytest

import edgespec
from edgespec import Reply, Runtime
from edgespec.losslessness.cases import read_prompts
from edgespec.losslessness.verify import verify
from tests.api.questions import HOWTO, METHODS, REPEATS, equal
from tests.cases import first
from tests.tables import sampling_settings

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
SAMPLING = sampling_settings((0.0, 0.7, 1.2), PENALTIES)


# Every run compares a few of each with plain decoding. `-m long` compares the rest.
DRAFT_LENGTHS = [(1, 6), pytest.param((2, 3, 4, 5, *range(7, 17)), marks=pytest.mark.long)]
TREE_LENGTHS = [(2, 5), pytest.param((1, 3), marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def twins() -> Iterator[Runtime]:
    """The demo target as its own draft model."""
    with edgespec.load("demo", "demo", kv_type="q8_0") as twins:
        yield twins


class TestTheSameTokens:
    @pytest.mark.parametrize("draft_lengths", DRAFT_LENGTHS, ids=["some", "rest"])
    @pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
    @pytest.mark.parametrize("method", METHODS)
    def test_every_draft_length(
        self,
        demo: Runtime,
        plain: Callable[..., Reply],
        method: str,
        sampling: dict[str, Any],
        draft_lengths: tuple[int, ...],
    ) -> None:
        for prompt, draft_length in product((HOWTO, REPEATS), draft_lengths):
            options: dict[str, Any] = {"seed": 7, "max_tokens": 16} | sampling
            equal(
                demo.generate(prompt, method=method, draft_length=draft_length, **options),
                plain(prompt, **options),
            )

    @pytest.mark.parametrize("draft_lengths", TREE_LENGTHS, ids=["some", "rest"])
    @pytest.mark.parametrize(
        "branches",
        first([(3, 2), (2,), (1, 4), (4,), (2, 2, 2)]),
        ids=str,
    )
    def test_every_tree(
        self, plain: Callable[..., Reply], branches: tuple[int, ...], draft_lengths: tuple[int, ...]
    ) -> None:
        with edgespec.load("demo", draft_branches=branches) as tree:
            # Every sampling setting and every method is tested with every length, but not with every
            # combination.
            lengths = cycle((*draft_lengths, *draft_lengths[::-1]))
            for (sampling, method), draft_length in zip(
                product(SAMPLING.values(), ("model", "model+ngram")), lengths, strict=False
            ):
                options: dict[str, Any] = {"seed": 8, "max_tokens": 16} | sampling
                equal(
                    tree.generate(HOWTO, method=method, draft_length=draft_length, **options),
                    plain(HOWTO, **options),
                )

    @pytest.mark.long
    @pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
    def test_lengths_at_which_attention_changes_its_kernel(
        self, demo: Runtime, plain: Callable[..., Reply], temperature: float
    ) -> None:
        prompt = "Tell me about `tar`. " * 34
        forever = {
            token: -math.inf for token in range(demo.target.vocab_size) if demo.vocabulary.is_end(token)
        }
        for method in METHODS:
            options: dict[str, Any] = {
                "seed": 3,
                "max_tokens": 280,
                "temperature": temperature,
                "logit_bias": forever,
            }
            got = demo.generate(prompt, method=method, draft_length=6, **options)
            assert got.stats.prompt_tokens < 256
            assert got.stats.prompt_tokens + len(got.tokens) > 512
            equal(got, plain(prompt, **options))

    def test_to_the_end_of_the_context(self) -> None:
        with edgespec.load("demo", context=256, draft_branches=(3,)) as small:
            ends = [t for t in range(small.target.vocab_size) if small.vocabulary.is_end(t)]
            forever = dict.fromkeys(ends, -math.inf)
            replies = [
                small.generate(HOWTO, method=method, draft_length=7, seed=1, logit_bias=forever)
                for method in ("none", *METHODS)
            ]
        for reply in replies:
            equal(reply, replies[0])
            assert reply.finish_reason == "length"
            assert reply.stats.prompt_tokens + len(reply.tokens) == 257

    @pytest.mark.parametrize("acceptance", ["invariant", "rejection"])
    @pytest.mark.parametrize("temperature", first([0.8, 0.0, 1.2]))
    def test_draft_equal_to_the_target_is_always_accepted(
        self, twins: Runtime, acceptance: str, temperature: float
    ) -> None:
        ends = [t for t in range(twins.target.vocab_size) if twins.vocabulary.is_end(t)]
        exactness = twins.target.exactness
        assert exactness is not None
        for draft_length in (1, 4, 9):
            reply = twins.generate(
                HOWTO,
                method="model",
                draft_length=draft_length,
                acceptance=acceptance,
                temperature=temperature,
                max_tokens=60,
                seed=2,
                logit_bias=dict.fromkeys(ends, -math.inf),
            )
            assert reply.stats.acceptance_rate == 1.0
            # On a busy machine, the trial may not have tested the widest passes, which are then not used.
            width = min(draft_length + 1, *exactness.widths[-1:])
            assert reply.stats.target_passes == math.ceil(60 / width)

    @pytest.mark.long
    @pytest.mark.parametrize("branches", [(), (3, 2)], ids=str)
    def test_every_embedded_prompt(self, branches: tuple[int, ...]) -> None:
        with edgespec.load("demo", draft_branches=branches) as pair:
            report = verify(
                pair,
                read_prompts(),
                methods=METHODS,
                temperatures=(0.0, 0.7, 0.8, 1.2),
                draft_lengths=(1, 2, 3, 4, 5, 7, 8, 12, 16),
                max_tokens=256,
                seed=11,
            )
        for result in report.methods.values():
            assert (result.identical, result.faults) == (len(read_prompts()), 0)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_same_seed_repeats_the_reply(self, demo: Runtime, temperature: float) -> None:
        for acceptance in ("invariant", "rejection"):
            # Tokens drawn by rejection sampling depend on the drafts, and the drafts of `auto` depend on
            # timing.
            method = "auto" if acceptance == "invariant" else "model"
            options: dict[str, Any] = {"temperature": temperature, "acceptance": acceptance, "max_tokens": 32}
            options["method"] = method
            one, again = (demo.generate(HOWTO, seed=5, **options) for _ in range(2))
            other = demo.generate(HOWTO, seed=6, **options)
            assert one.tokens == again.tokens
            assert (one.tokens == other.tokens) == (temperature == 0.0)
