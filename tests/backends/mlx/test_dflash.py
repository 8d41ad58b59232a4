"""DFlash and DSpark heads draft what their papers describe, follow an MLX target, and change no reply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import mlx
from edgespec.backends.mlx.dflash import DFlashHead, estimate_head
from edgespec.backends.mlx.model import MlxModel
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError, MemoryBudgetError, ModelFileError
from edgespec.model.base import Head, LoadOptions
from edgespec.model.heads.tensor_files import read_folder_tensors
from tests.backends.dflash_reference import block_logits, markov_logits
from tests.backends.head_histories import ROUNDS, Round, check_history
from tests.backends.mlx.tiny_checkpoints import ROWS, write_checkpoint
from tests.cases import covering
from tests.model.heads.published_dflash import LAYOUTS, SELECTOR, WINDOW, Layout, write_dflash_head
from tests.raising import raises

SIZE = 64
# These states exist in all tiny models, some of which have only two layers.
STATES = (0, 1, 2)
BLOCK, MASK = 6, 7
TOKENS = [*range(10, 50), 50]
# A tree with two children of the root, one of which has two children.
TREE = TokenTree((50, 51, 52, 53, 54), (-1, 0, 0, 1, 1), (None,) * 5)


class Files:
    """Targets and heads, each written when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def target(self, kind: str) -> Path:
        path = self._folder / kind
        return path if path.exists() else write_checkpoint(path, kind)

    def head(self, layout: Layout = "z-lab", **options: Any) -> Path:
        path = self._folder / f"{layout} {options}"
        if not path.exists():
            defaults = {"vocab": ROWS, "size": SIZE, "states": STATES, "block": BLOCK, "mask": MASK}
            write_dflash_head(path, layout, **{**defaults, **options})
        return path

    def load(self, kind: str = "llama", **options: Any) -> Any:
        return mlx.load(str(self.target(kind)), kind, LoadOptions(context_tokens=512, **options))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("dflash"))


@pytest.fixture
def target(files: Files) -> Iterator[MlxModel]:
    model = files.load()
    yield model
    model.close()


def head_of(target: Any, path: Path) -> DFlashHead:
    head = target.self_draft(Head("dflash", path))
    assert isinstance(head, DFlashHead)
    return head


def arrays(folder: Path) -> dict[str, NDArray[np.float64]]:
    return {
        name: np.asarray(tensor.read(), np.float64) for name, tensor in read_folder_tensors(folder).items()
    }


@pytest.mark.parametrize(("layout", "draft_vocab"), covering(LAYOUTS, (None, 100)))
def test_drafts_equal_those_of_numpy(
    files: Files, target: MlxModel, layout: Layout, draft_vocab: int | None
) -> None:
    path = files.head(layout, draft_vocab=draft_vocab)
    tensors, own = arrays(path), arrays(files.target("llama"))
    log = target.log_hidden_states(STATES)
    head = head_of(target, path)
    target.prefill(TOKENS[:-1])
    head.prefill(TOKENS[:-1])
    everything = np.arange(ROWS)
    rows = []
    for first, end in ((0, 1), (1, 3), (3, 5)):
        logits = head.verify(TREE.pruned(ROWS, 99, end), first)
        rows += [logits.at(row, everything) for row in range(end - first)]
    block = block_logits(
        tensors,
        own["model.embed_tokens.weight"],
        tensors["lm_head.weight"] if draft_vocab else own["lm_head.weight"],
        log.rows(0, len(TOKENS) - 1).astype(np.float64),
        [TOKENS[-1], *[MASK] * (BLOCK - 1)],
        base=1e6,
        window=WINDOW if "sliding" in layout else 0,
    )
    first = 0 if layout == "DeepSeek" else 1
    expected = block[[first + depth for depth in TREE.depths]]
    if layout in ("DeepSeek", "speculators"):
        expected = expected + [markov_logits(tensors, token) for token in TREE.tokens]
    found = np.array(rows)
    if draft_vocab:
        assert np.flatnonzero(np.isfinite(found[0])).tolist() == list(range(7, 107))
        found = found[:, 7:107]
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    head.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "layout"), covering(("llama", "llama_sliding", "qwen3_next"), ("z-lab", "DeepSeek"))
)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(ROUNDS, min_size=1, max_size=8), seed=st.integers(0, 1 << 16))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    files: Files, kind: str, layout: Layout, rounds: list[Round], seed: int
) -> None:
    path = files.head(layout)
    check_history(lambda: files.load(kind), lambda target: head_of(target, path), rounds, seed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "layout"), covering(("llama", "gemma3", "qwen3_next"), ("z-lab", "DeepSeek"))
)
def test_no_head_changes_a_reply(files: Files, kind: str, layout: Layout) -> None:
    path, head = files.target(kind), files.head(layout)
    branches = () if kind == "qwen3_next" else (2, 2)
    drafting: dict[str, Any] = {"method": "dflash", "methods": ["dflash+suffix"], "head": head}
    with (
        always_draft(),
        edgespec.load(str(path), "none", method="none", context=256) as plain,
        edgespec.load(str(path), "none", context=256, draft_branches=branches, **drafting) as tree,
        edgespec.load(str(path), "none", context=256, draft_length=16, **drafting) as chain,
    ):
        for temperature in (0.0, 0.8):
            asked: dict[str, Any] = {"max_tokens": 16, "temperature": temperature, "seed": 3}
            expected = plain.generate("the file", **asked).tokens
            for runtime in (tree, chain):
                reply = runtime.generate("the file", **asked)
                assert reply.tokens == expected
                assert reply.stats.drafted_tokens
            assert chain.generate("the file", method="dflash+suffix", **asked).tokens == expected


