"""The drafters that a method uses in a chat with images."""

from __future__ import annotations

import pytest

from edgespec.decode.drafter_set import DrafterSet, ReplyKind
from edgespec.methods.ngram.drafter import NgramDrafter
from tests.tables import table

IMAGES = ReplyKind(has_images=True)


@pytest.fixture
def drafters() -> DrafterSet:
    names = ("ngram", "suffix", "eagle", "lowbit")
    return DrafterSet(table(0), {name: NgramDrafter() for name in names})


@pytest.mark.parametrize(
    ("method", "effective"),
    [("ngram", "ngram"), ("eagle+ngram", "ngram"), ("eagle", "none"), ("lowbit+suffix", "suffix")],
)
def test_methods_that_read_the_target_do_not_draft_with_images(
    drafters: DrafterSet, method: str, effective: str
) -> None:
    drafter, report = drafters.choose(method, IMAGES)
    assert report.effective == effective
    assert (drafter is None) == (effective == "none")
    left_out = {"eagle", "lowbit"} & set(method.split("+"))
    assert all(name in report.reason for name in left_out)
    assert drafters.choose(method)[1].effective == method


def test_drafters_are_named_unless_they_need_a_constraint() -> None:
    drafters = DrafterSet(table(0), {name: NgramDrafter() for name in ("ngram", "suffix", "grammar")})
    assert set(drafters.names) == {"ngram", "suffix"}
