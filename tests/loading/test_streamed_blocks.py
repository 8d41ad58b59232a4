"""Low-bit copies of streamed blocks: what is prepared and when it is used. Replies stay the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import edgespec
from edgespec.backends.llamacpp import substitutes
from edgespec.backends.llamacpp.substitutes import substitute_bytes
from edgespec.backends.llamacpp.weight_stream import FEED_FORWARD, can_stream, streamable_layers
from edgespec.cli.program import program
from edgespec.errors import CapabilityError, EdgespecError, MemoryBudgetError, ModelFileError, OptionError
from edgespec.loading import constants, planning
from edgespec.loading.prepare.lowbit import write_substitutes
from edgespec.loading.streamed_blocks import prepare_substitutes
from edgespec.methods.lowbit.drafter import SUBSTITUTES_FILE, find_substitutes
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.memory_estimate import MemoryEstimate, MemoryPart
from edgespec.model.registry import FileFormat
from edgespec.store.prepared_files import PreparedModel, check_prepared
from tests.backends.tiny_heads import write_eagle
from tests.backends.tiny_models import write_llama, write_mamba
from tests.cases import first
from tests.raising import raises

pytestmark = pytest.mark.skipif(not can_stream(), reason="weights are streamed only on a Linux CPU")

_LAYERS, _MIB = 32, 2**20
_PROMPT = "List the files of the file, the list of files, the files."


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of 100 MB that consists almost entirely of feed-forward blocks."""
    path = tmp_path_factory.mktemp("big") / "big.gguf"
    return write_llama(path, layers=_LAYERS, feed_forward=8192)


@pytest.fixture(scope="module", autouse=True)
def own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def memory_bytes(big: Path) -> int:
    """Return a budget for which about two thirds of the model must be streamed."""
    return int(_plan(big, 1 << 40).plan.total_bytes) - 40 * _MIB


@pytest.fixture(scope="module")
def prepared(big: Path, memory_bytes: int) -> PreparedModel:
    return prepare_substitutes(big, memory_bytes, "Q4_0")


def _plan(path: Path, memory: int, **options: Any) -> Any:
    return edgespec.plan(str(path), "none", memory=memory, **options)


def test_only_the_streamed_blocks_are_copied(big: Path, memory_bytes: int, prepared: PreparedModel) -> None:
    file = prepared.path(SUBSTITUTES_FILE)
    layers = [int(layer) for layer in prepared.facts["layer_bytes"]]
    streamable = [layer.layer for layer in streamable_layers(big)]
    assert 3 < len(layers) < len(streamable)
    assert set(layers) < set(streamable)
    names = {tensor.name for tensor in read_header(file).tensors}
    assert names == {f"blk.{layer}.ffn_{part}.weight" for layer in layers for part in ("up", "gate", "down")}
    assert substitute_bytes(file) == {int(k): size for k, size in prepared.facts["layer_bytes"].items()}
    assert prepared.facts["weight_bytes"] == sum(substitute_bytes(file).values())
    assert prepared.facts["weight_bytes"] < file.stat().st_size < prepared.facts["weight_bytes"] + _MIB
    source = {t.name: t.elements for t in read_header(big).tensors if FEED_FORWARD.fullmatch(t.name)}
    assert prepared.facts["streamed_bytes"] == 4 * sum(source[name] for name in names)
    check_prepared(prepared, big, full=True)
    written = file.stat().st_mtime_ns
    assert prepare_substitutes(big, memory_bytes, "q4_0") == prepared
    assert file.stat().st_mtime_ns == written
    assert [path.name for path in prepared.folder.iterdir() if path.suffix == ".gguf"] == [SUBSTITUTES_FILE]


def test_the_plan_counts_the_copies(big: Path, memory_bytes: int, prepared: PreparedModel) -> None:
    plan = _plan(big, memory_bytes).plan
    assert plan.fits
    assert not plan.decisions
    assert plan.streaming is not None
    assert plan.streaming.layers == len(prepared.facts["layer_bytes"])
    assert plan.streaming.substitute_bytes == prepared.facts["weight_bytes"]
    sizes = {item.kind: item.bytes for item in plan.items if item.role == "low-bit copy"}
    assert sizes["weights"] == prepared.facts["weight_bytes"]
    assert set(sizes) == {"weights", "cache", "compute", "output", "vocabulary"}
    assert plan.to_json()["streaming"]["substitute_bytes"] == sizes["weights"]
    assert "low-bit copies of these parts" in plan.streaming.text
    # One layer fewer would not fit.
    streamed = prepared.facts["streamed_bytes"] // plan.streaming.layers
    copy = prepared.facts["weight_bytes"] // plan.streaming.layers
    assert plan.free_bytes("memory") < streamed - copy


