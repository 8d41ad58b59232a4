"""The drafters of a method, including those for chats with images, and their draft lengths."""

from __future__ import annotations

import pytest

from edgespec.api.runtime import Runtime
from edgespec.decode.drafter_set import DrafterSet, ReplyKind
from edgespec.methods.auto.controller import AutoConfig
from edgespec.methods.auto.live_costs import LiveCosts
from edgespec.methods.auto.loss_limit import LossLimits
from edgespec.methods.constants import FIXED_DRAFT_LENGTH, MAX_DRAFT_LENGTH
from edgespec.methods.costs.curve import CostCurve
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
    resolved = drafters.resolve(method, IMAGES)
    assert resolved.report.effective == effective
    assert (drafters.choose(resolved) is None) == (effective == "none")
    left_out = {"eagle", "lowbit"} & set(method.split("+"))
    assert all(name in resolved.report.reason for name in left_out)
    assert drafters.resolve(method).report.effective == method


def test_drafters_are_named_unless_they_need_a_constraint() -> None:
    drafters = DrafterSet(table(0), {name: NgramDrafter() for name in ("ngram", "suffix", "grammar")})
    assert set(drafters.names) == {"ngram", "suffix"}


def test_the_default_draft_length_is_known_without_running_the_drafters() -> None:
    class Unready(NgramDrafter):
        def warm_up(self) -> None:
            raise AssertionError("the drafter was run")

    config = AutoConfig(LossLimits(0.02, 2.0), LiveCosts(CostCurve((1, 2), (1.0, 1.1))), controls_named=True)
    for auto_config, length in ((config, MAX_DRAFT_LENGTH), (None, FIXED_DRAFT_LENGTH)):
        target = table(0)
        drafters = DrafterSet(target, {"ngram": Unready(), "suffix": Unready()}, auto_config=auto_config)
        with Runtime(target, None, drafters) as runtime:
            for method, expected in (("ngram", length), ("ngram+suffix", length), ("none", 0)):
                defaults = runtime.reply_defaults(method)
                assert (defaults["method"], defaults["draft_length"]) == (method, expected)
