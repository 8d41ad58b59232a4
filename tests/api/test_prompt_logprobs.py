"""The log-probabilities of a prompt's tokens are those of single-token passes, and leave no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import Reply, RequestQueue, Runtime
from edgespec.engine.logits import TokenLogprob, token_logprob
from edgespec.engine.tree import TokenTree
from edgespec.errors import ContextFullError, OptionError
from tests.api.questions import HOWTO, equal
from tests.backends.tiny_models import write_jamba, write_llama, write_mamba
from tests.raising import raises

# This text has 103 tokens with the demo models, so it takes several passes.
TEXT = (
    "To list files by size, run ls -S. To list all files, also add -a. 🙂 To find large files, run du. " * 3
)


def stepped(runtime: Runtime, tokens: list[int], count: int) -> list[TokenLogprob]:
    """Return the log-probabilities of all tokens after the first, from single-token passes."""
    with runtime.borrowed_target() as target:
        result = []
        for token, following in pairwise(tokens):
            result.append(token_logprob(target.verify(TokenTree.chain(token)), 0, following, count))
            target.commit(())
        return result


def scored(runtime: Runtime, tokens: list[int], **options: Any) -> Reply:
    return runtime.stream_tokens(tokens, **{"prompt_logprobs": 3, "max_tokens": 0, **options}).wait()


def as_numbers(reply: Reply) -> list[TokenLogprob]:
    return [
        TokenLogprob(each.token, each.logprob, tuple((other.token, other.logprob) for other in each.top))
        for each in reply.prompt_logprobs
    ]


def check(
    runtime: Runtime,
    tokens: list[int],
    expected: list[TokenLogprob] | None = None,
    *,
    tolerance: float = 1e-3,
) -> None:
    """Check a prompt's log-probabilities, which must be bit-identical if the target's passes agree."""
    if expected is None:
        expected = stepped(runtime, tokens, 3)
    reply = scored(runtime, tokens)
    assert (reply.text, reply.tokens, reply.finish_reason, reply.context_full) == ("", (), "length", False)
    first, *rest = as_numbers(reply)
    assert first == TokenLogprob(tokens[0], 0.0, ())
    if runtime.target.capabilities.exact:
        assert rest == expected
    else:
        assert [each.token for each in rest] == tokens[1:]
        values = [each.logprob for each in rest]
        np.testing.assert_allclose(values, [each.logprob for each in expected], rtol=0, atol=tolerance)


def forget_if_rounded(runtime: Runtime) -> None:
    """Clear the cache if a cached prefix can be rounded differently than a newly processed one."""
    if not runtime.target.capabilities.exact:
        runtime.clear_cache()


@pytest.fixture(scope="module", params=["demo", "demo-mlx-draft"])
def name(request: pytest.FixtureRequest) -> str:
    result: str = request.param
    return result


@pytest.fixture(scope="module", params=["bits", "off"])
def runtime(request: pytest.FixtureRequest, name: str) -> Iterator[Runtime]:
    with edgespec.load(name, "none", exactness=request.param, context=256) as runtime:
        yield runtime


@pytest.mark.long
def test_they_are_those_of_single_token_passes(runtime: Runtime) -> None:
    tokens = runtime.vocabulary.tokenize(TEXT, special=False, start=True)
    expected = stepped(runtime, tokens, 3)
    for count in (1, 2, 3, 40, len(tokens)):
        check(runtime, tokens[:count], expected[: count - 1])


@pytest.mark.long
def test_the_next_reply_is_that_of_a_fresh_runtime(runtime: Runtime) -> None:
    options: Any = {"max_tokens": 24, "temperature": 0.0, "logprobs": 2}
    tokens = runtime.vocabulary.tokenize(HOWTO, special=False, start=True)
    for method in ("auto", "none", "suffix"):
        runtime.clear_cache()
        fresh = runtime.stream_tokens(tokens, method=method, **options).wait()
        forget_if_rounded(runtime)
        scored(runtime, tokens)
        after = runtime.stream_tokens(tokens, method=method, **options).wait()
        equal(after, fresh)
        # The same in one request, and for another prompt.
        forget_if_rounded(runtime)
        both = scored(runtime, tokens, method=method, **options)
        equal(both, fresh)
        assert len(both.prompt_logprobs) == len(tokens)
        assert both.stats.cached_prompt_tokens == 0
        forget_if_rounded(runtime)
        scored(runtime, tokens[:9][::-1])
        equal(runtime.stream_tokens(tokens, method=method, **options).wait(), fresh)
        assert [each.logprob for each in after.logprobs] == [each.logprob for each in fresh.logprobs]


def test_a_cancelled_request_leaves_no_trace(runtime: Runtime) -> None:
    tokens = runtime.vocabulary.tokenize(TEXT, special=False, start=True)
    options: Any = {"max_tokens": 12, "temperature": 0.0}
    runtime.clear_cache()
    fresh = runtime.stream_tokens(tokens, **options).wait()
    fractions: list[float] = []

    def stop(_: str, fraction: float) -> bool:
        fractions.append(fraction)
        return False

    forget_if_rounded(runtime)
    reply = scored(runtime, tokens, progress=stop)
    assert (reply.finish_reason, reply.prompt_logprobs, len(fractions)) == ("cancelled", (), 1)
    assert fractions[0] < 1
    equal(runtime.stream_tokens(tokens, **options).wait(), fresh)

    def cancel(_: str, __: float) -> bool:
        # Cancel from another thread, as the server does when a client disconnects.
        thread = threading.Thread(target=runtime.cancel)
        thread.start()
        thread.join()
        return True

    forget_if_rounded(runtime)
    reply = scored(runtime, tokens, progress=cancel)
    assert (reply.finish_reason, reply.prompt_logprobs) == ("cancelled", ())
    equal(runtime.stream_tokens(tokens, **options).wait(), fresh)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"draft": "demo-draft", "method": "model"}, {"draft": "none", "head": "demo-head", "method": "eagle"}],
)
def test_heads_and_draft_models_draft_after_them(options: dict[str, Any]) -> None:
    with edgespec.load("demo", context=512, **options) as runtime:
        tokens = runtime.vocabulary.tokenize(HOWTO, special=False, start=True)
        fresh = runtime.stream_tokens(tokens, max_tokens=24, temperature=0.0).wait()
        for prompt in (tokens, tokens[:5]):
            scored(runtime, prompt)
            equal(runtime.stream_tokens(tokens, max_tokens=24, temperature=0.0).wait(), fresh)


@pytest.mark.long
@pytest.mark.parametrize("write", [write_mamba, write_jamba, write_llama])
def test_other_architectures(write: Callable[[Path], Path], tmp_path: Path) -> None:
    with edgespec.load(str(write(tmp_path / "model.gguf")), "none", context=256) as runtime:
        tokens = [(7 + 31 * index) % runtime.target.vocab_size for index in range(90)]
        check(runtime, tokens)
        options: Any = {"max_tokens": 8, "temperature": 0.0}
        runtime.clear_cache()
        fresh = runtime.stream_tokens(tokens, **options).wait()
        scored(runtime, tokens)
        equal(runtime.stream_tokens(tokens, **options).wait(), fresh)


def test_a_model_without_rollback_reads_one_token_per_pass(tmp_path: Path) -> None:
    model = str(write_mamba(tmp_path / "model.gguf"))
    with edgespec.load(model, "none", context=256, exactness="bits") as runtime:
        check(runtime, [(7 + 31 * index) % runtime.target.vocab_size for index in range(40)])


@pytest.mark.long
def test_a_real_model(smollm2: Path) -> None:
    options: dict[str, Any] = {"context": 512, "exactness": "bits", "measure_costs": False, "threads": 1}
    with edgespec.load(str(smollm2), draft="none", **options) as runtime:
        tokens = runtime.vocabulary.tokenize("The capital of France is Paris. 🙂", special=False, start=True)
        check(runtime, tokens)
        assert sum(each.logprob for each in scored(runtime, tokens).prompt_logprobs[:7]) > -25


@pytest.mark.long
def test_the_context_is_the_limit(runtime: Runtime) -> None:
    tokens = runtime.vocabulary.tokenize(TEXT, special=False, start=True) * 3
    limit = runtime.context_tokens
    with raises(ContextFullError, limit + 1):
        scored(runtime, tokens[: limit + 1])
    longest = limit - runtime.target.capabilities.padding_tokens
    assert len(scored(runtime, tokens[:longest]).prompt_logprobs) == longest


def test_options(runtime: Runtime) -> None:
    tokens = runtime.vocabulary.tokenize(HOWTO, special=False, start=True)
    assert {len(each.top) for each in scored(runtime, tokens, prompt_logprobs=0).prompt_logprobs} == {0}
    assert runtime.stream_tokens(tokens, max_tokens=1).wait().prompt_logprobs == ()
    with raises(OptionError, option="prompt_logprobs"):
        scored(runtime, tokens, prompt_logprobs=21)
    with raises(OptionError, option="max_tokens"):
        runtime.stream_tokens(tokens, max_tokens=0)
    listed = scored(runtime, tokens).to_json()["prompt_logprobs"]
    assert isinstance(listed, list)
    assert len(listed) == len(tokens)


@pytest.mark.long
def test_the_queue_runs_them_like_other_requests(runtime: Runtime) -> None:
    tokens = runtime.vocabulary.tokenize(HOWTO, special=False, start=True)
    expected = scored(runtime, tokens).prompt_logprobs
    with RequestQueue(runtime) as queue:
        queued = [queue.stream_tokens(tokens, prompt_logprobs=3, max_tokens=0) for _ in range(3)]
        text = queue.stream(HOWTO, raw=True, prompt_logprobs=3, max_tokens=1)
        for each in queued:
            assert each.wait().prompt_logprobs == expected
        assert text.wait().prompt_logprobs == expected
        assert len(text.reply.tokens) == 1


@pytest.mark.long
def test_replies_in_parallel() -> None:
    with edgespec.load("demo", "none", parallel=2, context=512) as runtime:
        tokens = runtime.vocabulary.tokenize(TEXT, special=False, start=True)[:60]
        alone = scored(runtime, tokens).prompt_logprobs
        with RequestQueue(runtime) as queue:
            queued = [queue.stream_tokens(tokens, prompt_logprobs=3, max_tokens=4) for _ in range(2)]
            for each in queued:
                values = [token.logprob for token in each.wait().prompt_logprobs]
                # Passes that the replies share are rounded differently.
                np.testing.assert_allclose(values, [token.logprob for token in alone], rtol=0, atol=0.5)
