"""DFlash and DSpark heads draft what their papers describe, follow the target, and change no reply."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.dflash import DFlashHead
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.engine.acceptance import Invariant
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError
from edgespec.methods.draft_cache import HeadCache
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.model.base import LoadOptions
from tests.backends.dflash.targets import (
    BLOCK,
    CANDIDATES,
    CONTEXT,
    KINDS,
    LAYERS,
    MASK,
    VOCAB,
    Files,
    head_of,
    write_head,
)
from tests.backends.dflash_reference import (
    block_logits,
    block_states,
    markov_logits,
    pair_scores,
    published_tensors,
    tensors_of,
)
from tests.backends.head_histories import ROUNDS, Round, check_history, first_logits
from tests.backends.tiny_models import write_gemma3, write_jamba, write_lfm2
from tests.cases import covering, first
from tests.raising import raises

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
