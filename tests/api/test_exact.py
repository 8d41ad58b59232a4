"""`--exact`: replies equal plain decoding from an empty cache, whatever is in the caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import Reply, Runtime
from edgespec.api.loading import always_draft
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.backends.llamacpp.weight_stream import can_stream
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import OptionError
from edgespec.loading import exact
from edgespec.loading.attention_speed import AttentionSpeed
from edgespec.loading.bit_exactness import WidthClass
from edgespec.loading.constants import MAX_TESTED_WIDTH
from edgespec.loading.exact import load_exact_target
from edgespec.loading.load_request import LoadRequest
from edgespec.loading.pairing import find_pair
from edgespec.loading.prefix_cache_options import file_states
from edgespec.methods.costs import target_costs
from edgespec.methods.costs.curve import measure_costs
from edgespec.model import registry
from edgespec.model.registry import backend_of
from edgespec.store.catalogue import models_folder
from edgespec.system.facts import Facts
from tests.backends.tiny_models import write_jamba, write_llama, write_mamba

TURNS = 5
# What a text is read in where it matters.
PIECE = 256


def reply_to(runtime: Runtime, tokens: list[int], **options: Any) -> Reply:
    stream = runtime.stream_tokens(tokens, max_tokens=10, **options)
    for _ in stream:
        pass
    return stream.reply


def day(
    target: str,
    *,
    methods: tuple[str, ...] = ("auto",),
    turns: int = TURNS,
    begin_tokens: int = 2 * PIECE + 20,
    **options: Any,
) -> tuple[Runtime, list[Reply]]:
    """Compare three interleaved chats with a runtime that processes every prompt in full.

    Two of the chats share a prefix.
    """
    options = {"context": 1024, "draft": "none", "measure_costs": False, "exactness": "bits", **options}
    replies = []
    with (
        always_draft(),
        edgespec.load(target, prefix_cache="none", **options) as fresh,
        edgespec.load(target, methods=methods, prefix_cache_memory="64MiB", **options) as runtime,
    ):
        random = np.random.default_rng(1)
        vocab = runtime.target.vocab_size

        def words(count: int) -> list[int]:
            return [int(word) for word in random.integers(vocab // 8, vocab, count)]

        begin = words(begin_tokens)
        chats = [words(30), begin + words(20), begin + words(40)]
        for turn in range(turns):
            chat = chats[turn % 3]
            chat += words(8)
            how = {"seed": turn, "temperature": 0.8 * (turn % 2)}
            reply = reply_to(runtime, chat, method=methods[turn % len(methods)], **how)
            fresh.clear_cache()
            assert reply.tokens == reply_to(fresh, chat, method="none", **how).tokens
            replies.append(reply)
            chat += reply.tokens
        return runtime, replies


def test_bit_exact_model_reuses_prefixes_and_verifies_drafts() -> None:
    runtime, replies = day("demo", draft="auto", methods=("auto", "model", "suffix"))
    able = runtime.target.capabilities
    assert able.exact
    assert able.prefix_reuse_exact
    assert able.max_width > 8
    assert sum(reply.stats.drafted_tokens for reply in replies) > TURNS
    # The third chat starts like the second one, and the fourth turn continues the whole first chat.
    assert replies[2].stats.cached_prompt_tokens >= 2 * PIECE + 20
    assert replies[3].stats.cached_prompt_tokens >= 30 + 8 + len(replies[0].tokens) - 1


@pytest.fixture(scope="module")
def rounding(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose prompts are rounded differently from its replies.

    llama.cpp multiplies Q3_K weights with other kernels for prompts, and edgespec has no kernels for them.
    """
    path = tmp_path_factory.mktemp("rounding") / "demo-q3_k_s.gguf"
    quantise(models_folder() / "demo-target-q8_0.gguf", path, "Q3_K_S")
    return str(path)


