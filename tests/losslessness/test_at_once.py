"""Verify concurrent replies: rounding is measured, and bugs are reported as faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import edgespec
from edgespec import Runtime
from edgespec.api.loading import always_draft
from edgespec.backends.llamacpp.context import ThreadCount
from edgespec.backends.llamacpp.model import load_slots
from edgespec.decode.reply import Reply
from edgespec.errors import CancelledError, OptionError
from edgespec.losslessness.cases import read_prompts
from edgespec.losslessness.replay import Reason
from edgespec.losslessness.report import VerifyReport
from edgespec.losslessness.sharing import SharingErrors, measure_sharing
from edgespec.losslessness.verify import _Verification, verify
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.tiny_models import write_llama
from tests.losslessness.faults import share_cells
from tests.raising import raises

PROMPTS = read_prompts()[::9]
CHANGED = 6


@pytest.fixture(scope="module")
def many() -> Iterator[Runtime]:
    with always_draft(), edgespec.load("demo", context=512, parallel=3) as runtime:
        yield runtime


def prove(runtime: Runtime, **options: Any) -> VerifyReport:
    defaults: dict[str, Any] = {
        "methods": ("none", "model", "suffix"),
        "temperatures": (0.0, 0.8),
        "draft_lengths": (3,),
        "max_tokens": 24,
        "at_once": True,
    }
    return verify(runtime, PROMPTS, **defaults | options)


def test_replies_at_once_equal_those_made_alone(many: Runtime) -> None:
    report = prove(many)
    assert (report.parallel, report.faults) == (3, 0)
    assert report.nothing_shared == report.nothing_drafted == ()
    for result in report.methods.values():
        assert result.identical + result.rounding == result.prompts == len(PROMPTS)
        assert result.replies == 2 * len(PROMPTS)


def test_replies_with_exact_are_identical() -> None:
    with always_draft(), edgespec.load("demo", context=512, parallel=2, exact=True) as runtime:
        report = prove(runtime, temperatures=(0.0,))
    assert report.parallel == 1
    assert report.nothing_shared == ()
    assert all(result.identical == len(PROMPTS) for result in report.methods.values())


class TestFaults:
    def test_a_changed_token_is_a_fault(self, many: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        generate = _Verification._generate

        def changed(self: _Verification, case: Any, *args: Any, **options: Any) -> Reply:
            reply = generate(self, case, *args, **options)
            if (case.prompt.name, options["method"]) != (PROMPTS[1].name, "suffix"):
                return reply
            tokens = list(reply.tokens)
            tokens[CHANGED] = (tokens[CHANGED] + 1) % many.target.vocab_size
            return replace(reply, tokens=tuple(tokens))

        monkeypatch.setattr(_Verification, "_generate", changed)
        report = prove(many, temperatures=(0.0,), methods=("none", "suffix"))
        result = report.methods["suffix"]
        assert report.faults == result.faults == 1
        (found,) = (each for each in result.divergences if each.verdict == "fault")
        assert (found.prompt, found.position) == (PROMPTS[1].name, CHANGED)
        assert found.reason == Reason.NOT_REPRODUCED

    def test_a_cell_of_another_reply_is_a_fault(self, many: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        share_cells(monkeypatch, 12)
        report = prove(many, temperatures=(0.0,), methods=("none",))
        many.clear_cache()
        result = report.methods["none"]
        assert result.faults > 0
        assert result.rounding == 0
        assert any(each.leak for each in result.divergences), result.divergences
        assert {each.reason for each in result.divergences} == {Reason.OTHER_REPLIES}


class TestErrors:
    """Sharing errors of a model with F32 weights, whose logits depend on the placement of its KV cells."""

    PROMPT, REPLY = list(range(20, 60)), list(range(70, 90))
    OTHERS = (list(range(100, 130)), list(range(40, 90)))

    @pytest.fixture
    def models(self, tmp_path: Path) -> Iterator[Sequence[LanguageModel]]:
        path = write_llama(tmp_path / "tiny.gguf", layers=2)
        models = load_slots(str(path), "tiny", LoadOptions(context_tokens=256, parallel=3))
        yield models
        for model in models:
            model.close()

    def measure(self, models: Sequence[LanguageModel]) -> SharingErrors:
        return measure_sharing(models, self.PROMPT, self.REPLY, self.OTHERS, width=3)

    def test_placement_causes_rounding_errors_and_texts_none(self, models: Sequence[LanguageModel]) -> None:
        found = self.measure(models)
        assert 0 < found.largest_difference < 0.1
        assert found.leak == 0
        assert all(model.length == 0 for model in models)

    def test_shared_cells_leak(
        self, models: Sequence[LanguageModel], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        share_cells(monkeypatch, 1)
        found = self.measure(models)
        assert found.leak > 0

    def test_the_load_of_the_machine_neither_hides_nor_causes_leaks(
        self, models: Sequence[LanguageModel], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The number of CPU threads normally follows the machine's load. Here it changes constantly."""
        random = Random(0)
        models[0].set_max_threads(2)
        monkeypatch.setattr(ThreadCount, "update", lambda count: min(count.most, random.randint(1, 2)))
        assert self.measure(models).leak == 0
        assert models[0].max_threads == 2
        share_cells(monkeypatch, 1)
        assert self.measure(models).leak > 0


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "code", "says"),
        [
            ({"acceptance": "rejection"}, "option_conflict", "combined"),
            (
                {"methods": ("suffix",), "temperatures": (0.0,), "prompts": PROMPTS[:1]},
                "option_without_effect",
                "one reply",
            ),
        ],
    )
    def test_invalid_options_raise_an_error(
        self, many: Runtime, options: dict[str, Any], code: str, says: str
    ) -> None:
        prompts = options.pop("prompts", PROMPTS)
        with raises(OptionError, says, code=code):
            verify(many, prompts, at_once=True, **options)

    def test_models_that_run_one_reply_at_a_time(self) -> None:
        options: dict[str, Any] = {"context": 512, "parallel": 2, "method": "none", "exactness": "off"}
        with (
            edgespec.load("demo-mlx-draft", "none", **options) as runtime,
            raises(OptionError, "demo-mlx-draft", code="option_without_effect"),
        ):
            prove(runtime)

    def test_progress_can_cancel(self, many: Runtime) -> None:
        fractions: list[float] = []
        few: dict[str, Any] = {"temperatures": (0.0,), "methods": ("none", "suffix")}
        prove(many, **few, progress=lambda _, fraction: not fractions.append(fraction))  # type: ignore[func-returns-value]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
        with pytest.raises(CancelledError):
            prove(many, **few, progress=lambda _, fraction: fraction < 0.6)
        assert prove(many, **few).faults == 0
