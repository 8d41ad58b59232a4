"""The context that nobody asked for: as long as the model was trained for, where that costs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.assembly.drafting_options import DraftingOptions
from edgespec.assembly.pairing import find_pair
from edgespec.assembly.planning import LoadPlan, PlanRequest, plan_pair
from edgespec.backends.base import LoadOptions
from edgespec.memory import Budget
from edgespec.memory.context_resize import INITIAL_CONTEXT_TOKENS, has_room_to_resize
from edgespec.request import MethodOptions, build_request
from tests.backends.tiny_models import WORDS, write_llama

USUAL, LONG = 8192, 1 << 17
_OTHERS = tuple(f"w{i}" for i in range(400))
# Bytes: any vocabulary has them.
PROMPT = [(7 * i * i + 11) % 250 + 5 for i in range(240)]


def planned(
    target: Path,
    draft: Path | None = None,
    *,
    budget_bytes: int = 1 << 40,
    context: int | None = None,
    first: int | None = INITIAL_CONTEXT_TOKENS,
    kept_bytes: int | None = None,
    **how: Any,
) -> LoadPlan:
    options = LoadOptions(context_tokens=context, initial_context_tokens=first)
    drafting = DraftingOptions.of(**how)
    pair = find_pair(str(target), str(draft) if draft else "none", drafting, None)
    wishes = PlanRequest.from_options("speed", options, str(draft) if draft else None, kept_bytes)
    return plan_pair(pair, drafting, options, Budget(budget_bytes, "here"), wishes)


def context_of(*of: Any, **how: Any) -> int:
    return planned(*of, **how).plan.context_tokens


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 bytes a token: 16 MiB in all."""
    return write_llama(tmp_path_factory.mktemp("long") / "long.gguf", context=LONG)


