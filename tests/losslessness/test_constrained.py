"""Verification of constrained replies: the constraint applies to the replies and to the replays."""

from __future__ import annotations

import pytest

import edgespec
from edgespec.api.loading import always_draft
from edgespec.losslessness.cases import read_prompts
from edgespec.losslessness.verify import verify
from edgespec.store.catalogue import models_folder
from tests.losslessness.test_verify import prove, rounding
from tests.tables import near, runtime, table

REGEX = "([abc]d){2}[e-g]{9,30}"
METHODS = ("model", "grammar", "model+grammar")


class TestVerify:
    def test_identical_replies(self) -> None:
        with runtime(table(1), near(table(1), 2)) as pair:
            report = prove(pair, regex=REGEX, methods=METHODS)
        assert report.faults == 0
        assert all(result.accepted_tokens for result in report.methods.values())

    def test_differences_by_rounding(self) -> None:
        with rounding(0.3) as pair:
            report = prove(pair, regex=REGEX, methods=("model",))
        assert report.methods["model"].rounding > 0
        assert report.faults == 0

    @pytest.mark.parametrize("method", METHODS)
    def test_the_distribution_in_rejection_mode(self, method: str) -> None:
        with runtime(table(1), near(table(1), 2)) as pair:
            report = prove(
                pair,
                regex=REGEX,
                methods=(method,),
                temperatures=(0.8,),
                draft_lengths=(3,),
                acceptance="rejection",
                samples=150,
            )
        assert report.faults == 0
        assert report.methods[method].smallest_corrected_p_value is not None


@pytest.mark.parametrize(
    ("target", "branches"),
    [
        ("demo", (2, 2)),
        pytest.param("demo", (), marks=pytest.mark.long),
        pytest.param("demo-mlx", (2, 2), marks=pytest.mark.long),
    ],
)
def test_every_prompt_has_its_own_schema(target: str, branches: tuple[int, ...]) -> None:
    prompts = read_prompts(models_folder() / "schema_prompts.jsonl")[:1]
    with always_draft(), edgespec.load(target, draft_branches=branches, context=512) as runtime:
        report = verify(
            runtime,
            prompts,
            methods=("model+grammar",),
            temperatures=(0.0, 0.8),
            draft_lengths=(4,),
            max_tokens=40,
        )
        reply = runtime.generate(prompts[0].messages[0].content, schema=prompts[0].schema, max_tokens=40)
    assert report.faults == 0
    assert report.methods["model+grammar"].accepted_tokens
    assert reply.text.startswith('{"name": "')
