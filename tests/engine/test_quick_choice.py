"""The engine's fast searches give the same bits as the simple implementation in `reference_logits`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import edgespec
from edgespec.engine.acceptance import Acceptance, Invariant, RandomDraws, Rejection
from edgespec.engine.logits import HostLogits
from edgespec.engine.noise import Noise, Stream, gumbel, tokens_with_noise_above
from edgespec.engine.processors import (
    Candidates,
    LogitsProcessor,
    MinP,
    Temperature,
    TopK,
    TopP,
    TypicalP,
    apply_chain,
    build_processors,
)
from edgespec.engine.quick_choice import Filters, split_filters
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError
from tests.engine.reference_logits import ReferenceLogits, reference_gumbel

SIZES = (2, 63, 64, 65, 127, 1000, 4097, 8192, 20_001, 33_000)
RULES: dict[str, Callable[[], Acceptance]] = {
    "invariant": Invariant,
    "rejection": lambda: Rejection(RandomDraws(3)),
    "token-wise": lambda: Rejection(RandomDraws(3), block_verification=False),
}


class Forbid(LogitsProcessor):
    """A constraint: only every third token is allowed."""

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        return tokens, np.where(tokens % 3 == 1, logits, -np.inf)


def random_row(seed: int, size: int, kind: str) -> NDArray[np.float32]:
    """Return a row of logits that resembles a model's, or is difficult in one way."""
    random = np.random.default_rng(seed)
    row: NDArray[np.floating[Any]] = random.normal(0.0, random.choice([0.3, 2.0, 10.0]), size)
    plausible = random.choice(size, min(size, int(random.integers(1, 80))), replace=False)
    row[plausible] = 15 - random.uniform(0.2, 3.0) * np.log(np.arange(1, len(plausible) + 1))
    if kind == "ties":
        row = np.round(row * 2) / 2
    elif kind == "flat":
        row = np.round(random.normal(0.0, 0.01, size), 2)
    elif kind == "nearly tied":
        row = 3 + random.integers(0, 4, size) * 2.0**-22
    elif kind == "same weights":
        # Different logits whose exponentials are equal.
        share = random.choice([0.002, 0.01])
        row = np.where(random.random(size) < share, random.integers(0, 4, size) * 1e-18, -40.0)
    elif kind == "forbidden":
        row[random.random(size) < 0.9] = -np.inf
        row[random.integers(size)] = 2.0
    elif kind == "huge":
        row *= 1e36
    elif kind in ("nan", "inf", "-inf"):
        row[random.random(size) < random.choice([0.001, 0.5, 1.0])] = float(kind)
        row[random.integers(size)] = float(kind)
    return row.astype(np.float32)


KINDS = ("model", "ties", "flat", "nearly tied", "same weights", "forbidden", "huge", "nan", "inf", "-inf")
rows = st.builds(random_row, st.integers(0, 2**32 - 1), st.sampled_from(SIZES), st.sampled_from(KINDS))


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    touched = draw(st.booleans())
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.8, 0.8, 1.0, 0.3, 2.0, 100.0, 1e-9, 1e-300, 5e-324])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 40, 40, 5000, 1_000_000])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.9, 0.5, 0.0, 1 - 1e-12, 1e-12])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.05, 0.5, 1.0])),
        typical_p=draw(st.sampled_from([1.0, 1.0, 1.0, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.1])) if touched else 1.0,
        presence_penalty=draw(st.sampled_from([0.0, 0.3, -1.0])) if touched else 0.0,
        frequency_penalty=draw(st.sampled_from([0.0, 0.25])) if touched else 0.0,
        logit_bias=draw(
            st.dictionaries(st.integers(0, 40_000), st.sampled_from([1.5, -2.0, 40.0, -math.inf]), max_size=4)
        )
        if touched
        else {},
    )


chains = st.sampled_from([(), (), (Forbid(),)])
seeds = st.integers(0, 2**64 - 1)


def result(call: Callable[[], Any]) -> Any:
    """Return a call's result, or the error that it raises, in a comparable form."""
    try:
        return call()
    except BackendError as error:
        return str(error)


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two results are equal, with NaN equal to NaN and -0.0 different from 0.0."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, tuple | list):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(same_bits(*pair) for pair in zip(a, b, strict=True))
        )
    if isinstance(a, float):
        return isinstance(b, float) and np.float64(a).tobytes() == np.float64(b).tobytes()
    return bool(a == b)


