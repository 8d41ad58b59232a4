"""The default context is as long as the model was trained for, if nothing has to be reduced for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.decode.request import ReplySettings
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pairing import find_pair
from edgespec.loading.planning import LoadPlan, PlanRequest, fixed_options, plan_pair
from edgespec.memory.budget import Budget
from edgespec.memory.constants import INITIAL_CONTEXT_TOKENS
from edgespec.memory.context_resize import has_room_to_resize
from edgespec.model.base import LoadOptions
from tests.backends.tiny_models import WORDS, write_llama

DEFAULT, LONG = 8192, 1 << 17
_OTHERS = tuple(f"w{i}" for i in range(400))
# Byte tokens, which every vocabulary here has.
PROMPT = [(7 * i * i + 11) % 250 + 5 for i in range(240)]


def plan_for(
    target: Path,
    draft: Path | None = None,
    *,
    budget_bytes: int = 1 << 40,
    context: int | None = None,
    first: int | None = INITIAL_CONTEXT_TOKENS,
    prefix_cache_bytes: int | None = None,
    **drafting_options: Any,
) -> LoadPlan:
    options = LoadOptions(context_tokens=context, initial_context_tokens=first)
    drafting = DraftingOptions.of(**drafting_options)
    pair = find_pair(str(target), str(draft) if draft else "none", drafting, None)
    request = PlanRequest(
        fixed_options(options, str(draft) if draft else None), prefix_cache_bytes=prefix_cache_bytes
    )
    return plan_pair(pair, drafting, options, Budget(budget_bytes, "here"), request)


def context_of(*args: Any, **options: Any) -> int:
    return plan_for(*args, **options).plan.context_tokens


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose KV cache takes 128 bytes per token, 16 MiB for the full context."""
    return write_llama(tmp_path_factory.mktemp("long") / "long.gguf", context=LONG)


