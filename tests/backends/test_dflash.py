"""DFlash heads: no head changes a reply, whatever the history, and wrong files are rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.dflash import DFlashHead, MarkovHead, estimate_head
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.native import captured_log
from edgespec.engine.acceptance import Invariant
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.methods.draft_cache import HeadCache
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.model.base import Head, LanguageModel, LoadOptions
from edgespec.model.heads.dflash_files import MAX_BLOCK_TOKENS
from edgespec.model.hidden_states import MAX_LOGGED_TOKENS
from tests.backends.dflash_reference import (
    block_logits,
    block_states,
    markov_logits,
    pair_scores,
    published_tensors,
    tensors_of,
)
from tests.backends.head_histories import (
    BYTE_CHANGES,
    ROUNDS,
    Round,
    check_changed_bytes,
    check_history,
    first_logits,
    overwritten,
)
from tests.backends.tiny_heads import write_dflash
from tests.backends.tiny_models import WORDS, write_gemma3, write_jamba, write_lfm2, write_llama
from tests.cases import covering, first
from tests.raising import raises

CONTEXT = 512
VOCAB = 259 + len(WORDS)
LAYERS = (0, 1, 3)
BLOCK, MASK, CANDIDATES = 6, 7, 4

write_head: Callable[..., Path] = partial(write_dflash, layers=LAYERS, block=BLOCK, mask=MASK)
# Heads of all kinds.
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "causal": {"attention__causal": True},
    "window": {"window": 8},
    "m-rope": {"sections": (8, 0, 0, 0)},
    "fewer tokens": {"drafted": 100},
    "dspark": {"rank": 8},
    "dspark from its masks": {"rank": 8, "sample_from_anchor": False},
    "dspark of fewer tokens": {"rank": 8, "drafted": 100},
    "dflash 2": {"candidates": CANDIDATES},
}


class Files:
    """A target with three layers and heads of all kinds."""

    def __init__(self, folder: Path) -> None:
        self.target = write_llama(folder / "target.gguf", layers=3)
        self.heads = {kind: write_head(folder / f"{kind}.gguf", **options) for kind, options in KINDS.items()}

    def load(self, context: int = CONTEXT) -> LlamaCppModel:
        model = llamacpp.load(str(self.target), "target", LoadOptions(context_tokens=context))
        assert isinstance(model, LlamaCppModel)
        return model

    def reply(self, temperature: float, **options: Any) -> edgespec.Reply:
        with always_draft(), edgespec.load(str(self.target), "none", context=256, **options) as runtime:
            return runtime.generate("the file", max_tokens=24, temperature=temperature, seed=3)

    @cache  # noqa: B019 - the object lives as long as the tests of its file
    def plain_tokens(self, temperature: float) -> tuple[int, ...]:
        return self.reply(temperature, method="none").tokens


def head_of(target: LanguageModel, path: Path) -> DFlashHead:
    head = target.self_draft(Head("dflash", path))
    assert isinstance(head, DFlashHead)
    return head


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("dflash"))


@pytest.fixture
def target(files: Files) -> Iterator[LlamaCppModel]:
    model = files.load()
    yield model
    model.close()


# A tree with two children of the root, one of which has two children.
TREE = TokenTree((50, 51, 52, 53, 54), (-1, 0, 0, 1, 1), (None,) * 5)


def rows_of(head: DFlashHead, tree: TokenTree, tokens: list[int]) -> NDArray[np.float64]:
    """Return the logits after all nodes of a tree, level by level. Its root is the last token."""
    cache = HeadCache(head)
    cache.begin(tokens)
    cache.prefill()
    assert tokens[head.length :] == [tree.tokens[0]]
    levels = [0, *(node for node in range(1, tree.width) if tree.depths[node] > tree.depths[node - 1])]
    rows: list[NDArray[np.float64]] = []
    for start, end in zip(levels, [*levels[1:], tree.width], strict=True):
        logits = head.verify(tree.pruned(VOCAB, 99, end), start)
        rows += [logits.at(row, np.arange(head.facts.vocab_size)) for row in range(len(logits))]
    return np.array(rows, np.float64)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dflash 2"])
@pytest.mark.parametrize("prompt", [5, 40])
def test_drafts_equal_those_of_numpy(files: Files, target: LlamaCppModel, kind: str, prompt: int) -> None:
    tokens = [*range(10, 10 + prompt), TREE.tokens[0]]
    options, tensors, own = KINDS[kind], published_tensors(files.heads[kind]), tensors_of(files.target)
    log = target.log_hidden_states(LAYERS)
    head = head_of(target, files.heads[kind])
    target.prefill(tokens[:-1])
    rows = rows_of(head, TREE, tokens)
    block = block_logits(
        tensors,
        own["token_embd.weight"],
        tensors.get("lm_head.weight", own["output.weight"]),
        log.rows(0, prompt).astype(np.float64),
        [tokens[-1], *[MASK] * (BLOCK - 1)],
        causal="attention__causal" in options,
        window=options.get("window", 0),
    )
    first = 0 if "rank" in options and options.get("sample_from_anchor", True) else 1
    expected = block[[first + depth for depth in TREE.depths]]
    if "rank" in options:
        expected += [markov_logits(tensors, token) for token in TREE.tokens]
    if "drafted" in options:
        drafted = tensors["d2t.weight"].astype(np.int64)
        assert not np.isfinite(np.delete(rows, drafted, axis=1)).any()
        rows = rows[:, drafted]
    assert np.abs(rows - expected).max() < 0.05
    assert rows.std() > 1
    head.close()


@pytest.mark.parametrize("prompt", [5, 40])
def test_a_path_selector_scores_candidates_after_those_before_them(
    files: Files, target: LlamaCppModel, prompt: int
) -> None:
    tokens = list(range(10, 11 + prompt))
    path = files.heads["dflash 2"]
    tensors, own = published_tensors(path), tensors_of(files.target)
    log = target.log_hidden_states(LAYERS)
    head = head_of(target, path)
    target.prefill(tokens[:-1])
    states = block_states(
        tensors,
        own["token_embd.weight"],
        log.rows(0, prompt).astype(np.float64),
        [tokens[-1], *[MASK] * (BLOCK - 1)],
    )
    logits = states @ own["output.weight"].T
    candidates = np.argsort(-logits, axis=1)[:, :CANDIDATES]
    # Use a chain of the least likely candidates, because the scores after other candidates differ.
    chain = TokenTree.chain(tokens[-1], candidates[1:-1, -1].tolist())
    rows = rows_of(head, chain, tokens)
    for depth, (row, before) in enumerate(zip(rows, chain.tokens, strict=True), 1):
        found = candidates[depth]
        expected = logits[depth, found] + pair_scores(tensors, states[depth], before, found)
        assert np.abs(row[found] - expected).max() < 0.05
        assert np.isinf(np.delete(row, found)).all()
        assert np.ptp(pair_scores(tensors, states[depth], before, found)) > 0.1
    head.close()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16), st.sampled_from(list(KINDS)))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    files: Files, rounds: list[Round], seed: int, kind: str
) -> None:
    check_history(files.load, lambda target: head_of(target, files.heads[kind]), rounds, seed)


@pytest.mark.long
@pytest.mark.parametrize("write_target", [write_lfm2, write_jamba, write_gemma3])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(ROUNDS, min_size=1, max_size=8), seed=st.integers(0, 1 << 16))
def test_heads_follow_targets_with_recurrent_layers_and_sliding_windows(
    tmp_path_factory: pytest.TempPathFactory,
    write_target: Callable[[Path], Path],
    rounds: list[Round],
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("targets")
    path, head = write_target(folder / "target.gguf"), write_head(folder / "head.gguf", layers=(1, 2))
    options = LoadOptions(context_tokens=CONTEXT)
    check_history(
        lambda: llamacpp.load(str(path), "target", options),
        lambda target: head_of(target, head),
        rounds,
        seed,
    )


REPLIES: tuple[dict[str, Any], ...] = (
    {"method": "dflash"},
    {"method": "dflash", "draft_length": 16},
    {"method": "dflash", "draft_branches": (3, 2)},
    {"method": "dflash", "draft_branches": "auto"},
    {"method": "dflash+suffix"},
    {"method": "auto"},
)


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
@pytest.mark.parametrize(("options", "kind"), covering(REPLIES, ("dflash", "dspark", "dflash 2")))
def test_no_head_changes_a_reply(
    files: Files, kind: str, options: dict[str, Any], temperature: float
) -> None:
    reply = files.reply(temperature, head=files.heads[kind], **options)
    assert reply.tokens == files.plain_tokens(temperature)
    if options["method"] == "dflash":
        assert reply.stats.drafted_tokens


def test_a_draft_is_no_longer_than_a_block(files: Files, target: LlamaCppModel) -> None:
    for kind, length in (("dflash", BLOCK - 1), ("dspark", BLOCK), ("dspark from its masks", BLOCK - 1)):
        head = head_of(target, files.heads[kind])
        assert head.facts.capabilities.max_draft_length == length
        tokens = [10, 11, 12]
        target.prefill(tokens[:-1])
        chain = TokenTree.chain(12, range(20, 20 + length))
        head.start_at(0)
        head.prefill(tokens[:-1])
        assert len(head.verify(chain.pruned(VOCAB, 99, length))) == length
        with raises(CapabilityError, code="draft_too_wide"):
            head.verify(chain)
        target.truncate(0)
        head.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash 2"])
def test_a_head_drafts_up_to_the_last_token_of_the_context(
    files: Files, target: LlamaCppModel, kind: str
) -> None:
    head = head_of(target, files.heads[kind])
    cache = HeadCache(head)
    drafter = ModelDrafter(head, VOCAB, cache=cache)
    tokens = [10 + i % 100 for i in range(CONTEXT - 12)]
    target.prefill(tokens[:-1])
    drafter.begin(tokens)
    sampler = Sampler(SamplingParams(temperature=0.0), 0, tokens)
    lengths = []
    while target.free_tokens > 1:
        tree = drafter.propose(sampler, Invariant(), 16).pruned(VOCAB, target.free_tokens - 1)
        lengths.append(tree.drafted)
        target.verify(tree)
        target.commit(())
        sampler.push(11)
        drafter.commit((11,))
    assert lengths[0] == head.facts.capabilities.max_draft_length
    assert lengths[-1] == 1
    assert lengths == sorted(lengths, reverse=True)
    head.close()


def test_a_restored_prefix_has_no_hidden_states_so_the_head_starts_after_it(
    files: Files, target: LlamaCppModel
) -> None:
    tokens = list(range(10, 40))
    target.prefill(tokens)
    snapshot = target.snapshot()
    other = files.load()
    head = head_of(other, files.heads["dflash"])
    cache = HeadCache(head)
    other.restore(snapshot)
    cache.begin([*tokens, 50])
    cache.prefill()
    other.verify(TokenTree.chain(50, [51]))
    other.commit((1,))
    assert np.isfinite(first_logits(head, cache, [*tokens, 50, 51, 52])).all()
    assert head.length == len(tokens) + 2
    head.close()
    other.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 16}, "tensor 'fc.weight' of shape"),
        ({"vocab": VOCAB + 1}, "a vocabulary of size"),
        ({"layers": (0, 1, 4)}, "reads the layers"),
        ({"layers": (0, -1)}, "reads the layers"),
        ({"mask": None}, "mask token has the ID -1"),
        ({"mask": VOCAB}, f"mask token has the ID {VOCAB}"),
        ({"block": 1}, "block_size must be .*, not 1;"),
        ({"block": MAX_BLOCK_TOKENS + 1}, "block_size must be .*, not 33;"),
        ({"rank": 8, "block": 1 << 31}, "block_size must be .*, not 2147483648;"),
        ({"block_size": "6"}, "could not be loaded|block_size"),
        ({"sections": (-1, 0, 0, 0)}, "dimension_sections"),
        ({"sections": (1 << 30, 1 << 30, 1 << 30, 1 << 30)}, "dimension_sections"),
        ({"rope__dimension_count": 3}, "rope.dimension_count must be .*, not 3;"),
        ({"rope__dimension_count": 0}, "rope.dimension_count must be .*, not 0;"),
        ({"hyper_connection_count": 4}, "is a DeepSeek-V4 DSpark head, which edgespec cannot run"),
        ({"candidates": 6}, "could not be loaded"),
        ({"candidates": 4, "rank": 8}, "cannot have a Markov head"),
        ({"candidates": 4, "sample_from_anchor": True}, "cannot have a Markov head or draft"),
    ],
)
def test_an_unsuitable_head_is_refused(
    target: LlamaCppModel, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_head(tmp_path / "head.gguf", **options)
    with pytest.raises((CapabilityError, ModelFileError), match=message):
        target.self_draft(Head("dflash", path))
    # The target still works, without the overhead of logging hidden states.
    target.prefill([1, 2, 3])
    assert target.verify(TokenTree.chain(4)).at(0, np.arange(VOCAB)).any()


@pytest.mark.parametrize(("kv_heads", "value_size"), [(1, 8), (3, 16)])
def test_keys_and_values_that_do_not_fit_the_queries_are_refused(
    target: LlamaCppModel, tmp_path: Path, kv_heads: int, value_size: int
) -> None:
    """They would make llama.cpp end the process."""
    path = write_head(tmp_path / "head.gguf", kv_heads=kv_heads, value_size=value_size)
    with raises(ModelFileError, "attention heads" if value_size > 8 else "its keys"):
        target.self_draft(Head("dflash", path))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_head_whose_logits_are_not_finite_is_refused(
    target: LlamaCppModel, tmp_path: Path, value: float
) -> None:
    path = overwritten(write_head(tmp_path / "head.gguf"), "blk.0.ffn_down.weight", value)
    with raises(ModelFileError, "not finite"):
        target.self_draft(Head("dflash", path))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_a_head_with_huge_weights_changes_no_reply(
    files: Files, tmp_path: Path, kind: str, temperature: float
) -> None:
    head = overwritten(write_head(tmp_path / "head.gguf", **KINDS[kind]), "blk.0.ffn_down.weight", 1e30)
    assert files.reply(temperature, method="dflash", head=head).tokens == files.plain_tokens(temperature)


@settings(max_examples=5, deadline=None)
@given(BYTE_CHANGES)
def test_random_bytes_in_a_head_give_an_error_or_the_same_reply(
    files: Files, changes: list[tuple[int, int]]
) -> None:
    check_changed_bytes(files.target, "dflash", files.heads["dspark"], changes, 3000)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"rank": 8}, {"rank": 8, "block": 16}, {"drafted": 20_000}, {"window": 8}, {"candidates": 4}],
)
def test_the_estimate_covers_what_llama_cpp_allocates(tmp_path: Path, options: dict[str, Any]) -> None:
    # A vocabulary that is large enough to matter.
    words = tuple(f"w{i}" for i in range(20_000))
    path = write_llama(tmp_path / "target.gguf", layers=3, words=words)
    head_path = write_head(tmp_path / "head.gguf", vocab=259 + len(words), **options)
    target = llamacpp.load(str(path), "target", LoadOptions(context_tokens=CONTEXT))
    with captured_log() as lines:
        head = head_of(target, head_path)
    # The last entries belong to the head. Before them, the target is reallocated to read its hidden states.
    sizes = {
        kind: [float(line.split()[-2]) * 2**20 for line in lines if f"{kind} buffer size" in line]
        for kind in ("KV", "compute", "output")
    }
    estimate = estimate_head(Head("dflash", head_path), head_path, CONTEXT)
    assert estimate.bytes_of("cache") == head.facts.kv_bytes
    caches = 2 if "window" in options else 1
    assert sum(sizes["KV"][-caches:]) == pytest.approx(estimate.bytes_of("cache"), abs=6000 * caches)
    log_bytes = MAX_LOGGED_TOKENS * len(LAYERS) * 32 * 4
    assert estimate.bytes_of("compute") - log_bytes == pytest.approx(sizes["compute"][-1], rel=0.1)
    assert sizes["output"][-1] <= estimate.bytes_of("output")
    head.close()
    target.close()


@pytest.mark.long
@pytest.mark.parametrize("options", [{"block": 2}, {"block": 2, "rank": 8}, {"block": MAX_BLOCK_TOKENS}])
def test_heads_with_small_and_large_blocks_draft(
    files: Files, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = write_head(tmp_path / "head.gguf", **options)
    reply = files.reply(0.0, method="dflash", head=path, draft_length=16)
    assert reply.tokens == files.plain_tokens(0.0)
    assert reply.stats.drafted_tokens


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("draft_vocab", [VOCAB, 40])
def test_the_markov_head_reads_quantised_matrices(tmp_path: Path, kind: str, draft_vocab: int) -> None:
    random = np.random.default_rng(1)
    first, second = (random.normal(size=(count, 32)).astype(np.float32) for count in (VOCAB, draft_vocab))
    quantisation = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "head.gguf", "dflash")
    for name, matrix in (("markov_w1", first), ("markov_w2", second)):
        data = gguf.quants.quantize(matrix, quantisation)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=quantisation)
    if draft_vocab < VOCAB:
        writer.add_tensor("d2t", np.arange(draft_vocab) + 5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    logits, expected = MarkovHead(tmp_path / "head.gguf", VOCAB).logits(9), second @ first[9]
    if draft_vocab < VOCAB:
        assert not logits[:5].any()
        assert not logits[45:].any()
        logits = logits[5:45]
    assert np.abs(logits - expected).max() < (4 if kind == "Q4_0" else 0.3)
    assert np.corrcoef(logits, expected)[0, 1] > 0.98