class TestSameBits:
    @settings(max_examples=300)
    @given(rows, sampling(), chains, seeds, st.sampled_from([1, 1, 1, 3]))
    def test_best_tokens(
        self,
        row: NDArray[np.float32],
        params: SamplingParams,
        extra: Sequence[LogitsProcessor],
        seed: int,
        count: int,
    ) -> None:
        history = [5, 7, 7, 40, 64]
        noise = Noise(seed, 5) if params.temperature else None
        processors = build_processors(params, history, extra)
        got = result(lambda: HostLogits(row[None]).best(0, count, processors, noise))
        assert same_bits(got, result(lambda: ReferenceLogits(row[None]).best(0, count, processors, noise)))

    @settings(max_examples=80)
    @given(
        st.builds(random_row, st.integers(0, 2**32 - 1), st.just(20_001), st.sampled_from(KINDS[:6])),
        st.sampled_from([0, 40]),
        st.integers(0, 60),
        st.sampled_from([0.0, 1e-16, -1e-16, 1e-12, -1e-12, 1e-7, -1e-7, 1e-3, -1e-3]),
        seeds,
    )
    def test_a_nucleus_whose_mass_is_almost_that_of_top_p(
        self, row: NDArray[np.float32], top_k: int, size: int, offset: float, seed: int
    ) -> None:
        """Rounding decides how many tokens top-p keeps, so the fast search must not decide."""
        weights = np.sort(np.exp((row.astype(np.float64) - float(row.max())) / 0.8))[::-1]
        weights = weights[:top_k] if top_k else weights
        mass = float((weights / weights.sum()).cumsum()[min(size, len(weights) - 1)]) * (1 + offset)
        chain = (Temperature(0.8), *([TopK(top_k)] if top_k else []), TopP(min(mass, 1 - 1e-15)))
        # Use many positions, so that a token at the edge of the nucleus is chosen at some of them.
        for position in range(20):
            noise = Noise(seed, position)
            wanted = ReferenceLogits(row[None]).best(0, 1, chain, noise)
            assert same_bits(HostLogits(row[None]).best(0, 1, chain, noise), wanted)

    @settings(max_examples=150)
    @given(rows, st.sampled_from([0, 1, 2, 40, 64, 700, 5000]), st.sampled_from([0.0, 2.4, 30.0, 1e6]))
    def test_candidates(self, row: NDArray[np.float32], count: int, margin: float) -> None:
        host, reference = HostLogits(row[None]), ReferenceLogits(row[None])
        assert same_bits(host.top(0, count), reference.top(0, count))
        assert same_bits(host.above(0, margin), reference.above(0, margin))

    @settings(max_examples=150)
    @given(rows, sampling(), chains, seeds)
    def test_distributions_and_scores(
        self, row: NDArray[np.float32], params: SamplingParams, extra: Sequence[LogitsProcessor], seed: int
    ) -> None:
        def computed(logits: HostLogits) -> Any:
            sampler = Sampler(params, seed, [5, 7, 7, 40, 64], extra)
            found = result(lambda: sampler.distribution(logits, 0))
            law = found if isinstance(found, str) else (found.tokens, found.probs)
            return law, result(lambda: sampler.scores(logits, 0))

        with np.errstate(invalid="ignore"):
            assert same_bits(computed(HostLogits(row[None])), computed(ReferenceLogits(row[None])))

    @pytest.mark.parametrize("rule", RULES)
    @settings(max_examples=40)
    @given(seeds, st.sampled_from([300, 8192, 20_001]), st.sampled_from(KINDS[:6]), sampling(), chains)
    def test_accepted_paths(
        self,
        rule: str,
        seed: int,
        size: int,
        kind: str,
        params: SamplingParams,
        extra: Sequence[LogitsProcessor],
    ) -> None:
        drafts, targets = (
            np.stack([random_row(seed % 2**32 + offset, size, kind) for offset in range(4)])
            for offset in (0, 0)
        )
        targets = np.roll(targets, seed % 2, axis=1)

        def walked(kind: type[HostLogits]) -> Any:
            acceptance, sampler = RULES[rule](), Sampler(params, seed, [5, 7, 7], extra)
            tokens, probs = [7], []
            for row in range(3):
                ((token, law),) = acceptance.draw(sampler, kind(drafts), row, 1) or [(1, None)]
                tokens.append(token)
                probs.append(law)
                sampler.push(token)
            sampler.pop(3)
            tree = TokenTree.chain(tokens[0], tokens[1:], probs)
            laws = [None if law is None else (law.tokens, law.probs) for law in probs]
            accepted = acceptance.accept(tree, kind(targets), sampler)
            return tokens, laws, tuple(accepted.path), accepted.token

        got = result(lambda: walked(HostLogits))
        assert same_bits(got, result(lambda: walked(ReferenceLogits)))

    @settings(max_examples=60)
    @given(seeds, st.integers(0, 1 << 30), st.lists(st.integers(0, 2**31 - 1), max_size=20))
    def test_noise(self, seed: int, position: int, tokens: list[int]) -> None:
        ids = np.array(tokens, np.int64)
        got = gumbel(seed, Stream.TOKEN, position, ids)
        assert same_bits(got, reference_gumbel(seed, Stream.TOKEN, position, ids))