@pytest.mark.parametrize(
    ("trained", "context"),
    [
        (512, 512),
        (DEFAULT, DEFAULT),
        (DEFAULT + 256, DEFAULT + 256),
        (40_960, 40_960),
        (LONG, LONG),
        (1 << 19, 1 << 19),
    ],
)
def test_default_context_is_the_trained_length(trained: int, context: int, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", context=trained)
    found = plan_for(path)
    assert found.plan.context_tokens == context
    assert found.plan.decisions == ()
    assert found.plan.fits
    assert found.trained_tokens == trained
    assert found.initial_context_tokens == min(context, INITIAL_CONTEXT_TOKENS)


def test_a_context_reserved_in_full_has_the_default_length(target: Path) -> None:
    assert context_of(target, first=None) == DEFAULT
    assert context_of(target, context=300) == 512  # rounded up to whole blocks
    assert context_of(target, context=1 << 16) == 1 << 16


@pytest.mark.long
def test_a_longer_context_takes_nothing_from_the_rest_of_the_plan(target: Path) -> None:
    default, whole = plan_for(target, first=None), plan_for(target)
    max_bytes, min_bytes = (each.plan.total_bytes for each in (whole, default))
    seen = []
    for step in range(7):
        budget_bytes = min_bytes + (3 * max_bytes - min_bytes) * (6 - step) // 6
        found = plan_for(target, budget_bytes=budget_bytes)
        without = plan_for(target, budget_bytes=budget_bytes, first=None)
        assert found.plan.fits
        assert found.plan.decisions == without.plan.decisions == ()
        assert found.plan.kv_type == without.plan.kv_type
        assert found.plan.prefix_cache_bytes >= without.plan.prefix_cache_bytes
        assert found.plan.context_tokens in {1 << power for power in range(13, 18)}
        if found.plan.context_tokens > DEFAULT:
            assert has_room_to_resize(found.plan)
            assert found.options.initial_context_tokens == INITIAL_CONTEXT_TOKENS
        seen.append(found.plan.context_tokens)
    assert seen == sorted(seen, reverse=True)
    assert (seen[0], seen[-1]) == (LONG, DEFAULT)
    assert len(set(seen)) > 2
    # If the plan already reduces something, the context is not extended.
    assert context_of(target, budget_bytes=min_bytes - 1) < DEFAULT


def test_a_prefix_cache_that_may_take_all_free_memory_prevents_a_longer_context(target: Path) -> None:
    max_bytes = plan_for(target).plan.total_bytes
    assert context_of(target, budget_bytes=2 * max_bytes, prefix_cache_bytes=0) == LONG
    assert context_of(target, budget_bytes=2 * max_bytes, prefix_cache_bytes=1 << 40) == DEFAULT


def test_a_longer_context_does_not_change_the_kv_type(tmp_path: Path) -> None:
    """A KV cache of up to 64 MiB stays in f16. This model reaches 64 MiB at 65,536 tokens."""
    path = write_llama(tmp_path / "deep.gguf", context=LONG, layers=8)
    found = plan_for(path)
    assert found.plan.kv_type == plan_for(path, first=None).plan.kv_type
    if plan_for(path, context=LONG).plan.kv_type != found.plan.kv_type:
        assert found.plan.context_tokens == LONG // 2


def test_the_draft_limits_the_context_unless_it_has_a_window(target: Path, tmp_path: Path) -> None:
    draft, short = (
        write_llama(tmp_path / f"{trained}.gguf", context=trained, seed=1) for trained in (1 << 14, 4096)
    )
    assert context_of(target, draft) == 1 << 14
    assert context_of(target, short) == LONG  # it has an attention window
    assert context_of(target, short, draft_window=0) == DEFAULT
    assert context_of(target, draft, draft_window=512) == LONG


@pytest.mark.long
def test_load_uses_the_context_that_plan_shows(target: Path) -> None:
    for memory in ("2GiB", "256MiB"):
        preview = edgespec.plan(str(target), "none", memory=memory)
        with edgespec.load(str(target), "none", memory=memory, method="none", threads=1) as runtime:
            assert runtime.plan == preview.plan
            assert runtime.context_tokens == preview.plan.context_tokens > DEFAULT
            assert runtime.target.context_tokens == preview.first_context_tokens == INITIAL_CONTEXT_TOKENS
            assert len(runtime.generate("the file", raw=True, seed=1, max_tokens=4).tokens) <= 4
    with edgespec.load(str(target), "none", method="none", reserve_full_context=True) as runtime:
        assert runtime.target.context_tokens == runtime.context_tokens == DEFAULT


@pytest.mark.long
def test_mlx_contexts_have_no_initial_size(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    from tests.backends.mlx.tiny_checkpoints import write_checkpoint

    path = write_checkpoint(tmp_path / "llama", "llama", config={"max_position_embeddings": 1 << 14})
    preview = edgespec.plan(str(path), "none")
    assert (preview.plan.context_tokens, preview.first_context_tokens) == (1 << 14, 0)
    with edgespec.load(str(path), "none", method="none") as runtime:
        assert runtime.context_tokens == 1 << 14


def test_replies_without_a_limit_end_at_the_default_context_length(target: Path) -> None:
    with edgespec.load(str(target), "none", method="none", threads=1) as runtime:
        facts = runtime.target

    def reply_limit(context_tokens: int, max_tokens: int | None) -> int:
        settings = ReplySettings.defaults(facts)
        return settings.with_options({"max_tokens": max_tokens}, facts, context_tokens).max_tokens

    assert reply_limit(LONG, None) == DEFAULT
    assert reply_limit(1024, None) == 1024
    assert reply_limit(LONG, 20_000) == 20_000


@pytest.mark.parametrize(
    ("words", "others"), [(WORDS, WORDS[1:]), (_OTHERS, WORDS)], ids=["translated", "retokenised"]
)
def test_a_draft_with_another_vocabulary_grows_with_the_target(
    words: tuple[str, ...], others: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model starts with a context smaller than the longest prompt, and replies stay the same."""
    monkeypatch.setattr("edgespec.loading.load_request.INITIAL_CONTEXT_TOKENS", 256)
    monkeypatch.setattr("edgespec.loading.pair_loading.FOREIGN_CONTEXT_TOKENS", 512)
    for module in ("memory.context_resize", "decode.session"):
        monkeypatch.setattr(f"edgespec.{module}.MIN_ROOM_TOKENS", 16)
    target = write_llama(tmp_path / "target.gguf", words=words, template=None, context=LONG)
    draft = write_llama(tmp_path / "draft.gguf", words=others, template=None, context=LONG, seed=1)
    with edgespec.load(str(target), str(draft), context=2048, threads=1, prefix_cache="none") as runtime:
        assert runtime.draft is not None
        assert runtime.draft.context_tokens <= 512
        assert replies(runtime, "model") == replies(runtime, "none")
        assert runtime.draft.context_tokens > 900


def replies(runtime: edgespec.Runtime, method: str) -> list[tuple[int, ...]]:
    """Return replies to a prompt, to one longer than the initial context, and to a short one."""
    vocabulary = runtime.vocabulary
    never = {token: -float("inf") for token in range(vocabulary.size) if vocabulary.is_end(token)}
    tokens = []
    for prompt in (PROMPT, PROMPT * 3, PROMPT[:50]):
        stream = runtime.stream_tokens(prompt, seed=3, max_tokens=40, method=method, logit_bias=never)
        for _ in stream:
            pass
        assert (stream.reply.stats.drafted_tokens > 0) == (method == "model")
        tokens.append(tuple(stream.reply.tokens))
    return tokens
