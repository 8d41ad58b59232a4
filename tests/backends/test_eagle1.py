"""EAGLE-1 heads: no head changes a reply, whatever the history, and wrong files are rejected."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import gguf
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import mlx
from edgespec.backends.llamacpp.matrices import FileMatrix
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError, MemoryBudgetError, ModelFileError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import Head, LanguageModel, LoadOptions
from edgespec.model.formats.head_files import head_at, head_info
from edgespec.model.hidden_states import POST_NORM, HeadModel, HiddenStateSource
from edgespec.model.registry import format_at
from edgespec.store.heads import prepare_head
from tests.backends.eagle1_targets import CONTEXT, KINDS, SIZE, YARN, head_of, load, write_eagle1, write_files
from tests.backends.head_histories import ROUNDS, Round, check_history, check_same_replies, first_logits
from tests.backends.published_heads import VOCAB
from tests.backends.tiny_models import write_llama
from tests.cases import first
from tests.model.heads.published import write_head
from tests.raising import raises


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle1")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def mlx_target(folder: Path) -> Iterator[LanguageModel]:
    model = mlx.load(str(folder / "mlx"), "mlx", LoadOptions(context_tokens=CONTEXT))
    yield model
    model.close()


@pytest.fixture
def target(folder: Path) -> Iterator[LanguageModel]:
    model = load(folder / "llama.gguf")
    yield model
    model.close()


TREE = TokenTree((12, 20, 21, 30, 31, 40), (-1, 0, 0, 1, 2, 4), (None,) * 6)


def rows_of(head: HeadModel, tree: TokenTree, first: int = 0) -> NDArray[np.float64]:
    logits = head.verify(tree, first)
    return np.array([logits.at(row, np.arange(VOCAB)) for row in range(tree.width - first)])


def level_by_level(head: HeadModel, tree: TokenTree) -> NDArray[np.float64]:
    ends = [sum(depth <= limit for depth in tree.depths) for limit in range(max(tree.depths) + 1)]
    parts = zip([0, *ends], ends, strict=False)
    return np.concatenate([rows_of(head, tree.subtree(range(end)), begin) for begin, end in parts])


def logits_in_every_state(head: HeadModel) -> list[NDArray[np.float64]]:
    """Logits of chains and trees: after a prefill in batches, a commit, a rollback, and a late start."""
    states = np.random.default_rng(5).normal(size=(120, SIZE)).astype(np.float32)
    tokens = [7 * i % VOCAB for i in range(120)]
    log = head.log
    log.append(0, states)
    head.start_at(1)
    head.prefill(tokens[1:101])
    # The target's hidden states are known for the first tokens of these drafts, but not for the others.
    log.truncate(102)
    found = [rows_of(head, TokenTree.chain(tokens[101], tokens[102:108]))]
    head.commit((1,))
    assert head.length == 103
    for length in (102, 90):
        head.truncate(length)
        log.truncate(length)
        found += [rows_of(head, TREE), level_by_level(head, TREE)]
        found.append(rows_of(head, TokenTree.chain(12, [21, 31])))
    head.start_at(60)
    head.prefill(tokens[60:70])
    log.truncate(70)
    found.append(rows_of(head, TREE))
    head.truncate(0)
    log.clear()
    return found


def check_equal(
    found: list[NDArray[np.float64]], expected: list[NDArray[np.float64]], tolerance: float
) -> None:
    """Check that the logits are equal, up to rounding errors relative to the largest logit of each row.

    A random head's hidden states grow with each step, because the layer has no final norm.
    """
    for rows, expected_rows in zip(found, expected, strict=True):
        scale = np.abs(expected_rows).max(axis=1, keepdims=True)
        np.testing.assert_allclose(rows / scale, expected_rows / scale, rtol=0, atol=tolerance)


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
_BIASES = {
    f"layer.self_attn.{name}_proj.bias": np.linspace(-2, 2, rows, dtype=np.float32)
    for name, rows in (("q", 32), ("k", 16), ("v", 16))
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "as EAGLE-Vicuna": {},
    "without bias": {"changes": {"fc.bias": None}},
    "biases of attention": {"changes": _BIASES},
    "the target's embeddings": {"changes": {"embed_tokens.weight": None}},
    "theta": {"rope_theta": 50.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": _LLAMA3},
    "llama3, context not given": {"rope_scaling": {name: _LLAMA3[name] for name in list(_LLAMA3)[:-1]}},
    "yarn": {"rope_scaling": YARN},
    "yarn with betas": {"rope_scaling": YARN | {"beta_fast": 8, "beta_slow": 2, "mscale": 0.7}},
    "pickled": {"pickled": True},
}


@pytest.mark.long
@pytest.mark.parametrize("variant", first(_VARIANTS, 4))
def test_a_head_gives_the_same_logits_as_on_mlx(
    target: LanguageModel, mlx_target: LanguageModel, tmp_path: Path, variant: str
) -> None:
    path = write_eagle1(tmp_path / "head", **_VARIANTS[variant])
    if not (path / "pytorch_model.bin").exists():
        weights = load_file(path / "model.safetensors")
        save_file({name: one.astype(np.float32) for name, one in weights.items()}, path / "model.safetensors")
    other = cast(HeadModel, mlx_target.self_draft(Head("eagle", path)))
    # ggml rounds the inputs of float16 matrices to float16.
    check_equal(
        logits_in_every_state(head_of(target, path)),
        logits_in_every_state(other),
        tolerance=5e-3 if variant == "pickled" else 1e-3,
    )
    other.close()


def test_every_variant_is_computed(target: LanguageModel, folder: Path, tmp_path: Path) -> None:
    usual = logits_in_every_state(head_of(target, folder / "head"))[0][:2]
    for number, options in enumerate(_VARIANTS.values()):
        if options and "pickled" not in options:
            head = head_of(target, write_eagle1(tmp_path / str(number), **options))
            assert np.abs(logits_in_every_state(head)[0][:2] - usual).max() > 1e-3


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_weights_keep_their_type(target: LanguageModel, tmp_path: Path, dtype: str) -> None:
    path = write_eagle1(tmp_path / "head")
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    kind = {"F16": mx.float16, "BF16": mx.bfloat16}[dtype]
    converted = {name: one.astype(kind) for name, one in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), converted)
    head = head_of(target, path)
    exact = write_eagle1(tmp_path / "exact")
    in_full = {name: np.array(one.astype(mx.float32)) for name, one in converted.items()}
    save_file(in_full, exact / "model.safetensors")
    in_float32 = head_of(target, exact)
    matrices = sum(one.size for one in weights.values() if one.ndim > 1)
    assert in_float32.facts.weight_bytes - head.facts.weight_bytes == 2 * matrices
    check_equal(
        logits_in_every_state(head), logits_in_every_state(in_float32), 5e-3 if dtype == "F16" else 5e-2
    )


@pytest.mark.parametrize("kind", first(KINDS, 3))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    folder: Path, kind: str, rounds: list[Round], seed: int
) -> None:
    check_history(
        lambda: load(folder / f"{kind}.gguf"),
        lambda target: head_of(target, folder / "head"),
        rounds,
        seed,
        depth=3,
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", first(KINDS, 3))
def test_no_head_changes_a_reply(folder: Path, kind: str) -> None:
    path, head = str(folder / f"{kind}.gguf"), folder / "head"
    asked: list[dict[str, Any]] = [
        {"max_tokens": 16, "temperature": temperature, "seed": 3} for temperature in (0.0, 0.8, 1.2)
    ]
    # The last reply may use only two tokens, so that random heads are sometimes right.
    asked.append({"max_tokens": 16, "temperature": 0.8, "seed": 4, "logit_bias": {70: 60.0, 80: 60.0}})
    recurrent = kind in ("mamba", "jamba", "lfm2")
    with edgespec.load(path, "none", method="none", context=256) as plain:
        expected = [plain.generate("the file", **ask).tokens for ask in asked]
    for branches in ((),) if recurrent else ((), (2, 2), "auto"):
        with (
            always_draft(),
            edgespec.load(
                path, "none", method="eagle", head=head, draft_branches=branches, context=256
            ) as drafting,
        ):
            replies = [drafting.generate("the file", **ask) for ask in asked]
            assert [reply.tokens for reply in replies] == expected
            # Adaptive trees may draft nothing, because random heads are hardly ever right.
            if branches != "auto":
                assert all(reply.stats.drafted_tokens for reply in replies)
                # Gemma 2 caps its logits, so it writes one of the two tokens far more often than the other.
                assert replies[-1].stats.accepted_tokens or kind == "gemma2"


def fitted_head(folder: Path, target: Path, texts: list[list[int]]) -> Path:
    """Return a head whose `fc` predicts the target's next hidden state in these texts, by least squares."""
    model = load(target)
    log = cast(HiddenStateSource, model).log_hidden_states([POST_NORM])
    table = FileMatrix(target, "token_embd.weight")
    inputs, outputs = [], []
    for text in texts:
        model.truncate(0)
        model.prefill(text)
        states = log.rows(0, len(text))
        inputs.append(np.hstack([table.rows(text)[1:], states[:-1], np.ones((len(text) - 1, 1))]))
        outputs.append(states[1:])
    vocab, size = model.facts.vocab_size, log.row_size
    model.close()
    fitted = np.linalg.lstsq(np.vstack(inputs), np.vstack(outputs), rcond=1e-4)[0]
    silent = {"layer.self_attn.o_proj.weight": (size, 32), "layer.mlp.down_proj.weight": (size, 64)}
    changes: dict[str, Any] = {
        "fc.weight": np.ascontiguousarray(fitted[:-1].T, np.float32),
        "fc.bias": fitted[-1].astype(np.float32),
        "embed_tokens.weight": None,
        **{name: np.zeros(shape, np.float32) for name, shape in silent.items()},
    }
    return write_head(folder, "EAGLE-1", size=size, vocab=vocab, changes=changes)