def test_fewer_copies_are_loaded_if_there_is_more_memory(
    big: Path, memory_bytes: int, prepared: PreparedModel
) -> None:
    plan = _plan(big, memory_bytes + 8 * _MIB).plan
    assert plan.streaming is not None
    assert plan.streaming.layers < len(prepared.facts["layer_bytes"])
    assert 0 < plan.streaming.substitute_bytes < prepared.facts["weight_bytes"]


@pytest.mark.parametrize("more", [-20, 50])
def test_copies_for_another_amount_of_memory_are_not_used(
    big: Path, memory_bytes: int, prepared: PreparedModel, more: int
) -> None:
    memory = memory_bytes + more * _MIB
    plan = _plan(big, memory).plan
    assert plan.fits
    assert (plan.streaming is None) == (more > 0)
    assert not any(item.role == "low-bit copy" for item in plan.items)
    with raises(OptionError, "for a different amount of memory", code="method_unavailable"):
        _loaded(big, memory, "lowbit")


@pytest.mark.parametrize("options", [{"draft": "demo-draft"}, {"method": "none"}, {"method": "suffix"}])
def test_copies_are_only_used_if_nothing_else_drafts(
    big: Path, memory_bytes: int, prepared: PreparedModel, options: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"draft": "none"} | options
    plan = edgespec.plan(str(big), memory=memory_bytes + 20 * _MIB * ("draft" in options), **given).plan
    assert not any(item.role == "low-bit copy" for item in plan.items)


def test_copies_are_not_used_with_a_draft_head(
    big: Path, memory_bytes: int, prepared: PreparedModel, tmp_path: Path
) -> None:
    head = write_eagle(tmp_path / "eagle3-big.gguf", layers=(0, 1, 2))
    plan = _plan(big, memory_bytes + 20 * _MIB, head=str(head)).plan
    assert plan.streaming is not None
    assert not plan.streaming.substitute_bytes