class TestNoiseAboveAFloor:
    @settings(max_examples=60)
    @given(seeds, st.sampled_from([1, 100, 16_384, 16_385, 50_000]), st.floats(-6.0, 12.0))
    @example(3, 50_000, math.inf)
    @example(3, 50_000, -math.inf)
    def test_no_token_is_missing_and_few_are_superfluous(self, seed: int, size: int, floor: float) -> None:
        noise = reference_gumbel(seed, Stream.TOKEN, 9, np.arange(size))
        found = tokens_with_noise_above(seed, Stream.TOKEN, 9, size, floor)
        assert np.all(np.diff(found) > 0)
        wanted = np.flatnonzero(noise >= floor)
        assert set(wanted.tolist()) <= set(found.tolist())
        assert len(found) <= np.count_nonzero(noise >= floor - 1e-3) + 1

    def test_the_largest_noise_is_found_at_its_own_floor(self) -> None:
        for position in range(50):
            noise = reference_gumbel(1, Stream.TOKEN, position, np.arange(40_000))
            found = tokens_with_noise_above(1, Stream.TOKEN, position, 40_000, float(noise.max()))
            assert noise.argmax() in found


class TestWhichChainsAreQuick:
    def test_the_filters_of_every_setting_are_recognised(self) -> None:
        params = SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.1, presence_penalty=1.0)
        chain = build_processors(params, [1], [Forbid()])
        assert split_filters(chain) == (chain[:2], Filters(0.7, 9, 0.8, 0.1))
        assert split_filters((Temperature(0.5),)) == ((), Filters(0.5))

    @pytest.mark.parametrize(
        "chain",
        [
            (),
            (Forbid(),),
            (Temperature(1.0), TypicalP(0.5)),
            (Temperature(1.0), Forbid()),
            (Temperature(1.0), TopP(0.5), TopK(3)),
            (Temperature(1.0), MinP(0.5), MinP(0.1)),
            (Temperature(1.0), Temperature(2.0)),
        ],
        ids=lambda chain: " ".join(type(each).__name__ for each in chain),
    )
    def test_other_chains_are_left_to_their_processors(self, chain: tuple[LogitsProcessor, ...]) -> None:
        assert split_filters(chain) == (chain, None)

    @pytest.mark.parametrize("top_k", [0, 40])
    @pytest.mark.parametrize("top_p", [1.0, 0.9])
    def test_rows_of_a_model_are_hardly_ever_left_to_the_processors(
        self, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=0.05 if top_k else 0.0)
        left = 0

        def apply(processors: Sequence[LogitsProcessor], found: Candidates) -> Candidates:
            nonlocal left
            left += len(processors) > 0  # The processors before the temperature are none here.
            return apply_chain(processors, found)

        monkeypatch.setattr("edgespec.engine.logits.apply_chain", apply)
        chain = build_processors(params, [])
        for seed in range(50):
            HostLogits(random_row(seed, 33_000, "model")[None]).best(0, 1, chain, Noise(1, seed))
        assert left <= 2


@pytest.mark.real
class TestRealLogits:
    """Rows of real models, with 49,152 and 262,144 tokens."""

    @pytest.mark.parametrize("name", ["smollm2-q8_0.gguf", "gemma3-270m-q4_k_m.gguf"])
    def test_same_bits(self, real_models: Path, name: str) -> None:
        collected = real_rows(real_models / name)
        host, reference = HostLogits(collected), ReferenceLogits(collected)
        for options in (
            {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
            {"top_k": 0, "top_p": 0.9, "min_p": 0.0},
            {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
            {"top_k": 0, "top_p": 1.0, "min_p": 0.05},
            {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
        ):
            params = SamplingParams(temperature=0.8, **options)  # type: ignore[arg-type]
            for row in range(len(collected)):
                for seed in range(10):
                    samplers = [Sampler(params, seed, range(1, 40)) for _ in range(2)]
                    got, wanted = (
                        (sampler.token(logits, row), sampler.distribution(logits, row))
                        for sampler, logits in zip(samplers, (host, reference), strict=True)
                    )
                    assert got[0] == wanted[0]
                    assert same_bits(got[1].tokens, wanted[1].tokens)
                    assert same_bits(got[1].probs, wanted[1].probs)


def real_rows(path: Path) -> NDArray[np.float32]:
    """Return a few dozen rows of a model's logits, after each token of a text."""
    text = "The sky is blue because sunlight is scattered by air. In Python, `print(2 + 3)` prints"
    options: dict[str, Any] = {"draft": "none", "method": "none", "context": 512, "exactness": "off"}
    with edgespec.load(str(path), **options) as runtime:
        tokens = runtime.vocabulary.tokenize(text, special=False, start=True)
        with runtime.borrowed_target() as target:
            target.truncate(0)
            collected = []
            for token in tokens:
                logits = target.verify(TokenTree.chain(token))
                assert isinstance(logits, HostLogits)
                collected.append(logits.rows[0].copy())
                target.commit(())
    return np.stack(collected)