@pytest.mark.parametrize(
    ("trained", "context"),
    [
        (512, 512),
        (USUAL, USUAL),
        (USUAL + 256, USUAL + 256),
        (40_960, 40_960),
        (LONG, LONG),
        (1 << 19, 1 << 19),
    ],
)
def test_it_is_what_the_model_was_trained_for(trained: int, context: int, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", context=trained)
    found = planned(path)
    assert found.plan.context_tokens == context
    assert found.plan.decisions == ()
    assert found.plan.fits
    assert found.trained_tokens == trained
    assert found.initial_context_tokens == min(context, INITIAL_CONTEXT_TOKENS)


def test_it_is_the_usual_one_where_all_is_taken_at_once(target: Path) -> None:
    assert context_of(target, first=None) == USUAL
    assert context_of(target, context=300) == 512  # what was asked for, in blocks
    assert context_of(target, context=1 << 16) == 1 << 16


def test_it_takes_nothing_from_anything_else(target: Path) -> None:
    usual, whole = planned(target, first=None), planned(target)
    most, least = (each.plan.total_bytes for each in (whole, usual))
    seen = []
    for step in range(7):
        budget_bytes = least + (3 * most - least) * (6 - step) // 6
        found = planned(target, budget_bytes=budget_bytes)
        without = planned(target, budget_bytes=budget_bytes, first=None)
        assert found.plan.fits
        assert found.plan.decisions == without.plan.decisions == ()
        assert found.plan.kv_type == without.plan.kv_type
        assert found.plan.prefix_cache_bytes == without.plan.prefix_cache_bytes
        assert found.plan.context_tokens in {1 << power for power in range(13, 18)}
        if found.plan.context_tokens > USUAL:
            assert has_room_to_resize(found.plan)
            assert found.options.initial_context_tokens == INITIAL_CONTEXT_TOKENS
        seen.append(found.plan.context_tokens)
    assert seen == sorted(seen, reverse=True)
    assert (seen[0], seen[-1]) == (LONG, USUAL)
    assert len(set(seen)) > 2
    # Where something was given up for the usual one, none is longer.
    assert context_of(target, budget_bytes=least - 1) < USUAL


def test_texts_that_may_take_all_that_is_left_take_it(target: Path) -> None:
    most = planned(target).plan.total_bytes
    assert context_of(target, budget_bytes=2 * most, kept_bytes=0) == LONG
    assert context_of(target, budget_bytes=2 * most, kept_bytes=1 << 40) == USUAL


def test_the_cache_keeps_its_type(tmp_path: Path) -> None:
    """Of 64 MiB at most it is exact; this one has them with 65,536 tokens."""
    path = write_llama(tmp_path / "deep.gguf", context=LONG, layers=8)
    found = planned(path)
    assert found.plan.kv_type == planned(path, first=None).plan.kv_type
    if planned(path, context=LONG).plan.kv_type != found.plan.kv_type:
        assert found.plan.context_tokens == LONG // 2


def test_the_draft_sees_as_much(target: Path, tmp_path: Path) -> None:
    draft, short = (
        write_llama(tmp_path / f"{trained}.gguf", context=trained, seed=1) for trained in (1 << 14, 4096)
    )
    assert context_of(target, draft) == 1 << 14
    assert context_of(target, short) == LONG  # it has a window of the text as it is
    assert context_of(target, short, draft_window=0) == USUAL
    assert context_of(target, draft, draft_window=512) == LONG


def test_load_and_plan_agree(target: Path) -> None:
    for memory in ("2GiB", "256MiB"):
        preview = edgespec.plan(str(target), "none", memory=memory)
        with edgespec.load(str(target), "none", memory=memory, method="none", threads=1) as runtime:
            assert runtime.plan == preview.plan
            assert runtime.context_tokens == preview.plan.context_tokens > USUAL
            assert runtime.target.context_tokens == preview.first_context_tokens == INITIAL_CONTEXT_TOKENS
            assert len(runtime.generate("the file", raw=True, seed=1, max_tokens=4).tokens) <= 4
    with edgespec.load(str(target), "none", method="none", reserve_full_context=True) as runtime:
        assert runtime.target.context_tokens == runtime.context_tokens == USUAL


def test_an_mlx_model(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    from tests.backends.mlx.tiny_checkpoints import write_checkpoint

    path = write_checkpoint(tmp_path / "llama", "llama", config={"max_position_embeddings": 1 << 14})
    preview = edgespec.plan(str(path), "none")
    assert (preview.plan.context_tokens, preview.first_context_tokens) == (1 << 14, 0)
    with edgespec.load(str(path), "none", method="none") as runtime:
        assert runtime.context_tokens == 1 << 14


def test_a_reply_without_a_limit_ends(target: Path) -> None:
    with edgespec.load(str(target), "none", method="none", threads=1) as runtime:
        facts = runtime.target

    def most(context_tokens: int, max_tokens: int | None) -> int:
        request = build_request(
            [1], facts, MethodOptions(), context_tokens=context_tokens, max_tokens=max_tokens, seed=1,
            stop=(), sampling={},
        )  # fmt: skip
        return request.max_tokens

    assert most(LONG, None) == USUAL
    assert most(1024, None) == 1024
    assert most(LONG, 20_000) == 20_000


@pytest.mark.parametrize(
    ("words", "others"), [(WORDS, WORDS[1:]), (_OTHERS, WORDS)], ids=["translated", "retokenised"]
)
def test_a_draft_with_other_tokens_follows(
    words: tuple[str, ...], others: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins smaller than the longest text, and what is said is the same."""
    monkeypatch.setattr("edgespec.assembly.load_request.INITIAL_CONTEXT_TOKENS", 256)
    monkeypatch.setattr("edgespec.assembly.pairing._OTHER_TOKENS", 512)
    for module in ("memory.context_resize", "session"):
        monkeypatch.setattr(f"edgespec.{module}.MIN_ROOM_TOKENS", 16)
    target = write_llama(tmp_path / "target.gguf", words=words, template=None, context=LONG)
    draft = write_llama(tmp_path / "draft.gguf", words=others, template=None, context=LONG, seed=1)
    with edgespec.load(str(target), str(draft), context=2048, threads=1, prefix_cache="none") as runtime:
        assert runtime.draft is not None
        assert runtime.draft.context_tokens <= 512
        assert replies(runtime, "model") == replies(runtime, "none")
        assert runtime.draft.context_tokens > 900


def replies(runtime: edgespec.Runtime, method: str) -> list[tuple[int, ...]]:
    """To a text, to one that the first context does not hold, and to a short one again."""
    vocabulary = runtime.vocabulary
    never = {token: -float("inf") for token in range(vocabulary.size) if vocabulary.is_end(token)}
    said = []
    for prompt in (PROMPT, PROMPT * 3, PROMPT[:50]):
        stream = runtime.stream_tokens(prompt, seed=3, max_tokens=40, method=method, logit_bias=never)
        for _ in stream:
            pass
        assert (stream.reply.stats.drafted_tokens > 0) == (method == "model")
        said.append(tuple(stream.reply.tokens))
    return said