def test_copies_are_used_if_no_draft_head_fits(
    big: Path, memory_bytes: int, prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = FileFormat.estimate_head

    def with_weights(count: int) -> Any:
        def estimate_head(*arguments: Any) -> MemoryEstimate:
            made = estimate(*arguments)
            return replace(made, parts=(*made.parts, MemoryPart("weights", count)))

        return estimate_head

    head = write_eagle(big.with_name("eagle3-big.gguf"), layers=(0, 1, 2))
    try:
        for count, uses_copies in ((0, False), (memory_bytes, True)):
            monkeypatch.setattr(FileFormat, "estimate_head", with_weights(count))
            # The hidden states for a head take more memory.
            planned = _plan(big, memory_bytes + (4 if uses_copies else 16) * _MIB)
            roles = {item.role for item in planned.plan.items}
            assert planned.plan.fits
            assert planned.plan.streaming is not None
            assert bool(planned.plan.streaming.substitute_bytes) == uses_copies
            assert ("low-bit copy" in roles, "head" in roles) == (uses_copies, not uses_copies)
            assert len(planned.plan.decisions) == uses_copies
    finally:
        head.unlink()


def test_copies_are_not_planned_for_replies_that_share_passes(big: Path, prepared: PreparedModel) -> None:
    options = {"parallel": 2, "method": "auto"}
    memory = int(_plan(big, 1 << 40, **options).plan.total_bytes) - 25 * _MIB
    plan = _plan(big, memory, **options).plan
    assert plan.streaming is not None
    assert not plan.streaming.substitute_bytes
    assert not any(item.role == "low-bit copy" for item in plan.items)


def test_copies_that_are_prepared_again_are_used_again(
    big: Path, memory_bytes: int, prepared: PreparedModel
) -> None:
    others = prepare_substitutes(big, memory_bytes + 8 * _MIB, "Q4_0")
    assert find_substitutes(big) == others != prepared
    assert prepare_substitutes(big, memory_bytes, "Q4_0") == prepared
    assert find_substitutes(big) == prepared


def test_the_newest_copies_that_fit_are_used(big: Path, memory_bytes: int, prepared: PreparedModel) -> None:
    """Copies for more memory contain fewer blocks, so with less memory, too few blocks can be streamed."""
    others = prepare_substitutes(big, memory_bytes + 8 * _MIB, "Q4_0")
    assert find_substitutes(big) == others
    assert others.facts["weight_bytes"] < prepared.facts["weight_bytes"]
    for memory, expected in ((memory_bytes, prepared), (memory_bytes + 8 * _MIB, others)):
        plan = _plan(big, memory).plan
        assert plan.streaming.substitute_bytes == expected.facts["weight_bytes"]
    with _loaded(big, memory_bytes, "lowbit") as runtime:
        reply = _tokens(runtime, 0.0, "lowbit")
        assert reply.stats.draft_weight_bytes == prepared.facts["weight_bytes"]


def test_auto_loads_the_model_if_the_copies_cannot_be_loaded(
    big: Path, memory_bytes: int, prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(substitutes, "_GET_TENSOR", "_ZNK11llama_model10no_such_fnEPKc")
    with raises(CapabilityError, "cannot share weights", code="lowbit_not_supported"):
        _loaded(big, memory_bytes, "lowbit")
    with _loaded(big, memory_bytes, "auto") as runtime:
        # Neither the notice nor the plan says that the copies draft.
        assert runtime.plan is not None
        assert runtime.plan.streaming is not None
        assert not runtime.plan.streaming.substitute_bytes
        assert not [item for item in runtime.plan.items if item.role == "low-bit copy"]
        assert runtime.plan.streaming.text in runtime.target.notice
        assert "cannot share weights" in runtime.target.notice
        assert len(_tokens(runtime, 0.0, "suffix").tokens)
        with raises(OptionError, "cannot share weights", code="method_unavailable"):
            _tokens(runtime, 0.0, "lowbit")


def _loaded(path: Path, memory: int, method: str, **options: Any) -> edgespec.Runtime:
    return edgespec.load(
        str(path), "none", memory=memory, method=method, measure_costs=False, exactness="off", **options
    )


@pytest.fixture(scope="module")
def plain(big: Path, memory_bytes: int) -> dict[float, tuple[int, ...]]:
    """Replies of plain decoding with all weights in memory."""
    with edgespec.load(str(big), "none", method="none", exactness="off") as runtime:
        assert runtime.plan is not None
        assert runtime.plan.streaming is None
        return {each: _tokens(runtime, each).tokens for each in (0.0, 0.8)}


def _tokens(runtime: edgespec.Runtime, temperature: float, method: str = "none") -> edgespec.Reply:
    return runtime.generate(_PROMPT, max_tokens=20, temperature=temperature, seed=3, method=method)


@pytest.mark.parametrize("branches", first([(2, 2), (), "auto"]))
@pytest.mark.parametrize("method", first(["lowbit", "auto", "lowbit+suffix"]))
def test_replies_are_those_of_plain_decoding(
    big: Path,
    memory_bytes: int,
    prepared: PreparedModel,
    plain: dict[float, tuple[int, ...]],
    method: str,
    branches: Any,
) -> None:
    # Adaptive trees reserve more memory for the KV cache and the logits.
    memory = memory_bytes + 8 * _MIB * (branches == "auto")
    with _loaded(big, memory, method, draft_branches=branches) as runtime:
        assert runtime.plan is not None
        assert runtime.plan.streaming is not None
        for temperature, tokens in plain.items():
            reply = _tokens(runtime, temperature, method)
            assert reply.tokens == tokens
            if method != "auto":
                assert reply.stats.accepted_tokens > 0
                assert reply.stats.target_passes < len(tokens)
        assert _tokens(runtime, 0.8).tokens == plain[0.8]


@pytest.mark.real
def test_replies_of_a_real_model_are_those_of_plain_decoding(real_models: Path) -> None:
    """SmolLM2 is too small for `prepare`: the draft's KV cache takes more memory than the copies save."""
    path = real_models / "smollm2-f16.gguf"
    options: dict[str, Any] = {"context": 512, "headroom": "0", "prefix_cache": "none"}
    memory = _plan(path, 1 << 40, **options).plan.total_bytes - 20 * _MIB
    layers = [layer.layer for layer in streamable_layers(path)]
    write_substitutes(path, layers, {}, "Q4_0")
    with edgespec.load(str(path), "none", method="none", context=512) as runtime:
        plain = {each: _answer(runtime, each).tokens for each in (0.0, 0.8)}
    for branches in ((), (2, 2)):
        given = options | {"method": "lowbit", "draft_branches": branches}
        with edgespec.load(str(path), "none", memory=memory, **given) as runtime:
            assert runtime.plan is not None
            assert runtime.plan.streaming is not None
            assert runtime.plan.streaming.substitute_bytes
            for temperature, tokens in plain.items():
                reply = _answer(runtime, temperature)
                assert reply.tokens == tokens
                assert reply.stats.accepted_tokens >= 5


def _answer(runtime: edgespec.Runtime, temperature: float) -> edgespec.Reply:
    prompt = "What is the capital of France, and what is it known for?"
    return runtime.generate(prompt, max_tokens=32, temperature=temperature, seed=1)


def test_auto_drafts_with_them(big: Path, memory_bytes: int, prepared: PreparedModel) -> None:
    with _loaded(big, memory_bytes, "auto") as runtime:
        reply = runtime.generate(_PROMPT, max_tokens=8, temperature=0, method="lowbit")
        assert reply.stats.drafted_tokens
        assert reply.stats.draft_weight_bytes == prepared.facts["weight_bytes"]


def test_a_plan_without_copies_says_how_to_make_them(
    big: Path, memory_bytes: int, prepared: PreparedModel
) -> None:
    command = ["plan", "--target", str(big), "--draft", "none", "--memory", str(memory_bytes), "--method"]
    shown = {name: CliRunner().invoke(program, [*command, name]).stdout for name in ("auto", "suffix")}
    assert "low-bit copy weights" in shown["auto"]
    assert {name: "prepare lowbit" in text for name, text in shown.items()} == {"auto": False, "suffix": True}


def test_auto_ignores_copies_that_cost_too_many_reads(
    big: Path, memory_bytes: int, prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_copies = _plan(big, memory_bytes).plan.streaming
    without = _plan(big, memory_bytes, method="suffix").plan.streaming
    assert with_copies.bytes_per_pass > without.bytes_per_pass
    assert prepared.facts["streamed_without_copies_bytes"] == without.bytes_per_pass
    ratio = with_copies.bytes_per_pass / without.bytes_per_pass
    for limit, is_used in ((ratio * 1.01, True), (ratio * 0.99, False)):
        monkeypatch.setattr(planning, "MAX_READS_WITH_COPIES", limit)
        assert bool(_plan(big, memory_bytes).plan.streaming.substitute_bytes) == is_used
        assert _plan(big, memory_bytes, method="lowbit").plan.streaming.substitute_bytes
        assert prepare_substitutes(big, memory_bytes, "Q4_0") == prepared
        monkeypatch.setattr(constants, "MAX_READS_WITH_COPIES", limit)
        done = CliRunner().invoke(program, ["prepare", "lowbit", str(big), "--for-memory", str(memory_bytes)])
        assert ("auto does not use" in done.stderr) != is_used


@pytest.fixture
def damaged(prepared: PreparedModel) -> Iterator[None]:
    file = prepared.path(SUBSTITUTES_FILE)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    yield
    file.write_bytes(data)


def test_damaged_copies_are_ignored_unless_the_method_is_named(
    big: Path, memory_bytes: int, damaged: None
) -> None:
    plan = _plan(big, memory_bytes).plan
    assert plan.streaming is not None
    assert not plan.streaming.substitute_bytes
    with raises(ModelFileError, "edgespec prepare", code="prepared_outdated"):
        _plan(big, memory_bytes, method="lowbit")


@pytest.mark.parametrize(
    ("memory", "kind", "error", "says"),
    [
        (1 << 40, "Q4_0", OptionError, "no part needs a low-bit copy"),
        (200 * _MIB, "Q4_0", MemoryBudgetError, "does not fit in 200 MiB"),
        (None, "F32", OptionError, "not a quantisation type"),
        (None, "IQ1_S", CapabilityError, "importance matrix"),
    ],
)
def test_what_cannot_be_prepared_is_refused(
    big: Path, memory_bytes: int, memory: int | None, kind: str, error: type[EdgespecError], says: str
) -> None:
    with pytest.raises(error) as caught:
        prepare_substitutes(big, memory or memory_bytes, kind)
    assert says in str(caught.value)


def test_models_with_recurrent_layers_are_refused(tmp_path: Path) -> None:
    with raises(CapabilityError, code="lowbit_not_supported"):
        prepare_substitutes(write_mamba(tmp_path / "mamba.gguf"), 100 * _MIB, "Q4_0")


def test_models_without_layers_to_stream_are_refused(tmp_path: Path) -> None:
    with raises(CapabilityError, "cannot run from disk"):
        prepare_substitutes(write_llama(tmp_path / "one.gguf"), 100 * _MIB, "Q4_0")


def test_the_command(big: Path, memory_bytes: int, tmp_path: Path) -> None:
    command = ["prepare", "lowbit", str(big), "--for-memory", str(memory_bytes), "--to", str(tmp_path / "c")]
    done = CliRunner().invoke(program, [*command, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["kind"] == "substitutes"
    assert report["for_memory_bytes"] == memory_bytes
    assert report["file_bytes"] == (tmp_path / "c" / SUBSTITUTES_FILE).stat().st_size
    found = find_substitutes(big)
    assert found is not None
    assert found.folder == tmp_path / "c"
    shown = CliRunner().invoke(program, command).stdout
    assert f"Q4_0 copies of {len(report['layer_bytes'])} layers" in shown
