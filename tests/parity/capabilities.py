"""Proofs of what models and backends support. Each function returns why not, or an empty string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from edgespec import EdgespecError
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from edgespec.model.base import LanguageModel
from tests.backends.gguf_adapters import write_gguf_adapter
from tests.parity.models import BACKENDS, CONTEXT, PROMPTS, Ask, Zoo, reply_to, tiny_checkpoints

# Passes of other widths sum in another order. Logits here are a few units large.
ROUNDING = 1e-4


def row_of(model: LanguageModel, logits: Any, row: int) -> NDArray[np.float64]:
    return np.array(logits.at(row, np.arange(model.facts.vocab_size)))


def step(model: LanguageModel, token: int) -> NDArray[np.float64]:
    found = row_of(model, model.verify(TokenTree.chain(token)), 0)
    model.commit(())
    return found


def fresh(model: LanguageModel, tokens: Sequence[int]) -> NDArray[np.float64]:
    model.truncate(0)
    model.prefill(tokens[:-1])
    return step(model, tokens[-1])


def same(got: NDArray[np.float64], expected: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=ROUNDING)


TEXT = list(range(70, 110))


def prefill_in_pieces(model: LanguageModel) -> str:
    expected = fresh(model, TEXT)
    model.truncate(0)
    for start, end in ((0, 1), (1, 18), (18, 39)):
        model.prefill(TEXT[start:end])
    same(step(model, TEXT[-1]), expected)
    return ""


def wide_passes(model: LanguageModel) -> str:
    can = model.facts.capabilities
    if not can.rollback:
        return can.reason
    expected = [fresh(model, TEXT[: i + 1]) for i in range(30, 35)]
    model.truncate(0)
    model.prefill(TEXT[:30])
    logits = model.verify(TokenTree.chain(TEXT[30], TEXT[31:35]))
    for i in range(5):
        same(row_of(model, logits, i), expected[i])
    return ""


def tree_rows(model: LanguageModel) -> str:
    can = model.facts.capabilities
    if not can.tree:
        return can.reason
    tree = TokenTree((70, 80, 81, 82, 83, 84), (-1, 0, 0, 1, 1, 2), (None,) * 6)
    paths = [[70], [70, 80], [70, 81], [70, 80, 82], [70, 80, 83], [70, 81, 84]]
    expected = [fresh(model, [*TEXT, *path]) for path in paths]
    model.truncate(0)
    model.prefill(TEXT)
    logits = model.verify(tree)
    for node in range(tree.width):
        same(row_of(model, logits, node), expected[node])
    model.commit((2, 5))
    assert model.length == len(TEXT) + 3
    same(step(model, 90), fresh(model, [*TEXT, *paths[5], 90]))
    return ""


def rollback(model: LanguageModel) -> str:
    can = model.facts.capabilities
    if not can.rollback:
        return can.reason
    expected = fresh(model, [*TEXT, 90, 91, 95])
    for kept in (2, 0, 1):
        model.truncate(0)
        model.prefill(TEXT)
        model.verify(TokenTree.chain(90, [91, 99, 98]))
        model.commit((1, 2)[:kept])
        assert model.length == len(TEXT) + 1 + kept
        model.truncate(len(TEXT) + 1)
        if model.length < len(TEXT) + 1:
            model.prefill([*TEXT, 90][model.length :])
        step(model, 91)
        same(step(model, 95), expected)
    return ""


def snapshots(model: LanguageModel) -> str:
    expected = fresh(model, [*TEXT, 90])
    model.truncate(0)
    model.prefill(TEXT)
    try:
        snapshot = model.snapshot()
    except EdgespecError as error:
        return error.what
    model.truncate(0)
    model.prefill([5, 6, 7])
    model.restore(snapshot)
    assert model.length == len(TEXT)
    same(step(model, 90), expected)
    return ""


def cancelling(model: LanguageModel) -> str:
    expected = fresh(model, [*TEXT, 90])
    model.truncate(0)
    model.prefill(TEXT)
    model.interrupt(True)
    for work in (lambda: model.prefill([5, 6]), lambda: model.verify(TokenTree.chain(5))):
        with pytest.raises(CancelledError):
            work()
    model.interrupt(False)
    assert model.length == len(TEXT)
    same(step(model, 90), expected)
    return ""


OF_MODELS: dict[str, Callable[[LanguageModel], str]] = {
    "a prompt in pieces": prefill_in_pieces,
    "a chain of guesses in one pass": wide_passes,
    "branches in one pass": tree_rows,
    "wrong guesses taken back": rollback,
    "a snapshot put back": snapshots,
    "cancel, then go on": cancelling,
}

# The bundled draft models, which are the smallest models with a vocabulary on both backends.
SMALL = {"llama.cpp": "demo-draft", "MLX": "demo-mlx-draft"}


def check_small_pair(target: str, draft: str, **options: Any) -> None:
    with edgespec.load(target, draft, context=CONTEXT, **options) as runtime:
        for temperature in (0.0, 0.8):
            replies = [
                runtime.generate(
                    "What does tar do?", max_tokens=10, temperature=temperature, seed=3, method=method
                )
                for method in ("model", "none")
            ]
            assert replies[0].tokens == replies[1].tokens
            assert replies[0].stats.accepted_tokens > 0


def quantised_cache(zoo: Zoo, backend: str) -> str:
    for kv_type in ("q8_0", "q4_0"):
        check_small_pair(SMALL[backend], SMALL[backend], kv_type=kv_type)
    return ""


def adapter(zoo: Zoo, backend: str) -> str:
    """An adapter changes what is said, and speculation does not."""
    tiny = zoo.tiny(backend, "llama")
    path = zoo.folder / f"adapter-{backend}.gguf"
    if tiny.path.suffix == ".gguf":
        write_gguf_adapter(path, tiny.path)
    else:
        tiny_checkpoints.write_adapter(path, tiny.path)
    with edgespec.load(str(tiny.path), str(tiny.path), adapter=str(path), context=CONTEXT) as runtime:
        ask = Ask(PROMPTS[0], 0.8, few=True)
        got, plain = (reply_to(runtime, ask, method) for method in ("model", "none"))
        assert got.tokens == plain.tokens
        assert got.stats.drafted_tokens
        with runtime.borrowed_target() as model:
            changed = fresh(model, TEXT)
    assert np.abs(changed - fresh(tiny.target, TEXT)).max() > 100 * ROUNDING
    return ""


@cache
def check_mixed_pair(target: str) -> None:
    """What the target's backend is good for, and the draft's."""
    check_small_pair(SMALL[target], SMALL[BACKENDS[1 - BACKENDS.index(target)]])


def mixed_target(zoo: Zoo, backend: str) -> str:
    check_mixed_pair(backend)
    return ""


def mixed_draft(zoo: Zoo, backend: str) -> str:
    return mixed_target(zoo, BACKENDS[1 - BACKENDS.index(backend)])


OF_BACKENDS: dict[str, Callable[[Zoo, str], str]] = {
    "a quantised cache (`q8_0`, `q4_0`)": quantised_cache,
    "a LoRA adapter on the target": adapter,
    "target of a mixed pair": mixed_target,
    "draft of a mixed pair": mixed_draft,
}
