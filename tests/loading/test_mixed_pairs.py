"""Pairs of a target and a draft model from different backends: same tokens, same acceptance rate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import Reply, Runtime
from edgespec.chat.prompt import PromptBuilder
from edgespec.errors import MemoryBudgetError, OptionError
from edgespec.losslessness.cases import read_prompts
from tests.backends.tiny_models import write_llama
from tests.cases import covering
from tests.raising import raises

pytest.importorskip("mlx.core")

# Each mixed pair consists of the two bundled models, whose weights have the same values in both formats.
PAIRS = {"GGUF target": ("demo", "demo-mlx-draft"), "MLX target": ("demo-mlx", "demo-draft")}
SHAPES = {"tree": (2, 2), "chain": ()}
METHODS = ("model", "model+ngram")
PROMPTS = read_prompts()[:2]
MAX_TOKENS = 14
CONTEXT = 256


def replies_of(runtime: Runtime, temperature: float, **options: Any) -> list[Reply]:
    """Return a reply to every prompt."""
    assert runtime.template is not None
    replies = []
    for prompt in PROMPTS:
        tokens = PromptBuilder(runtime.template, runtime.vocabulary).build(prompt.messages).tokens
        options = {"max_tokens": MAX_TOKENS, "seed": 5, "temperature": temperature} | options
        stream = runtime.stream_tokens(tokens, **options)
        for _ in stream:
            pass
        replies.append(stream.reply)
    return replies


def acceptance_rate(replies: list[Reply]) -> float:
    drafted = sum(reply.stats.drafted_tokens for reply in replies)
    assert drafted > 10
    return sum(reply.stats.accepted_tokens for reply in replies) / drafted


# By default, each pair runs with one shape. The MLX target uses the cheaper one.
WITH_ALL_SHAPES = pytest.mark.parametrize(
    ("names", "branches"),
    covering(list(PAIRS.values()), list(SHAPES.values())),
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def plain(names: tuple[str, str]) -> dict[float, list[Reply]]:
    """Return the replies of plain decoding by temperature."""
    with edgespec.load(names[0], "none", context=CONTEXT) as runtime:
        return {temperature: replies_of(runtime, temperature) for temperature in (0.0, 0.8)}


@pytest.fixture(scope="module")
def branches(request: pytest.FixtureRequest) -> tuple[int, ...]:
    found: tuple[int, ...] = request.param
    return found


@pytest.fixture(scope="module")
def pair(names: tuple[str, str], branches: tuple[int, ...]) -> Iterator[Runtime]:
    with edgespec.load(*names, context=CONTEXT, draft_branches=branches) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def alike(branches: tuple[int, ...]) -> Iterator[Runtime]:
    """Return the results of the bundled GGUF pair, for comparison."""
    with edgespec.load("demo", "demo-draft", context=CONTEXT, draft_branches=branches) as runtime:
        yield runtime


@WITH_ALL_SHAPES
@pytest.mark.parametrize(("method", "temperature"), covering(METHODS, (0.0, 0.8)))
def test_a_mixed_pair_has_the_same_tokens_and_acceptance(
    pair: Runtime, alike: Runtime, plain: dict[float, list[Reply]], method: str, temperature: float
) -> None:
    got = replies_of(pair, temperature, method=method)
    assert [reply.tokens for reply in got] == [reply.tokens for reply in plain[temperature]]
    assert all(reply.method.effective == method for reply in got)
    assert all(reply.stats.draft_weight_bytes > 0 for reply in got)
    # How a combination uses its drafters also depends on their costs.
    if method == "model":
        usual = acceptance_rate(replies_of(alike, temperature, method=method))
        assert acceptance_rate(got) >= 0.9 * usual > 0.1


@pytest.mark.long
@WITH_ALL_SHAPES
def test_speculative_sampling_runs_and_is_greedy_at_temperature_0(
    pair: Runtime, plain: dict[float, list[Reply]]
) -> None:
    greedy = replies_of(pair, 0.0, method="model", acceptance="rejection")
    assert [reply.tokens for reply in greedy] == [reply.tokens for reply in plain[0.0]]
    drawn = replies_of(pair, 0.8, method="model", acceptance="rejection")
    for reply in drawn:
        full = len(reply.tokens) == MAX_TOKENS
        assert full if reply.finish_reason == "length" else 0 < len(reply.tokens) <= MAX_TOKENS
    assert acceptance_rate(drawn) > 0.1


@pytest.mark.long
@pytest.mark.parametrize("names", list(PAIRS.values()), ids=list(PAIRS), indirect=True, scope="module")
def test_a_draft_with_another_vocabulary_is_used_and_reported(names: tuple[str, str], tmp_path: Path) -> None:
    target, draft = names
    if draft == "demo-draft":
        target, stranger = "demo-mlx-draft", write_llama(tmp_path / "stranger.gguf")
    else:
        from tests.backends.mlx.tiny_checkpoints import write_checkpoint

        stranger = write_checkpoint(tmp_path / "stranger", "llama")
    with edgespec.load(target, str(stranger), context=CONTEXT) as pair:
        assert "fewer of its tokens" in pair.target.notice
        plain = pair.generate("Hello", method="none", max_tokens=12, seed=1)
        assert pair.generate("Hello", method="model", max_tokens=12, seed=1).tokens == plain.tokens


class TestOptions:
    """Options of one backend do not reach a model of the other."""

    @pytest.mark.long
    def test_options_of_llama_cpp_with_an_mlx_draft(self) -> None:
        """The MLX backend raises an error if it gets any of these options."""
        options: dict[str, Any] = {
            "threads": 1,
            "gpu_layers": 0,
            "mmap": False,
            "flash_attention": "on",
            "kv_type": "q8_0/q4_0",
        }
        with edgespec.load("demo", "demo-mlx-draft", context=CONTEXT, exactness="off", **options) as runtime:
            assert runtime.generate(
                "What does tar do?", method="model", max_tokens=8, seed=1
            ).stats.drafted_tokens

    @pytest.mark.long
    @pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
    def test_a_quantised_cache_applies_to_both(self, kv_type: str) -> None:
        with edgespec.load(
            "demo-mlx-draft", "demo-draft", context=CONTEXT, exactness="off", kv_type=kv_type
        ) as runtime:
            assert runtime.generate(
                "What does tar do?", method="model", max_tokens=4, seed=1
            ).stats.drafted_tokens

    @pytest.mark.long
    def test_options_of_llama_cpp_do_not_reach_the_mlx_model(self) -> None:
        with edgespec.load(
            "demo-mlx-draft", "demo-draft", context=CONTEXT, exactness="off", threads=1
        ) as runtime:
            assert runtime.generate(
                "What does tar do?", method="model", max_tokens=4, seed=1
            ).stats.drafted_tokens
        with raises(OptionError, code="option_without_effect", option="threads"):
            edgespec.load("demo-mlx-draft", "demo-mlx-draft", context=CONTEXT, threads=1)

    @pytest.mark.long
    def test_both_models_share_one_memory_budget(self) -> None:
        with edgespec.load("demo", "demo-mlx-draft", context=CONTEXT, exactness="off") as runtime:
            assert runtime.draft is not None
            assert runtime.draft.context_tokens == runtime.context_tokens
            assert runtime.plan is not None
            needed = runtime.plan.total_bytes
            short = needed - runtime.draft.weight_bytes // 2
        with raises(MemoryBudgetError, "use --draft none"):
            edgespec.load("demo", "demo-mlx-draft", context=CONTEXT, exactness="off", memory=short)