def test_generated_tokens_that_round_differently_are_read_again(rounding: str) -> None:
    options: dict[str, Any] = {"draft": "demo-draft", "methods": ("auto", "model")}
    runtime, replies = day(rounding, begin_tokens=PIECE + 20, **options)
    assert runtime.target.capabilities.exact
    assert not runtime.target.capabilities.prefix_reuse_exact
    # Only full blocks of the prompt are reused. The last one contains a token that was computed alone, and is
    # reused only if it was read again in idle time.
    assert runtime.target.capabilities.reuse_block_tokens == 16
    shared, first, second = PIECE + 20, replies[0].stats.prompt_tokens - 1, replies[1].stats.prompt_tokens - 1
    cached = [reply.stats.cached_prompt_tokens for reply in replies]
    assert cached[:2] == [0, 0]
    for found, count in zip(cached[2:], (shared, first, second), strict=True):
        assert found in (count // 16 * 16, count // 16 * 16 + 16)


def test_failed_commit_does_not_affect_later_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unused cell in the KV cache changes the order of the other cells."""

    def no_memory(*_: Any) -> None:
        raise MemoryError

    with (
        edgespec.load("demo", "none", kv_type="f16", context=512, measure_costs=False) as runtime,
        runtime.borrowed_target() as model,
    ):
        model.prefill(list(range(20, 120)))
        model.verify(TokenTree((5, 6, 7), (-1, 0, 0), (None,) * 3))
        with monkeypatch.context() as patch:
            patch.setattr(LlamaContext, "export_sequence", no_memory)
            with pytest.raises(MemoryError):
                model.commit((2,))
        model.truncate(0)
        model.prefill([9] * model.free_tokens)
        assert model.length == 512


@pytest.mark.parametrize("write", [write_llama, write_jamba])
def test_exact_with_other_architectures(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / "tiny.gguf")
    runtime, _ = day(str(path), methods=("suffix",))
    assert runtime.target.capabilities.exact


def test_replaying_model_reads_the_whole_prompt_if_replay_rounds_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, these tokens would share a pass with a decoding step or with later prompt tokens."""
    widths: list[int] = []
    run = LlamaCppModel.verify

    def noted(model: LlamaCppModel, tree: TokenTree, first: int = 0) -> HostLogits:
        widths.append(tree.width)
        return run(model, tree, first)

    monkeypatch.setattr(LlamaCppModel, "verify", noted)
    path = write_mamba(tmp_path / "tiny.gguf")
    with edgespec.load(str(path), "none", context=512, exactness="bits", measure_costs=False) as runtime:
        widths.clear()
        tokens = list(range(40, 70))
        exactness = runtime.target.exactness
        assert exactness is not None
        # Whether passes over several tokens round differently depends on how llama.cpp was built.
        reused = len(tokens) - 1 if len(exactness.widths) > 1 else 0
        for cached in (0, reused):
            assert reply_to(runtime, tokens).stats.cached_prompt_tokens == cached
        assert reused or set(widths) == {1}


def test_exact_with_mlx(tmp_path: Path) -> None:
    tiny_checkpoints = pytest.importorskip("tests.backends.mlx.tiny_checkpoints")
    path = tiny_checkpoints.write_checkpoint(tmp_path / "tiny", "llama", quantisation=("affine", 8, 32))
    runtime, _ = day(str(path), methods=("suffix",), turns=4, begin_tokens=80, context=256)
    assert runtime.target.capabilities.exact


@pytest.mark.long
def test_exact_with_a_trained_mlx_pair() -> None:
    pytest.importorskip("mlx.core")
    runtime, _ = day("demo-mlx", draft="auto", turns=2, begin_tokens=80)
    assert runtime.target.capabilities.exact


def test_bit_exactness_is_probed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    said: list[str] = []

    def progress(what: str, _fraction: float) -> bool:
        said.append(what)
        return True

    for times in (1, 0):
        said.clear()
        with edgespec.load("demo", "none", context=512, progress=progress) as runtime:
            assert runtime.target.capabilities.exact
        assert any("testing the model" in what for what in said) == bool(times)


def test_the_trial_is_repeated_for_another_build_or_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    tried: list[str] = []

    def load(name: str, draft: str = "none", **options: Any) -> None:
        def progress(what: str, _fraction: float) -> bool:
            if "testing the model" in what and name not in tried:
                tried.append(name)
            return True

        with edgespec.load("demo", draft, progress=progress, measure_costs=False, **options):
            pass

    load("first", context=512)
    load("again", context=512)
    load("other drafters", "demo-draft", context=512, exactness="bits")
    load("other option", context=512, kv_type="f16")
    with monkeypatch.context() as patch:
        # With few cores, the test would not notice that results depend on the number of threads.
        patch.setattr(exact, "usable_cores", lambda: 1000)
        load("other cores", context=512)
    backend = backend_of("gguf")
    changed = replace(backend, build_identity=lambda: "another build")
    monkeypatch.setattr("edgespec.backends.built_in.BUILT_IN", (changed,))
    monkeypatch.setattr(registry, "_built_in", lambda: (changed,))
    load("other build", context=512)
    assert tried == ["first", "other option", "other cores", "other build"]


def test_results_for_one_number_of_threads_are_used_only_with_that_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(model: LlamaCppModel, *_: Any) -> list[WidthClass]:
        model.set_max_threads(3)
        return [WidthClass((1, 2, 3), any_threads=False)]

    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(exact, "find_width_classes", find)
    monkeypatch.setattr(target_costs, "usable_cores", lambda **_: 4)
    for _ in range(2):
        with edgespec.load("demo", "none", context=512, exactness="bits", measure_costs=False) as runtime:
            runtime._costs.choose_threads(again=True)
            with runtime.borrowed_target() as model:
                model.verify(TokenTree.chain(1))
                assert model.threads == model.max_threads == 3


def test_damaged_results_are_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        with edgespec.load("demo", "none", context=512, measure_costs=False) as runtime:
            assert runtime.target.capabilities.max_width > 1
        Facts().path.write_bytes(b"damaged")


def test_exactness_off_restricts_nothing() -> None:
    with edgespec.load("demo", "none", context=256, exactness="off") as runtime:
        assert not runtime.target.capabilities.exact
        found = runtime.target.exactness
        assert found is not None
        assert (found.requested, found.bits, found.widths) == ("off", False, ())
        assert "rounding" not in runtime.target.notice


def test_exact_is_short_for_bits_and_contradicts_off() -> None:
    with edgespec.load("demo", "none", context=256, exact=True, measure_costs=False) as runtime:
        assert runtime.target.exactness is not None
        assert runtime.target.exactness.requested == "bits"
    with pytest.raises(OptionError):
        edgespec.load("demo", "none", exact=True, exactness="off")


def test_parallel_replies_say_that_they_can_differ() -> None:
    with edgespec.load("demo", "none", context=256, parallel=2, measure_costs=False) as runtime:
        assert runtime.target.exactness is not None
        assert not runtime.target.exactness.bits
        assert runtime.target.exactness.reason in runtime.target.notice


def _curve(*seconds: float) -> Callable[[int], float]:
    return lambda width: seconds[width - 1] if width <= len(seconds) else seconds[-1] * width


_SINGLE, _PAIRS = WidthClass((1,)), WidthClass(tuple(range(2, 18)))


@pytest.mark.parametrize(
    ("requested", "seconds", "chosen"),
    [
        # Padding plain decoding costs 1 %, and drafting pays.
        ("auto", (1.0, 1.01, 1.02, 1.03), _PAIRS),
        # Padding costs too much, and so does decoding single tokens, so passes are not restricted.
        ("auto", (1.0, 1.4, 1.45, 1.5, 1.55), None),
        # No width pays, so nothing is lost.
        ("auto", (1.0, 2.0, 3.0, 4.0), _SINGLE),
        ("bits", (1.0, 1.4, 1.45, 1.5, 1.55), _PAIRS),
    ],
)
def test_the_class_is_chosen_by_its_expected_speed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    requested: str,
    seconds: tuple[float, ...],
    chosen: WidthClass | None,
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(exact, "find_width_classes", lambda *_: [_SINGLE, _PAIRS])
    monkeypatch.setattr(exact, "compare_attention", lambda *_: None)
    _set_busy(monkeypatch, False)
    monkeypatch.setattr(exact._ExactLoading, "_measure", lambda *_, **_options: _curve(*seconds))
    with edgespec.load("demo", "none", context=256, exactness=requested, measure_costs=False) as runtime:
        found = runtime.target.exactness
    assert found is not None
    assert found.widths == (chosen.widths if chosen else ())
    assert found.bits == (chosen is not None)


_COMPLETE = WidthClass(tuple(range(1, 18)), trees=True, block_tokens=1, is_complete=True)


@pytest.mark.parametrize(
    ("requested", "classes", "attention", "is_kept", "speed"),
    [
        ("auto", [_COMPLETE], None, True, 1.0),
        ("auto", [_COMPLETE], AttentionSpeed(1.2, 1.1), True, 1.0),
        ("auto", [_COMPLETE], AttentionSpeed(0.98, 0.97), True, 0.98),
        # Decoding is too slow.
        ("auto", [_COMPLETE], AttentionSpeed(0.95, 2.0), False, 0.95),
        # Only reading prompts is slower, which the reason says.
        ("auto", [_COMPLETE], AttentionSpeed(1.0, 0.5), True, 1.0),
        ("bits", [_COMPLETE], AttentionSpeed(0.5, 0.5), True, 0.5),
        # Padding costs 2 %, and the kernels cost 2 % as well.
        ("auto", [_SINGLE, _PAIRS], AttentionSpeed(0.98, 1.0), False, 0.98 / 1.02),
    ],
)
def test_the_kernels_for_equal_bits_count_towards_the_expected_speed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    requested: str,
    classes: list[WidthClass],
    attention: AttentionSpeed | None,
    is_kept: bool,
    speed: float,
) -> None:
    compared = []

    def compare(*_: Any) -> AttentionSpeed | None:
        compared.append(1)
        return attention

    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(exact, "find_width_classes", lambda *_: classes)
    monkeypatch.setattr(exact, "compare_attention", compare)
    _set_busy(monkeypatch, False)
    seconds = _curve(1.0, 1.02, 1.03, 1.04, 1.05)
    monkeypatch.setattr(exact._ExactLoading, "_measure", lambda *_, **_options: seconds)
    for _ in range(2):
        with edgespec.load("demo", "none", context=256, exactness=requested, measure_costs=False) as runtime:
            found = runtime.target.exactness
            with runtime.borrowed_target() as model:
                uses_exact_kernels = model.options.exact  # type: ignore[attr-defined]
        assert found is not None
        assert found.bits == is_kept
        # Without a class, the kernels are used only if they are fast.
        assert uses_exact_kernels == (is_kept or len(classes) > 1)
        assert found.expected_speed == pytest.approx(speed)
        assert ("more time" in found.reason) == (not is_kept)
        reads_slowly = attention is not None and attention.prompt < 0.97
        assert ("faster" in found.reason) == (is_kept and (speed < 0.99 or reads_slowly))
    # The result is saved.
    assert len(compared) == 1


