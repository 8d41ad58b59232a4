"""A method registered only by this test can be planned, loaded, used, verified and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.api.loading import always_draft
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import OptionError
from edgespec.methods.base import Drafter, DrafterContext, MissingDrafter
from edgespec.options.methods import Method, MethodDocs, register, sources_text
from tests.made_up import PROMPT, check_commands
from tests.raising import raises

CONTEXT_TOKENS = 512
# For models whose replies are not compared.
QUICK: dict[str, Any] = {"measure_costs": False, "exactness": "off"}


class ParrotDrafter(Drafter):
    """Drafts the whole text again, for as long as its last token is the same as the first time."""

    name = "parrot"
    is_lookup = True

    def __init__(self, longest: int) -> None:
        self._longest, self._tokens = longest, list[int]()

    def begin(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        last = self._tokens[-1]
        start = self._tokens.index(last) + 1
        return TokenTree.chain(last, self._tokens[start : start + min(draft_length, self._longest)])

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._tokens.extend(tokens)


def _make(context: DrafterContext) -> Drafter | MissingDrafter:
    if context.target.facts.name == "demo-mlx":
        return MissingDrafter("parrots do not speak MLX", "use demo")
    return ParrotDrafter(context.arguments["draft_sinks"])


PARROT = Method(
    name="parrot",
    label="text said before",
    help="the text so far, from its first matching token",
    docs=MethodDocs("the text so far", "nothing", "none"),
    order=105,
    make=_make,
    reads=frozenset({"draft_sinks"}),
    estimate_bytes=lambda _target, context_tokens: 1000 * context_tokens,
)


@pytest.fixture(autouse=True)
def parrot() -> Iterator[None]:
    unregister = register(PARROT)
    yield
    unregister()


def test_plan() -> None:
    def cache_bytes(method: str) -> dict[str, int]:
        items = edgespec.plan("demo", "none", context=CONTEXT_TOKENS, method=method).plan.items
        return {item.name: item.bytes for item in items if item.kind == "cache"}

    added = cache_bytes("parrot").items() - cache_bytes("ngram").items()
    assert added == {("parrot drafter", 1000 * CONTEXT_TOKENS)}


@pytest.mark.parametrize("method", ["parrot", "parrot+suffix", "model+parrot"])
def test_replies_equal_plain_decoding(method: str) -> None:
    # The costs measured on a busy machine could suggest that drafting saves no time.
    options: Any = {"context": CONTEXT_TOKENS, "method": method, "draft_sinks": 3}
    with always_draft(), edgespec.load("demo", **options) as runtime:
        plain = runtime.generate(PROMPT, max_tokens=40, seed=1, temperature=0.8, method="none")
        reply = runtime.generate(PROMPT, max_tokens=40, seed=1, temperature=0.8)
        assert reply.tokens == plain.tokens
        assert reply.method.effective == method
        assert reply.stats.drafted_tokens
        assert "parrot" in runtime.drafters
    assert "text said before" in sources_text(method)


def test_auto_uses_it_if_the_record_says_so(request: pytest.FixtureRequest) -> None:
    with edgespec.load("demo", "none", context=CONTEXT_TOKENS, **QUICK) as runtime:
        assert runtime.method.effective == "suffix"
        with raises(OptionError, "parrot", code="method_unavailable", option="method"):
            runtime.generate(PROMPT, max_tokens=2, method="parrot")
    unregister = register(replace(PARROT, name="parrot2", auto="always", always_loaded=True))
    request.addfinalizer(unregister)
    with edgespec.load("demo", "none", context=CONTEXT_TOKENS, **QUICK) as runtime:
        assert runtime.method.effective == "parrot2+suffix"
        runtime.generate(PROMPT, max_tokens=20)


def test_it_says_why_it_cannot_draft() -> None:
    pytest.importorskip("mlx.core")
    with pytest.raises(OptionError) as caught:
        edgespec.load("demo-mlx", "none", context=CONTEXT_TOKENS, method="parrot", **QUICK)
    assert caught.value.what == "method 'parrot' cannot be used: parrots do not speak MLX"
    assert caught.value.next_step == "use demo"


def test_its_options_are_checked() -> None:
    with raises(OptionError, "suffix", code="option_without_effect", option="draft_sinks") as caught:
        edgespec.load("demo", "none", method="suffix", draft_sinks=3)
    assert "parrot" in caught.value.next_step
    with raises(OptionError, "parrot", code="option_without_effect", option="draft_branches"):
        edgespec.load("demo", "none", method="parrot", draft_branches=(2,))


@pytest.mark.parametrize(
    ("flags", "options", "code", "reason"),
    [
        ({"shares_passes": False}, {"parallel": 2}, "method_unavailable", "replies at"),
        ({"works_on_workers": False}, {"workers": "127.0.0.1:1"}, "option_not_supported", "--workers yet"),
    ],
)
def test_what_the_record_rules_out_is_refused(
    flags: dict[str, bool], options: dict[str, Any], code: str, reason: str, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(register(replace(PARROT, name="lonely", **flags)))  # type: ignore[arg-type]
    with raises(OptionError, reason, code=code):
        edgespec.load("demo", "none", context=CONTEXT_TOKENS, method="lonely", **options)


def test_the_command_line(tmp_path: Path) -> None:
    text = "Use the command `ls` to list the files in the folder, and to sort the list by size. "
    target = ("--target", "demo", "--draft", "none", "--context", str(CONTEXT_TOKENS))
    check_commands(tmp_path / "prompts.jsonl", 3 * text, *target)