def replies_of(runtime: edgespec.Runtime) -> list[edgespec.Reply]:
    replies = []
    for temperature in (0.0, 0.8, 1.2):
        stream = runtime.stream_tokens(list(range(300, 320)), max_tokens=32, temperature=temperature, seed=3)
        deque(stream, maxlen=0)
        replies.append(stream.reply)
    return replies


@pytest.mark.long
@pytest.mark.parametrize("exact", first([False, True]))
def test_a_fitted_head_is_often_right_and_changes_no_reply(
    demo_target: Path, tmp_path: Path, exact: bool
) -> None:
    options: dict[str, Any] = {"context": 512, "exact": exact, "measure_costs": False}
    with edgespec.load(str(demo_target), "none", method="none", **options) as plain:
        expected = [reply.tokens for reply in replies_of(plain)]
    head = fitted_head(tmp_path / "head", demo_target, [[*range(300, 320), *text] for text in expected])
    for branches in ((), (2, 2)):
        with (
            always_draft(),
            edgespec.load(
                str(demo_target), "none", method="eagle", head=head, draft_branches=branches, **options
            ) as drafting,
        ):
            replies = replies_of(drafting)
        assert [reply.tokens for reply in replies] == expected
        for reply in replies:
            # By chance, one of 8,192 drafts would be accepted.
            assert reply.stats.generated_tokens > 1.5 * reply.stats.target_passes


