"""DFlash and DSpark heads draft what their papers say, follow the target, and change no reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import edgespec
from edgespec.assembly.loading import always_draft
from edgespec.backends import llamacpp
from edgespec.backends.base import Head, LanguageModel, LoadOptions
from edgespec.backends.llamacpp.dflash import DFlashHead
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.drafters.head_cache import HeadCache
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError
from tests.backends.dflash_reference import block_logits, markov_logits, tensors_of
from tests.backends.head_histories import ROUNDS, Round, check_history
from tests.backends.tiny_models import WORDS, write_dflash, write_llama

CONTEXT = 512
VOCAB = 259 + len(WORDS)
LAYERS = (0, 1, 3)
BLOCK, MASK = 6, 7
# A tree with two children of the root, one of which has two children.
TREE = TokenTree((50, 51, 52, 53, 54), (-1, 0, 0, 1, 1), (None,) * 5)

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


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("dflash"))


@pytest.fixture
def target(files: Files) -> Iterator[LlamaCppModel]:
    model = files.load()
    yield model
    model.close()


def head_of(target: LanguageModel, path: Path) -> DFlashHead:
    head = target.self_draft(Head("dflash", path))
    assert isinstance(head, DFlashHead)
    return head


def rows_of(head: DFlashHead, tree: TokenTree, tokens: list[int]) -> NDArray[np.float64]:
    """The logits after all nodes of a tree, whose root is the last of `tokens`, level by level."""
    cache = HeadCache(head)
    cache.begin(tokens)
    cache.prefill()
    assert tokens[head.length :] == [tree.tokens[0]]
    levels = [0, *(node for node in range(1, tree.width) if tree.depths[node] > tree.depths[node - 1])]
    rows = []
    for first, end in zip(levels, [*levels[1:], tree.width], strict=True):
        rows.extend(np.array(head.verify(tree.pruned(VOCAB, 99, end), first).rows))
    return np.array(rows, np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [5, 40])
def test_drafts_equal_those_of_numpy(files: Files, target: LlamaCppModel, kind: str, prompt: int) -> None:
    tokens = [*range(10, 10 + prompt), TREE.tokens[0]]
    options, tensors, own = KINDS[kind], tensors_of(files.heads[kind]), tensors_of(files.target)
    log = target.log_hidden_states(LAYERS)
    head = head_of(target, files.heads[kind])
    target.prefill(tokens[:-1])
    rows = rows_of(head, TREE, tokens)
    block = block_logits(
        tensors,
        own["token_embd.weight"],
        tensors.get("output.weight", own["output.weight"]),
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
        drafted = tensors["d2t"].astype(np.int64)
        assert not np.isfinite(np.delete(rows, drafted, axis=1)).any()
        rows = rows[:, drafted]
    assert np.abs(rows - expected).max() < 0.05
    assert rows.std() > 1
    head.close()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16), st.sampled_from(list(KINDS)))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    files: Files, rounds: list[Round], seed: int, kind: str
) -> None:
    check_history(files.load, lambda target: head_of(target, files.heads[kind]), rounds, seed)


@pytest.fixture(scope="module")
def replies(files: Files) -> Callable[..., tuple[int, ...]]:
    """The tokens of a reply, and how many tokens were drafted, with a head and without."""

    def reply(temperature: float, **options: Any) -> Any:
        with always_draft(), edgespec.load(str(files.target), "none", context=256, **options) as runtime:
            return runtime.generate("the file", max_tokens=40, temperature=temperature, seed=3)

    return reply


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_no_head_changes_a_reply(
    files: Files, replies: Callable[..., Any], kind: str, temperature: float
) -> None:
    plain = replies(temperature, method="none")
    for options in (
        {"method": "dflash"},
        {"method": "dflash", "draft_length": 16},
        {"method": "dflash", "draft_branches": (3, 2)},
        {"method": "dflash", "draft_branches": "auto"},
        {"method": "dflash+suffix"},
        {"method": "auto"},
    ):
        reply = replies(temperature, head=files.heads[kind], **options)
        assert reply.tokens == plain.tokens, options
        if options["method"] == "dflash":
            assert reply.stats.drafted_tokens, options


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
        with pytest.raises(CapabilityError, match="at most"):
            head.verify(chain)
        target.truncate(0)
        head.close()


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_head_drafts_up_to_the_last_token_of_the_context(files: Files, kind: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 300, "temperature": 1.2, "seed": 5, "ignore_eos": True}
