"""What a method of guessing is proved to do: replies held against those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from edgespec import Reply, Runtime, SamplingParams
from edgespec.backends.base import LanguageModel
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.methods import Drafters
from tests.parity.models import ASKED, Tiny, reply_to


class Row(NamedTuple):
    """A way of guessing: the method, and the shape of what the draft model grows."""

    title: str
    method: str
    branches: tuple[int, ...] = ()


ROWS = (
    Row("`none`", "none"),
    Row("`model`, chains", "model"),
    Row("`model`, trees", "model", (2, 2)),
    Row("`ngram`", "ngram"),
    Row("`model+ngram`", "model+ngram"),
)


class Cell(NamedTuple):
    """What was proved of a method. missing: why the model cannot; empty where it can.

    branched: passes with branches were verified.
    """

    missing: str = ""
    branched: bool = False


class Watched:
    """A model that remembers whether a pass ever had branches."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.branched = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def verify(self, tree: TokenTree, first: int = 0) -> Any:
        self.branched |= not tree.is_chain
        return self._model.verify(tree, first)


def prove(tiny: Tiny, row: Row) -> Cell:
    """Make replies by a method and hold them against plain decoding."""
    if row.method == "none":
        check_plain(tiny)
        return Cell()
    can = tiny.target.facts.capabilities
    if not can.rollback:
        report = Drafters(tiny.target, None).choose("ngram")[1]
        assert report.effective == "none"
        assert can.reason in report.reason
        return Cell(can.reason)
    if row.branches and not can.tree:
        return Cell(can.reason)
    plain = [tiny.plain(ask) for ask in ASKED]
    target: Any = Watched(tiny.target)
    draft: Any = Watched(tiny.draft) if "model" in row.method else None
    runtime = Runtime(target, None, Drafters(target, draft, branches=row.branches))
    replies = [reply_to(runtime, ask, row.method) for ask in ASKED]
    for ask, reply, tokens in zip(ASKED, replies, plain, strict=True):
        assert reply.tokens == tokens, f"{row.title} of {tiny.path}: {ask}"
    assert reply_to(runtime, ASKED[0], row.method, acceptance="rejection").tokens == plain[0]
    # That these follow the right law is enumerated in tests/engine: here it is enough that they come.
    drawn = reply_to(runtime, ASKED[-1], row.method, acceptance="rejection")
    assert drawn.tokens
    assert drawn.stats.drafted_tokens
    check_partly_right(replies)
    if row.branches:
        assert target.branched
        assert draft.branched
    return Cell(branched=target.branched)


def check_partly_right(replies: Sequence[Reply]) -> None:
    """Drafts were partly right and partly wrong: or nothing was taken back, or nothing kept."""
    drafted = sum(reply.stats.drafted_tokens for reply in replies)
    accepted = sum(reply.stats.accepted_tokens for reply in replies)
    assert 0 < accepted < drafted, f"{accepted} of {drafted}"


def check_plain(tiny: Tiny) -> None:
    """Plain decoding says what fresh prefills of all that was said would choose."""
    model = tiny.target
    for ask in ASKED[:4]:
        tokens = list(tiny.plain(ask))
        for at in range(0, len(tokens), 3):
            before = [*ask.prompt, *tokens[:at]]
            model.truncate(0)
            model.prefill(before[:-1])
            logits = model.verify(TokenTree.chain(before[-1]))
            params = SamplingParams(temperature=ask.temperature)
            assert Sampler(params, ask.seed, before).token(logits, 0) == tokens[at]
        model.truncate(0)
    greedy = tiny.plain(ASKED[0])
    runtime = Runtime(model, None, Drafters(model, None))
    assert reply_to(runtime, ASKED[0], "none", acceptance="rejection").tokens == greedy
    assert reply_to(runtime, ASKED[-1], "none", acceptance="rejection").tokens