def test_the_hidden_states_that_a_head_reads_are_found_by_a_trial(tmp_path: Path) -> None:
    """The target repeats every token, and so does the head unless the state that it reads is large."""
    path = write_llama(tmp_path / "target.gguf", layers=2)
    for norm, expected in ((100.0, "[2]"), (0.001, f"[{POST_NORM}]")):
        tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path, "r+").tensors}
        for name, data in tensors.items():
            if "attn_output" in name or "ffn_down" in name:
                data[:] = 0
        tensors["output.weight"][:] = tensors["token_embd.weight"]
        tensors["output_norm.weight"][:] = norm
        scale = 0.3 if norm > 1 else 3.0
        noise = np.random.default_rng(0).normal(size=(SIZE, SIZE)) * scale * 10 / SIZE**0.5
        silent = {"layer.self_attn.o_proj.weight": (SIZE, 32), "layer.mlp.down_proj.weight": (SIZE, 64)}
        changes: dict[str, Any] = {
            "fc.weight": np.concatenate([np.eye(SIZE), noise], axis=1).astype(np.float32),
            "fc.bias": None,
            "embed_tokens.weight": None,
            **{name: np.zeros(shape, np.float32) for name, shape in silent.items()},
        }
        head = write_eagle1(tmp_path / f"head{norm}", changes=changes)
        target = load(path)
        assert expected in head_of(target, head).facts.description
        assert target.length == 0
        target.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"size": 64}, CapabilityError, "hidden states of size 64"),
        ({"vocab": VOCAB + 1}, CapabilityError, "a vocabulary of size"),
        ({"target_hidden_size": 64}, CapabilityError, "hidden states of size 64"),
        ({"rope_scaling": {"type": "linear"}}, ModelFileError, "invalid settings"),
        ({"rope_scaling": {"type": "unknown"}}, ModelFileError, "invalid settings"),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, ModelFileError, "factor "),
        ({"rope_scaling": YARN | {"beta_fast": 0}}, ModelFileError, "invalid settings"),
        ({"num_attention_heads": 0}, ModelFileError, "not an EAGLE head that edgespec supports"),
        ({"rms_norm_eps": "x"}, ModelFileError, "not an EAGLE head that edgespec supports"),
        ({"hidden_act": "gelu"}, ModelFileError, "hidden_act is 'gelu'"),
        ({"num_hidden_layers": 2}, ModelFileError, "the head has 2 layers"),
        ({"draft_vocab": 9}, ModelFileError, "has a tensor d2t, but no LM head of its own"),
        ({"changes": {"fc.weight": None}}, ModelFileError, "fc.weight is missing"),
        ({"changes": {"fc.weight": np.zeros((SIZE, SIZE), np.float32)}}, ModelFileError, "has shape"),
        ({"changes": {"fc.weight": np.zeros((SIZE, 2 * SIZE), np.int64)}}, ModelFileError, "type I64"),
        ({"changes": {"more": np.zeros(3, np.float32)}}, ModelFileError, "tensor more "),
        ({"changes": {"fc.bias": np.full(SIZE, np.nan, np.float32)}}, ModelFileError, "not finite|NaN"),
        ({"changes": {"fc.bias": np.full(SIZE, 3e38, np.float32)}}, ModelFileError, "not finite|NaN"),
        ({"changes": {"embed_tokens.weight": np.full((VOCAB, SIZE), np.inf, np.float32)}}, ModelFileError,
         "not finite|NaN"),
    ],
)  # fmt: skip
def test_damaged_heads_and_heads_for_other_targets_are_refused(
    target: LanguageModel,
    mlx_target: LanguageModel,
    tmp_path: Path,
    options: dict[str, Any],
    error: type,
    message: str,
) -> None:
    path = write_eagle1(tmp_path / "head", **options)
    for model in (target, mlx_target):
        with pytest.raises(error, match=message):
            model.self_draft(Head("eagle", path))
    # No hidden states are kept for the refused head.
    assert not cast(Any, target).logs.states