def _set_busy(monkeypatch: pytest.MonkeyPatch, is_busy: bool) -> None:
    monkeypatch.setattr(exact, "_machine_is_busy", lambda: is_busy)
    monkeypatch.setattr(exact, "_was_disturbed", lambda _began: is_busy)


def test_the_passes_of_the_chosen_class_are_measured_only_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = []

    def noted(model: Any, **options: Any) -> Any:
        measured.append(options.get("widths"))
        return measure_costs(model, **options)

    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(exact, "find_width_classes", lambda *_: [WidthClass((1, 2, 3))])
    monkeypatch.setattr(target_costs, "measure_costs", noted)
    # On a busy machine, a pass can suddenly take much longer than before, which would trigger a new
    # measurement.
    monkeypatch.setattr(target_costs, "MAX_STEP_RATIO", 1e9)
    with edgespec.load("demo", "none", context=512, exactness="bits") as runtime:
        curve = runtime._costs.curve()
    # Only the duration of a single-token pass is compared with the saved curve.
    assert set(measured) == {()}
    assert curve.widths == (1, 2, 3)


def test_speeds_measured_on_a_busy_machine_are_measured_again_when_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trials = []

    def find(*_: Any) -> list[WidthClass]:
        trials.append(1)
        return [_SINGLE, _PAIRS]

    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(exact, "find_width_classes", find)
    monkeypatch.setattr(exact._ExactLoading, "_measure", lambda *_, **_options: _curve(1.0, 1.0, 1.0))
    counts = []
    for is_busy in (True, True, False, False):
        _set_busy(monkeypatch, is_busy)
        edgespec.load("demo", "none", context=512, measure_costs=False).close()
        counts.append(len(trials))
    # The demo is tried repacked and as it is in the file.
    each = counts[0]
    assert counts == [each, each, 2 * each, 2 * each]


