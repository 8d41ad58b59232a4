"""Models are loaded as planned: drafts, low-bit copies, draft windows, and options that the user named."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.backends.llamacpp import devices
from edgespec.backends.llamacpp.devices import Gpu, expert_bytes
from edgespec.backends.llamacpp.memory_estimate import GgufMemoryEstimator
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.errors import MemoryBudgetError, OptionError
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pairing import ModelPair, draft_load_options, find_pair
from edgespec.loading.planning import LoadPlan, PlanRequest, budget_for, check_fits, plan_pair
from edgespec.loading.prepare.lowbit import prepare_lowbit
from edgespec.memory.budget import Budget
from edgespec.model.base import LoadOptions
from edgespec.model.memory_estimate import MemoryEstimate
from edgespec.model.model_facts import Adapter
from edgespec.model.registry import backend_of
from edgespec.store.catalogue import models_folder
from edgespec.store.reference import resolve
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.backends.tiny_models import write_moe
from tests.raising import raises
from tests.store.conftest import own_home as own_home
from tests.store.fake_stores import add_to_lmstudio

_OPTIONS = LoadOptions(context_tokens=1024)


def _planned(
    budget_bytes: int,
    drafting: DraftingOptions | None = None,
    options: LoadOptions = _OPTIONS,
    draft: str | None = "demo-draft",
    fixed: PlanRequest | None = None,
) -> LoadPlan:
    drafting = drafting or DraftingOptions.of()
    pair: ModelPair = find_pair("demo", draft, drafting, None)
    return plan_pair(pair, drafting, options, Budget(budget_bytes, "here"), fixed)


def _roles(planned: LoadPlan) -> set[str]:
    return {item.role for item in planned.plan.items}


def _total(**how: object) -> int:
    return _planned(1 << 40, **how).plan.total_bytes  # type: ignore[arg-type]


def test_the_advised_context_is_one_that_the_model_was_trained_for() -> None:
    fixed = PlanRequest(frozenset({"context", "kv_type"}))
    trained = _planned(1 << 40, draft=None).trained_tokens

    def advice(context_tokens: int, room_tokens: int) -> str:
        fits = _total(draft=None, options=replace(_OPTIONS, context_tokens=room_tokens, kv_type="f16"))
        options = replace(_OPTIONS, context_tokens=context_tokens, kv_type="f16")
        return _planned(fits, options=options, draft=None, fixed=fixed).advice

    both = advice(16 * trained, 4 * trained)
    assert both.startswith(
        f"use --context {trained}, which the model was trained for (up to {4 * trained} fit"
    )
    assert advice(16 * trained, trained // 2).startswith(f"use --context {trained // 2} or less")


def test_the_draft_is_dropped_before_the_chat_fails() -> None:
    alone = _total(draft=None)
    planned = _planned(alone, fixed=PlanRequest(frozenset({"context", "kv_type"})))
    assert planned.plan.fits
    assert planned.pair.draft is None
    assert "does not fit in memory" in planned.pair.why_no_draft
    assert "no draft model" in planned.notice


@pytest.mark.long
def test_a_draft_that_the_user_named_is_not_dropped() -> None:
    fixed = PlanRequest(frozenset({"context", "kv_type", "draft"}))
    planned = _planned(_total(draft=None), fixed=fixed)
    assert not planned.plan.fits
    with raises(MemoryBudgetError, "tokens", "use --draft none"):
        check_fits(planned)
    with raises(MemoryBudgetError, "smallest"):
        check_fits(_planned(2**20))
    by_method = _planned(
        _total(draft=None), DraftingOptions.of(method="model"), fixed=PlanRequest(frozenset({"kv_type"}))
    )
    assert by_method.pair.draft is not None


def test_a_draft_window_is_chosen_where_it_saves_enough_memory() -> None:
    options = replace(_OPTIONS, context_tokens=1 << 16)
    whole = DraftingOptions.of(method="auto", draft_window=0)
    windowed = DraftingOptions.of(method="auto", draft_window=1024)
    assert _total(drafting=whole, options=options) > _total(drafting=windowed, options=options)
    assert _total(options=options) < _total(drafting=whole, options=options)  # it was trained for 1,024


class TestCopies:
    @pytest.fixture
    def copied(self) -> Iterator[None]:
        prepared = prepare_lowbit(resolve("demo").path, "Q4_0")
        yield
        shutil.rmtree(prepared.folder)

    @pytest.mark.long
    @pytest.mark.usefixtures("copied")
    def test_auto_uses_a_copy_that_fits(self) -> None:
        assert "low-bit copy" in _roles(_planned(1 << 40, draft=None))
        without = _total(draft=None) - sum(
            item.bytes for item in _planned(1 << 40, draft=None).plan.items if item.role == "low-bit copy"
        )
        fixed = PlanRequest(frozenset({"context", "kv_type"}))
        planned = _planned(without, draft=None, fixed=fixed)
        assert planned.plan.fits
        assert not planned.drafting.has_room_for_copy
        assert "low-bit copy" not in _roles(planned)
        named = _planned(without, DraftingOptions.of(method="lowbit"), draft=None, fixed=fixed)
        assert not named.plan.fits

    @pytest.mark.long
    @pytest.mark.usefixtures("copied")
    def test_a_copy_does_not_replace_a_dropped_draft(self) -> None:
        fixed = PlanRequest(frozenset({"context", "kv_type"}))
        planned = _planned(_total(draft=None, drafting=DraftingOptions.of(method="none")), fixed=fixed)
        assert planned.plan.fits
        assert planned.pair.draft is None
        assert not planned.drafting.has_room_for_copy

    @pytest.mark.long
    @pytest.mark.usefixtures("copied")
    def test_a_copy_is_estimated_without_the_adapter(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        adapter = Adapter(str(tmp_path / "a.gguf"))
        Path(adapter.path).touch()
        estimate = GgufMemoryEstimator.estimate
        adapters: dict[str, tuple[Adapter, ...]] = {}

        def recorded(self: GgufMemoryEstimator, options: LoadOptions) -> MemoryEstimate:
            adapters[self.name] = options.adapters
            return estimate(self, options)

        monkeypatch.setattr(GgufMemoryEstimator, "estimate", recorded)
        _planned(1 << 40, draft=None, options=replace(_OPTIONS, adapters=(adapter,)))
        assert adapters == {"demo": (adapter,), "demo (low-bit copy)": ()}


@pytest.mark.long
def test_the_draft_kv_cache_is_quantised_first() -> None:
    options = {"context": 4096, "draft_window": 0, "threads": 1, "prefix_cache": "none", "method": "model"}
    prompt = {"prompt": "How do I list files?", "max_tokens": 16, "seed": 3}
    replies, bytes_ = [], []
    memory = None
    for _ in range(2):
        with edgespec.load("demo", "auto", **options, memory=memory) as runtime:  # type: ignore[arg-type]
            assert runtime.draft is not None
            assert runtime.plan is not None
            reply = runtime.generate(**prompt)  # type: ignore[arg-type]
            assert reply.stats.drafted_tokens > 0
            replies.append(reply.tokens)
            bytes_.append((runtime.target.kv_bytes, runtime.draft.kv_bytes))
            memory = runtime.plan.total_bytes - 2**18
            last = runtime.plan
    assert replies[0] == replies[1]
    (decision,) = last.decisions
    assert decision.what == "a KV cache of type q8_0 for the draft model"
    assert decision.why == "the model checks what the draft model proposes, so replies stay the same"
    assert decision.bytes >= 2**18
    assert last.fits
    assert bytes_[1][0] == 2 * bytes_[0][0]  # made whole at once, for want of room to grow
    assert bytes_[1][1] < 2 * bytes_[0][1]


class TestInstalledModels:
    """The demo's models are installed in LM Studio with fewer bits, and the hub is unreachable."""

    @pytest.fixture(autouse=True)
    def shelf(self, own_home: Path, tmp_path: Path) -> None:
        folder = own_home / ".lmstudio" / "models" / "maker"
        for name, files in (("Large", "target"), ("Small", "draft")):
            path = models_folder() / f"demo-{files}-q8_0.gguf"
            copy = tmp_path / f"{name}.gguf"
            quantise(path, copy, "Q4_0")
            add_to_lmstudio(folder, f"{name}-GGUF/{name}-Q4_0.gguf", copy)

    def test_an_installed_draft_with_fewer_bits_replaces_one_that_does_not_fit(self) -> None:
        fixed = PlanRequest(frozenset({"context", "kv_type", "draft_window"}))
        total = _total(fixed=fixed)
        assert _planned(total, fixed=fixed).plan.decisions == ()
        planned = _planned(total - 1, fixed=fixed)
        assert planned.plan.fits
        assert planned.pair.draft is not None
        assert planned.pair.draft.path.name == "Small-Q4_0.gguf"
        (decision,) = planned.plan.decisions
        assert decision.what == "maker/Small-GGUF as the draft model"
        assert "lower-bit version of the same model" in decision.why
        assert decision.bytes > 2**18
        named = _planned(total - 1, fixed=PlanRequest(fixed.fixed | {"draft"}))
        assert not named.plan.fits
        memory, found = None, []
        for _ in range(2):
            how = {"context": 1024, "kv_type": "f16", "threads": 1, "method": "model", "prefix_cache": "none"}
            with edgespec.load("demo", "auto", **how, memory=memory) as runtime:  # type: ignore[arg-type]
                assert runtime.draft is not None
                assert runtime.plan is not None
                reply = runtime.generate("How do I list files?", max_tokens=16, seed=3)
                found.append((runtime.draft.name, reply.tokens))
                memory = runtime.plan.total_bytes - 1
        assert [name for name, _ in found] == ["demo-draft", "maker/Small-GGUF"]
        assert found[0][1] == found[1][1]

    def test_the_error_suggests_installed_models_first(self) -> None:
        target = resolve("maker/Large-GGUF", allow_download=False)
        fixed = PlanRequest(frozenset({"kv_type", "draft_window"}))
        quarter = LoadOptions(context_tokens=512)
        whole = DraftingOptions.of(larger_than_memory="no")
        smaller = plan_pair(
            ModelPair(target, None, ""), DraftingOptions.of(), quarter, Budget(1 << 40, "here"), fixed
        )
        planned = _planned(smaller.plan.total_bytes, whole, options=quarter, draft=None, fixed=fixed)
        assert not planned.plan.fits
        with raises(MemoryBudgetError, "maker/Large-GGUF"):
            check_fits(planned)
        other = _planned(smaller.plan.total_bytes - 1, whole, options=quarter, draft=None, fixed=fixed)
        assert "choose maker/Small-GGUF (" in other.advice
        none = _planned(2**20, whole, options=quarter, draft=None, fixed=fixed)
        assert "on this machine" not in none.advice