def test_a_truncated_head_is_refused(target: LanguageModel, tmp_path: Path) -> None:
    path = write_eagle1(tmp_path / "head")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with raises(ModelFileError, "truncated"):
        head_of(target, path)


def test_a_head_with_huge_weights_changes_no_reply(folder: Path, tmp_path: Path) -> None:
    changes = {"layer.mlp.down_proj.weight": np.full((SIZE, 64), 1e30, np.float32)}
    head = write_eagle1(tmp_path / "head", changes=changes)
    check_same_replies(folder / "llama.gguf", "eagle", head, draft_branches=(2, 2))


def test_a_head_that_does_not_fit_in_memory_is_refused(folder: Path, target: LanguageModel) -> None:
    without = target.facts.weight_bytes + target.facts.max_kv_bytes
    limited = load(folder / "llama.gguf", memory_bytes=without + 10_000)
    with raises(MemoryBudgetError, "of target"):
        head_of(limited, folder / "head")
    limited.close()


def test_the_plan_counts_what_a_head_needs(folder: Path, target: LanguageModel) -> None:
    path = folder / "llama.gguf"
    planned = format_at(path).estimate_head(head_at(folder / "head"), path, CONTEXT)
    head = head_of(target, folder / "head")
    assert planned.bytes_of("weights") == head.facts.weight_bytes
    assert planned.bytes_of("cache") == head.facts.kv_bytes
    target.resize(256)
    assert 2 * head.facts.kv_bytes == planned.bytes_of("cache")


def test_interrupting_and_closing(folder: Path, target: LanguageModel) -> None:
    head = head_of(target, folder / "head")
    target.prefill([5, 6, 7])
    head.interrupt(True)
    for call in (lambda: head.verify(TokenTree.chain(8)), lambda: head.prefill([6])):
        with pytest.raises(CancelledError):
            call()
    head.interrupt(False)
    assert np.isfinite(first_logits(head, HeadCache(head), [5, 6, 7, 8])).all()
    with raises(CapabilityError, "limit of 64 ", code="draft_too_wide"):
        head.verify(TokenTree.chain(5, [6] * 64))
    head.close()
    head.close()
    target.prefill([8])


def test_a_head_is_recognised_and_needs_no_conversion(
    folder: Path, target: LanguageModel, tmp_path: Path
) -> None:
    head = folder / "head"
    assert head_info(head).heads == ("EAGLE-1",)
    with raises(ModelFileError, code="wrong_file") as caught:
        prepare_head(head, folder / "llama.gguf", tmp_path / "head.gguf")
    assert f"--head {head}" in (caught.value.next_step or "")
    eagle3 = write_head(tmp_path / "eagle3", size=SIZE, vocab=VOCAB)
    with raises(CapabilityError, code="head_not_supported"):
        head_of(target, eagle3)