def test_a_draft_is_no_longer_than_a_block(files: Files, target: MlxModel) -> None:
    for layout, length in (("z-lab", BLOCK - 1), ("DeepSeek", BLOCK), ("speculators", BLOCK - 1)):
        head = head_of(target, files.head(layout))  # type: ignore[arg-type]
        assert head.facts.capabilities.max_draft_length == length
        chain = TokenTree.chain(12, range(20, 20 + length))
        assert len(head.verify(chain.pruned(ROWS, 99, length))) == length
        with raises(CapabilityError, code="draft_too_wide"):
            head.verify(chain)
        head.close()


def test_an_interrupt_stops_drafting(files: Files, target: MlxModel) -> None:
    head = head_of(target, files.head())
    head.interrupt(True)
    with pytest.raises(CancelledError):
        head.verify(TokenTree.chain(1))
    with pytest.raises(CancelledError):
        head.prefill([1, 2])
    head.interrupt(False)
    assert len(head.verify(TokenTree.chain(1))) == 1
    head.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 32}, "hidden states of size 32"),
        ({"vocab": ROWS + 1}, "a vocabulary of size"),
        ({"states": (0, 1, 9)}, "reads the layers"),
        ({"changes": {"norm.weight": np.full(SIZE, np.nan, np.float32)}}, "not finite"),
        ({"changes": {"norm.weight": None}}, "the tensor norm.weight is missing"),
        ({"changes": SELECTOR}, "a DFlash 2 head must be a GGUF file"),
        ({"rope_scaling": {"rope_type": "mrope?"}}, "invalid settings"),
        ({"block": 1}, "block_size must be from 2 .* not 1"),
        ({"num_hidden_layers": 10**9}, "must be from 1 to"),
    ],
)
def test_an_unsuitable_head_is_refused(
    files: Files, target: MlxModel, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    defaults = {"vocab": ROWS, "size": SIZE, "states": STATES}
    write_dflash_head(tmp_path / "head", **{**defaults, **options})
    with pytest.raises((CapabilityError, ModelFileError), match=message):
        target.self_draft(Head("dflash", tmp_path / "head"))
    target.prefill([1, 2, 3])
    assert target.verify(TokenTree.chain(4)).at(0, np.arange(ROWS)).any()


def test_a_gguf_file_is_refused(target: MlxModel, tmp_path: Path) -> None:
    (tmp_path / "head.gguf").write_bytes(b"GGUF")
    with raises(CapabilityError, code="wrong_file"):
        target.self_draft(Head("dflash", tmp_path / "head.gguf"))


def test_the_estimate_is_what_the_head_uses(files: Files, target: MlxModel) -> None:
    for layout in ("z-lab", "DeepSeek"):
        path = files.head(layout)
        head, estimate = head_of(target, path), estimate_head(Head("dflash", path), path, 512)
        assert estimate.bytes_of("weights") == head.facts.weight_bytes
        assert estimate.bytes_of("cache") == head.facts.kv_bytes
        head.prefill(list(range(10)))
        assert sum(array.nbytes for array in head._cells.arrays) == estimate.bytes_of("cache") // 2
        head.close()


def test_a_head_that_exceeds_the_memory_limit_is_refused(files: Files) -> None:
    model = files.load()
    limit = model.facts.weight_bytes + model.facts.max_kv_bytes + 1000
    model.close()
    model = files.load(memory_bytes=limit)
    with pytest.raises(MemoryBudgetError):
        head_of(model, files.head())
    model.close()
