"""`verify` finds faults injected into the loop, the caches and the kernels, and classifies them.

It recomputes the logits of a text, with prompts that are processed in batches of other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import edgespec
from edgespec import Runtime
from edgespec.api.loading import always_draft
from edgespec.losslessness.cases import read_prompts
from edgespec.losslessness.replay import Alone, Reason, largest_difference, logit_rows
from edgespec.losslessness.report import VerifyReport
from edgespec.losslessness.verify import verify
from tests.losslessness.faults import (
    keep_a_rejected_cell,
    keep_stale_prefixes,
    keep_the_wrong_branch,
    leave_a_cell_behind,
    noisy_width,
    write_into_the_cache,
)

PROMPTS = read_prompts()[::12]
WIDTH = 5
NOISE = 4.0


@pytest.fixture(scope="module")
def chains() -> Iterator[Runtime]:
    with always_draft(), edgespec.load("demo", context=512) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def trees() -> Iterator[Runtime]:
    with always_draft(), edgespec.load("demo", context=512, draft_branches=(3, 2)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def f16() -> Iterator[Runtime]:
    """Load the demo with KV cells that llama.cpp can move to other positions."""
    with always_draft(), edgespec.load("demo", context=512, kv_type="f16", exactness="off") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Runtime]:
    """Load a real model with settings for which, in most builds, logits depend on the pass width."""
    options: dict[str, Any] = {"kv_type": "f16", "threads": 1, "flash_attention": "off", "exactness": "off"}
    with always_draft(), edgespec.load(str(smollm2), "none", context=512, **options) as runtime:
        yield runtime


def prove(runtime: Runtime, **options: Any) -> VerifyReport:
    defaults: dict[str, Any] = {
        "methods": ("model", "suffix"),
        "temperatures": (0.0, 0.8),
        "draft_lengths": (WIDTH - 1,),
        "max_tokens": 24,
        "idle_seconds": 0.0,
    }
    return verify(runtime, options.pop("prompts", PROMPTS), **defaults | options)


def reasons(report: VerifyReport) -> set[Reason | None]:
    return {each.reason for result in report.methods.values() for each in result.divergences}


@pytest.mark.parametrize("name", ["chains", "trees"])
def test_a_right_runtime(request: pytest.FixtureRequest, name: str) -> None:
    report = prove(request.getfixturevalue(name))
    assert (report.faults, report.rounding) == (0, 0)


class TestRollback:
    def test_a_rejected_cell_that_is_kept(self, chains: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        keep_a_rejected_cell(monkeypatch, chains)
        report = prove(chains)
        assert report.faults > 0
        assert report.rounding == 0
        assert reasons(report) == {Reason.REJECTED_TOKENS}

    @pytest.mark.parametrize("only_commit", [True, False])
    def test_a_cell_that_is_left_behind(
        self, f16: Runtime, monkeypatch: pytest.MonkeyPatch, only_commit: bool
    ) -> None:
        """If every rollback is faulty, so are those of the replay, but with other rejected tokens."""
        leave_a_cell_behind(monkeypatch, f16, only_commit=only_commit)
        reports = [
            prove(f16, prompts=[prompt], methods=("model",), temperatures=(0.8,)) for prompt in PROMPTS
        ]
        assert sum(report.faults for report in reports) > 0
        assert sum(report.rounding for report in reports) == 0
        assert set().union(*map(reasons, reports)) == {Reason.REJECTED_TOKENS}
        # The cells stay in the cache, so they change later replies, even those of plain decoding.
        report = prove(f16)
        assert report.faults > 0
        assert report.rounding == 0
        assert Reason.STALE_CACHE in reasons(report) <= {Reason.REJECTED_TOKENS, Reason.STALE_CACHE}

    def test_the_wrong_branch(self, trees: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = keep_the_wrong_branch(monkeypatch, trees)
        report = prove(trees, methods=("model",))
        assert wrong() > 0
        assert report.faults > 0
        assert report.rounding == 0
        # A replay rejects other tokens, so it can also be wrong in another way.
        assert Reason.REJECTED_TOKENS in reasons(report) <= {Reason.REJECTED_TOKENS, Reason.NOT_REPRODUCED}


def test_a_drafter_that_writes_into_the_cache(chains: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    write_into_the_cache(monkeypatch, chains)
    report = prove(chains)
    result = report.methods["suffix"]
    assert result.faults > 0
    assert report.methods["model"].identical == result.prompts
    assert reasons(report) == {Reason.NOT_REPRODUCED}


class TestNoisyKernels:
    def test_noise_on_one_width_is_rounding(self, chains: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        passes = noisy_width(monkeypatch, chains, WIDTH, NOISE)
        report = prove(chains)
        assert passes() > 0
        assert report.faults == 0
        assert report.rounding > 0
        assert report.broken_promises == (report.rounding if report.exact else 0)
        largest = max(result.largest_difference or 0.0 for result in report.methods.values())
        assert NOISE * 0.95 < largest <= NOISE + 0.01

    def test_noise_that_changes_is_no_rounding(
        self, chains: Runtime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        noisy_width(monkeypatch, chains, WIDTH, NOISE, repeatable=False)
        report = prove(chains)
        assert report.faults > 0
        assert report.rounding == 0
        assert reasons(report) == {Reason.NOT_REPEATABLE}


def test_a_stale_prefix(chains: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding is as wrong as the methods, so all replies are equal."""
    keep_stale_prefixes(monkeypatch)
    report = prove(chains)
    assert report.faults > 0
    assert reasons(report) == {Reason.STALE_CACHE}


