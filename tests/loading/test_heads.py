"""Heads are found, chosen, planned and loaded, and never change a reply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import edgespec
from edgespec.api.loading import always_draft
from edgespec.errors import CapabilityError, MemoryBudgetError, ModelFileError, OptionError
from edgespec.loading import exact
from edgespec.loading.bit_exactness import WidthClass
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pairing import ModelPair, choose_heads, describe_choice, find_pair
from edgespec.loading.planning import LoadPlan, PlanRequest, check_fits, plan_pair
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.memory.budget import Budget
from edgespec.model.base import Head, LoadOptions
from edgespec.model.formats.mlx_files import mlx_installed
from edgespec.options.methods import head_names
from edgespec.store.heads import HeadOption
from edgespec.store.reference import resolve
from tests.backends.published_heads import write_published
from tests.backends.tiny_heads import write_eagle
from tests.backends.tiny_models import write_gemma2, write_llama
from tests.raising import raises
from tests.store.conftest import own_home as own_home
from tests.store.fake_stores import add_to_hub, add_to_lmstudio

OPTIONS: dict[str, Any] = {"context": 256}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return write_llama(folder / "target.gguf", layers=3)


@pytest.fixture
def head(target: Path) -> Path:
    return write_eagle(target.with_name("eagle3-target.gguf"), layers=(0, 1, 2))


def pair_of(target: Path, **options: object) -> ModelPair:
    return find_pair(str(target), "auto", DraftingOptions.of(**options), None)


class TestChoice:
    @staticmethod
    def option(method: str, number: int = 0, problem: str = "") -> HeadOption:
        kinds = {"mtp": "MTP", "eagle": "EAGLE-3", "dflash": "DFlash", "medusa": "Medusa", "hydra": "Hydra"}
        head = Head(method, Path(f"{method}{number}"))
        return HeadOption(f"{method}{number}", kinds[method], head, "beside", problem=problem)

    def test_auto_takes_the_first_usable_one(self) -> None:
        options = [self.option("eagle", problem="no"), self.option("eagle", 1), self.option("eagle", 2)]
        chosen = choose_heads(options, (), automatic=True)
        assert [each.reference for each in chosen] == ["eagle1"]
        assert describe_choice(chosen, options) == (
            "using the draft head eagle1; another head also works with this model: eagle2"
            " (choose with --head)"
        )
        assert describe_choice(chosen, options[:2]) == "using the draft head eagle1"

    def test_auto_takes_one_of_each_method(self) -> None:
        options = [self.option(method, number) for number in (1, 2) for method in ("eagle", "mtp")]
        chosen = choose_heads(options, {"mtp"}, automatic=True)
        assert [each.reference for each in chosen] == ["eagle1", "mtp1"]
        assert describe_choice(chosen, options) == (
            "using the draft heads eagle1 and mtp1; 2 other heads also work with this model: eagle2, mtp2"
            " (choose with --head)"
        )

    def test_a_named_method_takes_its_first_one(self) -> None:
        options = [self.option(method, number) for method in head_names() for number in (1, 2)]
        for method in head_names():
            assert [each.reference for each in choose_heads(options, {method}, automatic=False)] == [
                f"{method}1"
            ]
        assert choose_heads(options, (), automatic=False) == ()

    def test_why_a_head_is_not_used_is_reported(self) -> None:
        options = [self.option("eagle", problem="it is too old")]
        assert choose_heads(options, {"eagle"}, automatic=True) == ()
        assert describe_choice((), options) == "not using the draft head eagle0: it is too old"
        assert describe_choice((), []) == ""


class TestFinding:
    def test_a_head_beside_the_target_is_found(self, target: Path, head: Path) -> None:
        pair = pair_of(target)
        assert [each.head for each in pair.heads] == [Head("eagle", head)]
        assert pair.why_heads == f"using the draft head {head}"
        assert pair_of(target, method="eagle").heads == pair.heads
        for options in ({"head": "none"}, {"method": "suffix"}, {"method": "none"}):
            assert pair_of(target, **options).heads == ()

    def test_a_found_head_does_not_replace_the_draft_model(self, tmp_path: Path) -> None:
        demo = resolve("demo")
        model = add_to_lmstudio(
            tmp_path / "home" / ".lmstudio" / "models", "maker/Large-GGUF/large-Q8_0.gguf", demo.path
        )
        add_to_lmstudio(
            tmp_path / "home" / ".lmstudio" / "models",
            "maker/Small-GGUF/small-Q8_0.gguf",
            resolve("demo-draft").path,
        )
        head = write_eagle(model.with_name("eagle3-large.gguf"), size=256, vocab=8192)
        pair = pair_of(model)
        assert [each.head for each in pair.heads] == [Head("eagle", head)]
        assert pair.draft is not None
        assert pair_of(model, head=head).draft is None

    def test_none_in_python_means_no_head(self, target: Path, head: Path) -> None:
        assert head.exists()
        assert pair_of(target, head=None).heads == ()

    def test_a_named_head_takes_precedence(self, target: Path, head: Path, tmp_path: Path) -> None:
        other = write_eagle(tmp_path / "other.gguf", layers=(1, 1, 1))
        pair = pair_of(target, head=other)
        assert [each.head for each in pair.heads] == [Head("eagle", other)]
        assert (pair.why_heads, pair.why_no_head) == ("", "")
        assert head.exists()

    def test_a_damaged_head_is_not_used_unless_named(self, target: Path, head: Path) -> None:
        head.write_bytes(head.read_bytes()[:-100])
        with edgespec.load(str(target), "none", **OPTIONS) as runtime:
            assert f"not using the draft head {head}" in runtime.target.notice
        with raises(ModelFileError, "damaged"):
            edgespec.load(str(target), "none", head=head, **OPTIONS)

    def test_a_method_that_lacks_its_head_says_so(self, target: Path) -> None:
        with raises(OptionError, "target.gguf", code="method_unavailable", option="method"):
            edgespec.load(str(target), "none", method="eagle", **OPTIONS)
        with raises(OptionError, "was given", code="method_unavailable", option="method"):
            edgespec.load(str(target), "none", method="eagle", head="none", **OPTIONS)

    def test_a_method_that_lacks_its_head_suggests_one_of_the_catalogue(self, target: Path) -> None:
        for name, method, quoted in (
            ("demo", "eagle", "--head demo-head"),
            ("demo", "dflash", "edgespec models show demo"),
            (str(target), "eagle", "--head HEAD"),
        ):
            with raises(OptionError, quoted, code="method_unavailable"):
                edgespec.load(name, "none", method=method, **OPTIONS)


class TestEarlyExit:
    """A model that was prepared for early exit takes no head."""

    def test_a_found_head_is_left_out(self, target: Path, head: Path) -> None:
        prepare_layerskip(target, 2)
        pair = pair_of(target, method="layerskip", methods=["auto"])
        assert (pair.target.format, pair.heads) == ("layerskip", ())
        assert "prepared for early exit" in pair.why_no_head
        # The automatic mode prefers the head.
        assert [each.head for each in pair_of(target).heads] == [Head("eagle", head)]
        with raises(OptionError, code="option_not_supported", option="head"):
            pair_of(target, method="layerskip", methods=["eagle"], head=head)


class TestLoading:
    @pytest.mark.long
    @pytest.mark.parametrize("branches", [(), (2, 2)])
    def test_a_found_head_changes_no_reply(self, target: Path, head: Path, branches: tuple[int, ...]) -> None:
        with (
            always_draft(),
            edgespec.load(str(target), "none", method="none", **OPTIONS) as plain,
            edgespec.load(str(target), draft_branches=branches, methods=["eagle"], **OPTIONS) as runtime,
        ):
            assert f"using the draft head {head}" in runtime.target.notice
            for temperature in (0.0, 0.8):
                asked: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3}
                expected = plain.generate("the file", **asked).tokens
                automatic = runtime.generate("the file", **asked)
                assert automatic.method.effective == "eagle+suffix"
                assert automatic.stats.drafted_tokens > 0
                assert automatic.tokens == expected
                assert runtime.generate("the file", method="eagle", **asked).tokens == expected

    def test_a_published_head_is_converted_when_named(self, target: Path, tmp_path: Path) -> None:
        published = write_published(tmp_path / "published")
        with edgespec.load(str(target), "none", method="eagle", head=published, **OPTIONS) as runtime:
            assert runtime.generate("the file", max_tokens=8).method.effective == "eagle"

    @pytest.mark.long
    def test_a_head_that_fails_to_load_is_reported_and_left_out(self, target: Path, head: Path) -> None:
        reader = gguf.GGUFReader(head, "r+")
        next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight").data[:] = np.nan
        reader.data.flush()
        with edgespec.load(str(target), "none", **OPTIONS) as runtime:
            assert f"not using the draft head {head}" in runtime.target.notice.split(" · ")[-1]
            assert runtime.generate("the file", max_tokens=8).method.effective in ("none", "suffix")
        for options in ({"method": "eagle"}, {"head": head}):
            with raises(ModelFileError, "not finite"):
                edgespec.load(str(target), "none", **OPTIONS, **options)

    def test_a_head_that_exactness_rules_out_is_refused_for_that_reason(
        self, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trial = exact._TrialResult([WidthClass((1,))], None, 1, is_disturbed=False)
        monkeypatch.setattr(exact._ExactLoading, "_trial", lambda *_, **_options: trial)
        with edgespec.load(str(target), "none", exactness="bits", **OPTIONS) as runtime:
            notice = runtime.target.notice
            assert f"not using the draft head {head}: the eagle method does not work with" in notice
            assert "checking several tokens at once does not give exactly the same results" in notice

    def test_a_head_for_another_target_is_refused(self, target: Path, tmp_path: Path) -> None:
        other = write_eagle(tmp_path / "other.gguf", layers=(0, 1, 2), size=16)
        with raises(CapabilityError, code="head_mismatch"):
            edgespec.load(str(target), "none", head=other, **OPTIONS)


class TestPlanning:
    @staticmethod
    def planned(target: Path, budget_bytes: int, **options: object) -> LoadPlan:
        drafting = DraftingOptions.of(**options)
        pair = find_pair(str(target), "none", drafting, None)
        request = PlanRequest(frozenset({"context", "kv_type"}))
        return plan_pair(
            pair, drafting, LoadOptions(context_tokens=512), Budget(budget_bytes, "here"), request
        )

    def test_a_found_head_that_does_not_fit_is_dropped(self, target: Path, head: Path) -> None:
        with_head = self.planned(target, 1 << 40)
        assert {item.kind for item in with_head.plan.items if item.role == "head"} == {
            "weights",
            "cache",
            "compute",
            "output",
        }
        total = with_head.plan.total_bytes
        planned = self.planned(target, total - 1)
        assert planned.plan.fits
        assert planned.pair.heads == ()
        assert planned.pair.why_no_head == f"the draft head {head} does not fit in memory"
        assert "no draft head" in planned.notice
        assert [decision.what for decision in planned.plan.decisions] == ["no draft head"]
        assert self.planned(target, total).pair.heads == with_head.pair.heads

    def test_a_head_that_the_user_needs_is_never_dropped(self, target: Path, head: Path) -> None:
        total = self.planned(target, 1 << 40).plan.total_bytes
        for options in ({"head": head}, {"method": "eagle"}):
            planned = self.planned(target, total - 1, **options)
            assert not planned.plan.fits
            with raises(MemoryBudgetError, "use --head none"):
                check_fits(planned)

    def test_the_least_preferred_head_is_dropped_first(self, target: Path, head: Path) -> None:
        other = write_eagle(target.with_name("eagle3-other.gguf"), layers=(0, 1, 2))
        drafting, options = DraftingOptions.of(), LoadOptions(context_tokens=512)
        pair = find_pair(str(target), "none", drafting, None)
        pair = replace(pair, heads=(*pair.heads, replace(pair.heads[0], reference=str(other))))

        def planned(budget_bytes: int) -> LoadPlan:
            request = PlanRequest(frozenset({"context", "kv_type"}))
            return plan_pair(pair, drafting, options, Budget(budget_bytes, "here"), request)

        both = planned(planned(1 << 40).plan.total_bytes - 1)
        assert [option.reference for option in both.pair.heads] == [str(head)]
        assert both.pair.why_no_head == f"the draft head {other} does not fit in memory"
        assert [decision.what for decision in both.plan.decisions] == ["only 1 of 2 draft heads"]
        neither = planned(both.plan.total_bytes - 1).pair
        assert neither.heads == ()
        assert neither.why_no_head == f"the draft heads {head} and {other} do not fit in memory"

    def test_plans_name_the_head(self, target: Path, head: Path) -> None:
        preview = edgespec.plan(str(target), "none", context=512)
        assert preview.heads == (str(head),)
        assert preview.why_no_head == ""
        head.unlink()
        assert "no draft head was found" in edgespec.plan(str(target), "none", context=512).why_no_head


def test_a_target_whose_hidden_states_cannot_be_read_works_without_its_head(tmp_path: Path) -> None:
    target = write_gemma2(tmp_path / "gemma2.gguf")
    write_eagle(tmp_path / "eagle3-gemma2.gguf")
    with edgespec.load(str(target), "none", **OPTIONS) as runtime:
        assert runtime.generate("the file", max_tokens=8).tokens


def test_a_published_head_is_suggested_but_not_downloaded(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "Qwen3-8B-Q4_K_M.gguf", layers=3)
    add_to_hub(tmp_path / "cache", "unsloth/Qwen3-8B-GGUF", model)
    pair = pair_of(Path("qwen3-8b"))
    assert (pair.draft, pair.heads) == (None, ())
    named = pair_of(Path("qwen3-8b"), method="eagle")
    assert named.head_advice == "use --head qwen3-8b-eagle3 (a download of 763 MiB)"
    assert pair_of(Path("qwen3-8b"), method="mtp").head_advice == ""
    for expected in (
        "to download it, use --draft qwen3-0.6b (381 MiB, expected speed-up",
        "estimated from its size)",
        ", or a draft head with --head qwen3-8b-eagle3 (763 MiB, expected speed-up",
        "its publisher measured 1.7x on a server GPU with 16-bit weights)",
    ):
        assert expected in pair.why_no_draft


@pytest.mark.parametrize("reference", ["demo", "demo-mlx-draft"])
def test_every_head_that_a_model_supports_is_declared_by_its_format(reference: str) -> None:
    if reference == "demo-mlx-draft" and not mlx_installed():
        pytest.skip("MLX is not installed")
    declared = resolve(reference).file_format.heads.keys()
    with edgespec.load(reference, "none", method="none", **OPTIONS) as runtime:
        supported = runtime.target.capabilities.self_draft_methods.intersection(head_names())
    assert supported <= declared
    assert declared <= {*head_names()}