@pytest.mark.skipif(not can_stream(), reason="weights are streamed only on a Linux CPU")
def test_durations_are_measured_again_if_another_number_of_layers_is_streamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wide pass that is free while the disk is slower than the processor can otherwise be expensive."""
    trials, measured, padded = [], [], WidthClass((MAX_TESTED_WIDTH,))

    def find(*_: Any) -> list[WidthClass]:
        trials.append(1)
        return [_SINGLE, padded]

    def measure(loading: Any, *_: Any, **_options: Any) -> Any:
        measured.append(loading.options.streamed_layers)
        return _curve(1.0, 3.0) if loading.options.streamed_layers < 3 else lambda _width: 1.0

    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(exact, "find_width_classes", find)
    monkeypatch.setattr(exact._ExactLoading, "_measure", measure)
    # A busy machine would be another reason to measure again.
    _set_busy(monkeypatch, False)
    request = LoadRequest.read("demo", "none", {"context": 256})
    pair = find_pair(request.target, request.draft, request.drafting, None, request.options)
    for layers, widths in ((100, padded.widths), (2, _SINGLE.widths), (100, padded.widths)):
        loaded = load_exact_target(
            pair,
            replace(request.options, streamed_layers=layers),
            "auto",
            exits_early=False,
            measures_costs=False,
            file_states=file_states(pair.target.path, ()),
            progress=None,
        )
        assert loaded.exactness.widths == widths
        loaded.close()
    assert len(trials) == 1
    assert measured == [100, 2]


def test_the_first_real_model_keeps_its_tokens_by_default(smollm2: Path) -> None:
    """See `test_exact_real.py` for its other quantisations."""
    with (
        always_draft(),
        edgespec.load(str(smollm2), "none", context=512, threads=1, measure_costs=False) as runtime,
    ):
        assert runtime.target.capabilities.exact
        for seed, prompt in enumerate(("What is the capital of France?", "Repeat: one two one two one two")):
            options: dict[str, Any] = {"max_tokens": 32, "seed": seed, "temperature": 0.8 * seed}
            plain = runtime.generate(prompt, method="none", **options)
            drafted = runtime.generate(prompt, method="suffix+ngram", **options)
            assert drafted.tokens == plain.tokens
            assert drafted.stats.drafted_tokens


def test_a_reply_is_read_again_in_idle_time(rounding: str) -> None:
    options: dict[str, Any] = {"context": 1024, "exactness": "bits", "measure_costs": False}
    chat = list(range(300, 300 + PIECE - 4))
    with (
        edgespec.load(rounding, "none", method="none", **options) as runtime,
        edgespec.load(rounding, "none", method="none", prefix_cache="none", **options) as fresh,
    ):
        assert runtime.target.capabilities.reuse_block_tokens > 1
        chat += reply_to(runtime, chat).tokens
        deadline = monotonic() + 20.0
        while runtime._session._target_cache.has_reply_to_read and monotonic() < deadline:
            sleep(0.05)
        chat += [5, 6, 7]
        reply = reply_to(runtime, chat, seed=1)
        assert reply.stats.cached_prompt_tokens == PIECE
        assert reply.tokens == reply_to(fresh, chat, seed=1).tokens