class TestRealModel:
    """Faults and rounding are distinguished if both occur. Other faults are tested with the demo models."""

    FEW: ClassVar[dict[str, Any]] = {
        "methods": ("suffix", "ngram"),
        "prompts": PROMPTS[:1],
        "temperatures": (0.8,),
        "max_tokens": 32,
    }

    @pytest.mark.long
    def test_a_rejected_cell_that_is_kept(self, real: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        keep_a_rejected_cell(monkeypatch, real)
        report = prove(real, **self.FEW)
        assert report.faults > 0
        assert reasons(report) <= {Reason.REJECTED_TOKENS, None}

    @pytest.mark.long
    def test_a_drafter_that_writes_into_the_cache(
        self, real: Runtime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_into_the_cache(monkeypatch, real)
        report = prove(real, **self.FEW)
        assert report.methods["suffix"].faults > 0
        assert {each.reason for each in report.methods["suffix"].divergences} == {Reason.NOT_REPRODUCED}
        assert report.methods["ngram"].faults == 0

    def test_noise_on_one_width_is_rounding(self, real: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        passes = noisy_width(monkeypatch, real, WIDTH, NOISE)
        report = prove(real, **self.FEW)
        assert passes() > 0
        assert report.faults == 0
        assert report.rounding > 0


@pytest.mark.parametrize(("kv_type", "rounds"), [("auto", False), ("f16", True)])
def test_batches_of_other_sizes(demo_target: Path, kv_type: str, rounds: bool) -> None:
    """With one kernel for all widths, a cache agrees bit for bit, however a text was processed."""
    tokens = np.random.default_rng(0).integers(512, 4096, 400).tolist()
    with (
        edgespec.load(str(demo_target), "none", kv_type=kv_type, method="none") as plain,
        plain.borrowed_target() as target,
    ):
        whole = logit_rows(target, tokens[:380], tokens[380:])
        others = [logit_rows(target, tokens[:380], tokens[380:], Alone(size)) for size in (48, 300)]
    error = max(largest_difference(whole, other) for other in others)
    assert (error > 0) is rounds
    assert error < 1.0


def test_nan_is_an_infinite_difference() -> None:
    row = np.array([[1.0, math.inf]], np.float32)
    assert largest_difference(row, row) == 0
    assert largest_difference(row, np.array([[1.5, math.inf]], np.float32)) == 0.5
    assert largest_difference(row, np.array([[math.nan, math.inf]], np.float32)) == math.inf