@pytest.mark.long
def test_loading_follows_the_plan() -> None:
    with edgespec.load("demo", "none", context=4096, kv_type="q8_0", threads=1) as runtime:
        assert runtime.plan is not None
        assert runtime.plan.kv_type == "q8_0"
        kept = runtime.memory().prefix_cache.memory_limit_bytes
        assert 0 < kept == runtime.plan.prefix_cache_bytes
        total = runtime.plan.total_bytes
    with edgespec.load("demo", "none", context=4096, memory=total - 1, threads=1) as runtime:
        assert runtime.plan is not None
        assert "a KV cache of type q4_0" in runtime.target.notice
        assert runtime.memory().plan is runtime.plan
        assert runtime.memory().prefix_cache.memory_limit_bytes == runtime.plan.prefix_cache_bytes
        assert runtime.plan.total_bytes <= total - 1
    with raises(MemoryBudgetError, "3840"):
        edgespec.load("demo", "none", context=4096, kv_type="q8_0", memory=total - 1, threads=1)


def test_an_unknown_preference_is_rejected() -> None:
    with raises(OptionError, "speed, context", "'beauty'", option="prefer"):
        edgespec.load("demo", prefer="beauty")


def test_plan_in_the_python_api(tmp_path: Path) -> None:
    preview = edgespec.plan("demo", memory="1GiB", context=2048)
    assert preview.plan.fits
    assert (preview.target, preview.draft) == ("demo", "demo-draft")
    with pytest.raises(edgespec.EdgespecError):
        edgespec.plan(str(tmp_path / "none.gguf"))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="address spaces are limited there")
