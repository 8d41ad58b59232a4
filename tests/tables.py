"""Runtimes with table models: real sessions and drafters with models that take no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgespec.api.runtime import Runtime
from edgespec.decode.drafter_set import ANY_REPLY, DrafterSet, ReplyKind, ResolvedMethod
from edgespec.decode.reply import MethodReport
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.methods.base import Drafter
from edgespec.methods.grammar.drafter import GrammarDrafter
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.ngram.drafter import NgramDrafter
from edgespec.model.base import LanguageModel
from tests.tabular import TabularModel

VOCAB = 8
# The vocabulary is `abc...`. Its last letter ends a reply.
END = VOCAB - 1
PROMPT = "abcab"
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "penalty_window": 7,
    "logit_bias": {1: 0.8, 3: -1.0},
}


def table(
    seed: int, *, vocab: int = VOCAB, spread: float = 1.5, end: float = -2.0, **options: Any
) -> TabularModel:
    """Return a random table of order 2. `end` is added to the logit of the end token."""
    logits = (np.random.default_rng(seed).normal(size=(vocab**2, vocab)) * spread).astype(np.float32)
    logits[:, -1] += end
    return TabularModel(logits, **options)


def sampling_settings(
    temperatures: Sequence[float], penalties: dict[str, Any] = PENALTIES
) -> dict[str, dict[str, Any]]:
    """Return reply options for each temperature, without and with penalties, by name."""
    return {
        f"T {temperature}{', penalties' if more else ''}": {"temperature": temperature} | more
        for temperature in temperatures
        for more in ({}, penalties)
    }


def near(model: TabularModel, seed: int, noise: float = 0.7) -> TabularModel:
    """Return a noisy copy of a table, as a useful draft model."""
    random = np.random.default_rng(seed)
    logits = model._table + random.normal(size=model._table.shape).astype(np.float32) * noise
    return TabularModel(logits, context_tokens=model.facts.context_tokens)


def lookups() -> dict[str, Drafter]:
    """Return new drafters that need only the text, by name."""
    return {"grammar": GrammarDrafter(), "ngram": NgramDrafter()}


def runtime(
    target: LanguageModel,
    draft: LanguageModel | None = None,
    *,
    branches: tuple[int, ...] = (),
    **options: Any,
) -> Runtime:
    """Return a runtime for a target and an optional draft model."""
    drafters = DrafterSet(
        target,
        {
            **lookups(),
            **({"model": ModelDrafter(draft, target.facts.vocab_size, branches=branches)} if draft else {}),
        },
        chain_model=None if branches else draft,
        why_no_draft="no draft model was requested",
    )
    return Runtime(target, draft, drafters, **options)


class Chosen(DrafterSet):
    """A drafter set that uses one drafter for every method except `none`."""

    def __init__(self, target: LanguageModel, drafter: Drafter) -> None:
        super().__init__(target)
        self._drafter = drafter

    def resolve(self, method: str, kind: ReplyKind = ANY_REPLY) -> ResolvedMethod:
        if method == "none":
            return ResolvedMethod((), False, MethodReport(method, "none", "asked for"))
        name = self._drafter.name
        return ResolvedMethod((name,), False, MethodReport(method, name, "the only one"))

    def choose(self, method: ResolvedMethod) -> Drafter | None:
        return self._drafter if method.names else None

    def chooses_length(self, method: ResolvedMethod) -> bool | None:
        return self._drafter.chooses_length if method.names else None

    def interrupt(self, enabled: bool) -> None:
        self._drafter.interrupt(enabled)


def with_drafter(target: LanguageModel, drafter: Drafter) -> Runtime:
    """Return a runtime whose only drafter is the given one."""
    return Runtime(target, None, Chosen(target, drafter))


class Saying(Drafter):
    """A drafter that proposes what a function returns for the tokens so far and the draft length."""

    name = "saying"

    def __init__(self, say: Callable[[list[int], int], TokenTree | Sequence[int]]) -> None:
        self._say = say
        self.tokens: list[int] = []
        self.closed = False

    def begin(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        said = self._say(self.tokens, draft_length)
        return said if isinstance(said, TokenTree) else TokenTree.chain(self.tokens[-1], said)

    def commit(self, tokens: tuple[int, ...]) -> None:
        self.tokens += tokens

    def close(self) -> None:
        self.closed = True


def knowing(text: Sequence[int]) -> Saying:
    """Return a drafter that proposes the tokens of a known sequence, followed by zeros."""

    def say(tokens: list[int], draft_length: int) -> Sequence[int]:
        rest = [*text[len(tokens) :], *([0] * draft_length)]
        return rest[:draft_length]

    return Saying(say)