@pytest.mark.parametrize("memory", [None, "8GiB"])
def test_plan_and_load_agree_under_an_address_limit(memory: str | None) -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (480 << 20, 480 << 20));"
        "import edgespec; asked = {'draft': 'none', 'method': 'none', 'memory': %r};"
        "budget = edgespec.%s.plan.budget; print(budget.bytes, budget.source)"
    )
    said = set()
    for made in ("plan('demo', **asked)", "load('demo', **asked)"):
        command = [sys.executable, "-c", program % (memory, made)]
        said.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    (budget,) = said
    assert "ulimit -v" in budget


@pytest.mark.long
def test_weights_are_not_widened_without_room_in_the_plan(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    path = write_checkpoint(tmp_path / "llama", "llama", dtype="bfloat16")
    options: dict[str, Any] = {"draft": "none", "method": "none", "context": 512}
    with edgespec.load(str(path), **options) as runtime:
        assert runtime.plan is not None
        needed = runtime.plan.total_bytes
        widened = runtime.target.weight_bytes
    with edgespec.load(str(path), **options, memory=needed - 1) as runtime:
        assert runtime.plan is not None
        assert [each.what for each in runtime.plan.decisions] == ["16-bit weights, not converted to float32"]
        assert runtime.target.weight_bytes < 0.6 * widened


@pytest.mark.parametrize(("given", "layers"), [(None, 3), (0, 0), (9, 9)])
def test_the_draft_model_can_have_its_own_number_of_layers_on_the_gpu(given: int | None, layers: int) -> None:
    drafting = DraftingOptions.of(method="model", gpu_layers=3, draft_gpu_layers=given)
    options = draft_load_options(LoadOptions(gpu_layers=3), drafting, 512, None)
    assert options.gpu_layers == layers


@pytest.mark.parametrize(("planned", "layers"), [(None, None), (3, None), (0, 0)])
def test_the_draft_model_stays_on_the_gpu_when_the_plan_moves_layers_of_the_target(
    planned: int | None, layers: int | None
) -> None:
    options = draft_load_options(LoadOptions(gpu_layers=planned), DraftingOptions.of(), 512, None)
    assert options.gpu_layers == layers


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 20 MiB, as far as planning goes."""
    card = Gpu("GPU0", "card", 20 * 2**20, 20 * 2**20, has_own_memory=True)
    monkeypatch.setattr(devices, "cards", lambda: (card,))


def test_too_many_layers_on_the_gpu_are_advised_against(small_card: None) -> None:
    options: dict[str, Any] = {"context": 4096, "kv_type": "f16", "reserve": "0", "headroom": "0"}
    fewer = edgespec.plan("demo", "none", **options)
    assert fewer.plan.fits
    assert fewer.plan.decisions
    with pytest.raises(MemoryBudgetError) as error:
        edgespec.load("demo", "none", gpu_layers=99, **options)
    (layers,) = re.findall(r"--gpu-layers (\d+) or less", error.value.next_step)
    assert edgespec.plan("demo", "none", gpu_layers=int(layers), **options).plan.fits


@pytest.mark.parametrize("formats", [("gguf",), ("gguf", "gguf"), ("mlx", "gguf")])
def test_the_gpu_of_either_model_has_a_budget(small_card: None, formats: tuple[str, ...]) -> None:
    arguments = DraftingOptions.of(reserve="0").arguments
    assert budget_for([backend_of(each) for each in formats], arguments).gpu_bytes == 20 * 2**20
    assert budget_for([backend_of("mlx")], arguments).gpu_bytes is None


def test_cards_of_different_sizes_hold_less_than_one_card_of_their_size(
    small_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"context": 4096, "kv_type": "f16", "reserve": "0", "headroom": "0"}
    one = edgespec.plan("demo", "none", **options).plan
    sizes = 15 * 2**20, 5 * 2**20
    two_cards = tuple(Gpu(f"GPU{i}", "card", size, size, has_own_memory=True) for i, size in enumerate(sizes))
    monkeypatch.setattr(devices, "cards", lambda: two_cards)
    two = edgespec.plan("demo", "none", **options).plan
    assert two.fits
    assert two.budget.gpu_bytes == one.budget.gpu_bytes
    used = [sum(i.bytes for i in plan.items if (i.kind, i.pool) == ("weights", "gpu")) for plan in (one, two)]
    assert 0 < used[1] <= used[0]
    assert any(item.kind == "unusable" for item in two.items)


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "moe.gguf", layers=64)


def test_experts_that_do_not_fit_on_the_gpu_stay_in_main_memory(small_card: None, moe: Path) -> None:
    options: dict[str, Any] = {"context": 512, "reserve": "0", "headroom": "0"}
    whole = edgespec.plan(str(moe), "none", **options).plan.planned_bytes("gpu")
    free = {"reserve": 20 * 2**20 - whole + 5 * 2**20 // 2}
    plan = edgespec.plan(str(moe), "none", **options | free).plan
    experts = plan.experts
    assert experts is not None
    assert plan.fits
    assert experts.layers == 64
    assert 0 < experts.layers_in_memory < 64
    assert 0 <= plan.free_bytes("gpu") < experts.gpu_bytes // (64 - experts.layers_in_memory)
    assert [each.what for each in plan.decisions] == [
        f"the experts of {experts.layers_in_memory} layers in main memory"
    ]
    report = plan.to_json()["experts"]
    assert report["memory_bytes"] + report["gpu_bytes"] == sum(expert_bytes(str(moe)).values())
    # One layer fewer in main memory does not fit on the GPU.
    fixed = options | free | {"experts": experts.layers_in_memory - 1, "gpu_layers": 99}
    with pytest.raises(MemoryBudgetError) as error:
        edgespec.load(str(moe), "none", **fixed)
    assert f"--experts {experts.layers_in_memory} or more" in error.value.next_step


@pytest.mark.parametrize(("experts", "in_memory"), [("auto", 0), ("gpu", 0), (3, 3), ("cpu", 64), (99, 64)])
def test_experts_are_where_the_option_says(
    small_card: None, moe: Path, experts: str | int, in_memory: int
) -> None:
    options: dict[str, Any] = {"context": 512, "reserve": "0"}
    preview = edgespec.plan(str(moe), "none", experts=experts, **options)
    shares = preview.plan.experts
    assert shares is not None
    assert shares.layers_in_memory == in_memory
    assert shares.memory_bytes == in_memory * expert_bytes(str(moe))[0]
    assert preview.plan.unused_experts == ""
    all_on_gpu = edgespec.plan(str(moe), "none", experts="gpu", **options).plan
    weights, others = (
        sum(item.bytes for item in each.items if (item.kind, item.pool) == ("weights", "gpu"))
        for each in (preview.plan, all_on_gpu)
    )
    assert others - weights == shares.memory_bytes


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"experts": 3}, "llama.cpp cannot use a GPU on this machine"),
        ({"experts": "gpu"}, "llama.cpp cannot use a GPU on this machine"),
        ({"experts": "auto"}, ""),
    ],
)
def test_an_option_for_experts_without_effect_is_reported(
    moe: Path, options: dict[str, Any], why: str
) -> None:
    preview = edgespec.plan(str(moe), "none", **options)
    notice = f"--experts has no effect: {why}" if why else ""
    assert preview.plan.unused_experts == notice
    assert preview.plan.experts is None
    with edgespec.load(str(moe), "none", method="none", exactness="off", **options) as runtime:
        assert ("--experts" in runtime.target.notice) == bool(why)
        assert notice in runtime.target.notice


@pytest.mark.parametrize(
    ("target", "gpu_layers", "why"), [("demo", None, "has no experts"), ("moe", 0, "--gpu-layers 0")]
)
def test_other_reasons_why_experts_stay(
    small_card: None, request: pytest.FixtureRequest, target: str, gpu_layers: int | None, why: str
) -> None:
    path = target if target == "demo" else str(request.getfixturevalue("moe"))
    plan = edgespec.plan(path, "none", experts="cpu", gpu_layers=gpu_layers, context=512).plan
    assert why in plan.unused_experts
    assert plan.to_json()["why_experts_stay"] == plan.why_experts_stay


@pytest.mark.parametrize("value", [-1, "some", 1.5, True])
def test_an_invalid_value_for_experts_is_refused(value: Any) -> None:
    with raises(OptionError, "or a number of layers"):
        edgespec.plan("demo", "none", experts=value)


def test_models_prepared_for_early_exit_count_towards_the_gpu(small_card: None, demo_in_halves: Path) -> None:
    options: dict[str, Any] = {"context": 512, "reserve": "0", "method": "layerskip"}
    plans = {
        layers: edgespec.plan(str(demo_in_halves), "none", gpu_layers=layers, **options).plan
        for layers in (None, 4, 0)
    }
    weights = {
        layers: {item.pool: item.bytes for item in plan.items if item.kind == "weights"}
        for layers, plan in plans.items()
    }
    assert weights[None]["gpu"] > weights[4]["gpu"] > 0
    assert "gpu" not in weights[0]
    assert {item.pool for item in plans[None].items if item.kind == "cache"} == {"gpu"}
