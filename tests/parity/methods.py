"""Proofs of drafting methods: their replies are compared with those of plain decoding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

import edgespec
from edgespec import EdgespecError, Reply, Runtime, SamplingParams
from edgespec.decode.drafter_set import DrafterSet
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.loading.prepare.lowbit import prepare_lowbit
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.target_costs import TargetCosts
from edgespec.methods.tree_growth import AdaptiveTreeGrowth
from edgespec.model.base import LanguageModel
from edgespec.options.methods import head_names, method, method_names, parse_method
from tests.backends.tiny_heads import write_dflash, write_eagle
from tests.model.heads.published import write_head
from tests.model.heads.published_dflash import write_dflash_head
from tests.model.heads.residual_files import Layout, random_arrays, write_heads
from tests.parity.models import (
    ASKED,
    CONSTRAINED,
    CONTEXT,
    FEW,
    IN_HALVES,
    KINDS,
    WITH_MTP,
    Ask,
    Column,
    Tiny,
    Voice,
    Zoo,
    reply_to,
    tiny_checkpoints,
)


class Row(NamedTuple):
    """A drafting configuration: a method, and how its draft model drafts.

    Attributes:
        draft: `near` has the target's tokens, `renamed` different ones, and with `text`, the vocabularies are
            compared only by their text.
        window: Number of tokens that the draft model sees.
        learn: Whether the draft model is trained between replies.
        beside: Other methods that the model is loaded for.
        every: Whether to prove it on all models of a kind rather than only the first.
        head: Whether it needs a head.
        seldom: Whether only the long tests prove it, because each run proves another row of the same code.
    """

    title: str
    method: str
    draft: Literal["near", "renamed"] = "near"
    branches: tuple[int, ...] | Literal["auto"] = ()
    window: int = 0
    text: bool = False
    learn: bool = False
    beside: tuple[str, ...] = ()
    every: bool = False
    head: bool = False
    seldom: bool = False

    @property
    def drafters(self) -> tuple[str, ...]:
        return parse_method(self.method)

    @property
    def network(self) -> str:
        """Which code of the backends runs the head, or an empty string without a head."""
        kinds = ((name, method(name).head) for name in self.drafters)
        return next((kind.network or name for name, kind in kinds if kind), "")

    @property
    def itself(self) -> tuple[str, ...]:
        """In which ways the target is its own draft."""
        return tuple(name for name in (*self.drafters, *self.beside) if method(name).uses_target_cache)

    @property
    def voice(self) -> Voice:
        """The target's style of writing, chosen so that a draft can sometimes be right."""
        return "quiet" if "layerskip" in self.itself else "letters" if self.text else "plain"

    @property
    def loaded(self) -> Row:
        """What rows have in common that one loading is enough for."""
        own = (
            name for name in self.drafters if method(name).uses_target_cache or method(name).needs == "head"
        )
        loaded = "none" if self.method == "none" else "+".join(own)
        return self._replace(title="", method=loaded, every=False, seldom=False)


_TARGET_ROWS = (
    Row("`none`", "none", every=True),
    Row("`model`, chains", "model", every=True),
    Row("`model`, trees (`--draft-branches 2,2`)", "model", branches=(2, 2)),
    Row("`model`, trees that pay (`--draft-branches auto`)", "model", branches="auto"),
    Row("`model`, a window (`--draft-window 12`)", "model", window=12),
    Row("`model` of another vocabulary, by its tokens", "model", "renamed"),
    Row("`model` of another vocabulary, by its text", "model", "renamed", text=True),
    Row("`model`, taught between replies (`--learn`)", "model", learn=True, every=True),
    Row("`layerskip`", "layerskip", every=True),
    Row("`lowbit`", "lowbit", every=True),
    Row("`lowbit`, loaded with `layerskip`", "lowbit", beside=("layerskip",), every=True),
)
_TEXT_ROWS = (
    Row("`lookahead`", "lookahead"),
    Row("`grammar`", "grammar", every=True),
    Row("`model+grammar`", "model+grammar"),
    Row("`suffix`", "suffix"),
    Row("`ngram`", "ngram", every=True),
    Row("`model+ngram`", "model+ngram"),
    Row("`model+suffix`", "model+suffix", seldom=True),
    Row("`layerskip+suffix`", "layerskip+suffix", every=True),
    Row("`lowbit+suffix`", "lowbit+suffix", seldom=True),
)


def _head_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a method that drafts with a head."""
    yield Row(f"`{name}`, chains", name, head=True, every=True)
    yield Row(f"`{name}`, trees (`--draft-branches 2,2`)", name, branches=(2, 2), head=True)
    # The same code merges the drafts of all heads with repeated text.
    yield Row(f"`{name}+suffix`", f"{name}+suffix", head=True, seldom=name not in ("mtp", "eagle"))


def _rows() -> Iterator[Row]:
    """Yield the rows whose methods edgespec has."""
    rows = (*_TARGET_ROWS, *chain.from_iterable(map(_head_rows, head_names())), *_TEXT_ROWS)
    known = {"none", *method_names()}
    return (row for row in rows if known.issuperset((*row.method.split("+"), *row.beside)))


ROWS = tuple(_rows())

_RESIDUAL_LAYOUTS = {"medusa": Layout("medusa"), "hydra": Layout("hydra", grounded=True)}
# The size of a hidden state of the tiny models of a backend.
_STATE_SIZES = {"llama.cpp": 32, "MLX": 64}
# The exit layer of some GGUF models. Gemma 3's layers depend on their index, except for the ones used here.
_EXITS = {"gemma3": 6}
_SINKS = 2
# Write a random head for any of the tiny models. Models for `mtp` contain their own.
_WRITE_HEAD: dict[str, Callable[[Path], Path]] = {"eagle": write_eagle, "dflash": write_dflash}


class Cell(NamedTuple):
    """The result of proving a method.

    Attributes:
        missing: Why the model cannot use the method, or empty if it can.
        branched: Whether passes with branches were verified.
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


@contextmanager
def rows_for_nothing() -> Iterator[pytest.MonkeyPatch]:
    """Make wide passes and drafts free, so that nothing is skipped because it would save no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetCosts, "curve", lambda *_: CostCurve((1, 2), (1.0, 1.0)))
        still: Callable[[], float] = lambda: 0.0  # noqa: E731
        patch.setattr(
            "edgespec.methods.model.making.AdaptiveTreeGrowth", partial(AdaptiveTreeGrowth, clock=still)
        )
        patch.setattr("edgespec.decode.drafter_set.CombinedDrafter", partial(CombinedDrafter, clock=still))
        yield patch


def models_of(zoo: Zoo, row: Row, column: Column) -> list[Tiny]:
    """The models a row is proved on."""
    names = WITH_MTP.get(column, KINDS[column]) if "mtp" in row.drafters else KINDS[column]
    if "layerskip" in row.itself:
        names = (*IN_HALVES.get(column, ()), *names)
    return [zoo.tiny(column.backend, name, row.voice) for name in (names if row.every else names[:1])]


def loaded_for(tiny: Tiny, row: Row) -> Row:
    """Return how the model is loaded for a row. All rows give the same result without rollback."""
    alike = row.method != "none" and not tiny.target.facts.capabilities.rollback
    return ROWS[1].loaded if alike else row.loaded


def prove(tiny: Tiny, rows: Sequence[Row], *, briefly: bool) -> dict[Row, Cell]:
    """Load a model once for all these rows, and compare each row's replies with plain decoding."""
    if rows[0].method == "none":
        check_plain(tiny, FEW if briefly else ASKED)
        return {rows[0]: Cell()}
    with rows_for_nothing() as patch:
        if rows[0].text:
            patch.setattr("edgespec.methods.model.translation.MIN_TRANSLATED_FRACTION", 2.0)
        try:
            runtime = load(tiny, rows)
        except EdgespecError as error:
            return dict.fromkeys(rows, Cell(why_not(error, tiny)))
        with runtime:
            return {row: compared(tiny, row, runtime, briefly) for row in rows}


def load(tiny: Tiny, rows: Sequence[Row]) -> Runtime:
    """Load a tiny model as a user would, after preparing it if necessary."""
    how = rows[0]
    if tiny.backend == "llama.cpp":
        if "layerskip" in how.itself:
            prepare_layerskip(tiny.path, _EXITS.get(tiny.name, 1))
        if "lowbit" in how.itself and "lowbit" in tiny.target.facts.capabilities.self_draft_methods:
            prepare_lowbit(tiny.path)
    names = {name for row in rows for name in row.drafters} | set(how.beside)
    options: dict[str, Any] = {}
    if names & {"model", "lowbit"}:
        options |= {"draft_window": how.window, "draft_sinks": _SINKS}
    if "layerskip" in names and tiny.backend == "MLX":
        options["exit_layer"] = 1
    if how.head and "mtp" not in how.drafters:
        name = next(name for name in how.drafters if name in head_names())
        options["head"] = write_head_for(tiny, name)
    return edgespec.load(
        str(tiny.path),
        "none" if how.itself or how.head else str(getattr(tiny, how.draft)),
        context=CONTEXT,
        method=how.method,
        methods=[*(row.method for row in rows), *how.beside],
        draft_branches=how.branches,
        learn=how.learn,
        **options,
    )


def write_head_for(tiny: Tiny, method: str) -> Path:
    """A random head for a tiny model."""
    if tiny.backend == "MLX" and method in ("eagle", "dflash"):
        size, vocab = tiny_checkpoints.configuration(tiny.name)["hidden_size"], tiny.target.facts.vocab_size
        folder, layers = tiny.path.parent / method, [0, 1, 2]
        if method == "eagle":
            return write_head(folder, size=size, vocab=vocab, eagle_aux_hidden_state_layer_ids=layers)
        write_dflash_head(folder, size=size, vocab=vocab, states=layers)
        return folder
    if layout := _RESIDUAL_LAYOUTS.get(method):
        size = _STATE_SIZES[tiny.backend]
        arrays = random_arrays(layout, size, tiny.target.facts.vocab_size)
        return write_heads(tiny.path.parent / method, layout, arrays)
    return _WRITE_HEAD[method](tiny.path.parent / f"{method}.gguf")


_METHOD = re.compile(r"^method '.*' cannot be used: ")
_NUMBERS = re.compile(r" \(by .*?\)")


def why_not(error: EdgespecError, tiny: Tiny) -> str:
    """What a message says of any model of the kind."""
    what = _NUMBERS.sub("", _METHOD.sub("", error.what)).replace(f"the draft {tiny.near.name} ", "the draft ")
    for name in (str(tiny.path), tiny.path.name):
        what = what.replace(f"{name} ", "it ")
    return what


def compared(tiny: Tiny, row: Row, runtime: Runtime, briefly: bool) -> Cell:
    """Compare a loaded model's replies by a method with plain decoding."""
    can = tiny.target.facts.capabilities
    asked = CONSTRAINED if row.method == "grammar" else FEW if briefly else (*CONSTRAINED, *ASKED)
    plain = [tiny.plain(ask) for ask in asked]
    if runtime.method.effective == "none":
        assert not can.rollback
        assert can.reason in runtime.method.reason
        assert reply_to(runtime, asked[0], row.method, effective="none").tokens == plain[0]
        return Cell(can.reason)
    if tiny.backend == "llama.cpp":
        assert Path(runtime.target.path).is_dir() == ("layerskip" in row.itself)
    session, model = runtime._session, runtime._session.target
    target: Any = Watched(model)
    session.target = target
    if row.learn:  # it is trained between replies
        reply_to(runtime, ASKED[0], row.method)
        session.run_idle_work(lambda: True)
    replies = [reply_to(runtime, ask, row.method) for ask in asked]
    for ask, reply, tokens in zip(asked, replies, plain, strict=True):
        assert reply.tokens == tokens, f"{row.title} of {tiny.path}: {ask}"
    assert reply_to(runtime, asked[0], row.method, acceptance="rejection").tokens == plain[0]
    # tests/engine checks that these follow the right distribution. Here it is enough that they are generated.
    drawn = reply_to(runtime, asked[-1], row.method, acceptance="rejection")
    assert drawn.tokens
    assert drawn.stats.drafted_tokens
    check_partly_right(replies, always_right=row.method == "grammar")
    check_draft(runtime, row)
    if row.learn:
        learnt = session.report().note
        assert "was trained" in learnt
        assert "uses the original draft model" not in learnt
    session.target = model
    if row.branches and not can.tree:
        assert not target.branched
        return Cell(can.reason)
    if row.branches:
        assert target.branched
    return Cell(branched=target.branched)


def check_draft(runtime: Runtime, row: Row) -> None:
    """The draft was of the kind that the row is about."""
    notice = runtime.target.notice
    assert (f"sees only the first {_SINKS} and the last {row.window} tokens" in notice) == bool(row.window)
    assert ("under different IDs" in notice) == (row.draft == "renamed" and not row.text)
    assert ("must be tokenized again" in notice) == row.text


def check_partly_right(replies: Sequence[Reply], always_right: bool) -> None:
    """Check that drafts were partly right and partly wrong, so that tokens were both kept and rolled back."""
    drafted = sum(reply.stats.drafted_tokens for reply in replies)
    accepted = sum(reply.stats.accepted_tokens for reply in replies)
    assert 0 < accepted < drafted + always_right, f"{accepted} of {drafted}"


def check_plain(tiny: Tiny, asked: Sequence[Ask]) -> None:
    """Check that plain decoding chooses the same tokens as fresh prefills of the same text."""
    model = tiny.target
    for ask in asked:
        if ask.regex:
            continue
        tokens = list(tiny.plain(ask))
        for at in range(0, len(tokens), 3):
            before = [*ask.prompt, *tokens[:at]]
            model.truncate(0)
            model.prefill(before[:-1])
            logits = model.verify(TokenTree.chain(before[-1]))
            params = SamplingParams(**{key: ask.sampling[key] for key in ask.sampling if key != "seed"})
            assert Sampler(params, ask.seed, before).token(logits, 0) == tokens[at]
        model.truncate(0)
    greedy = tiny.plain(ASKED[0])
    runtime = Runtime(model, None, DrafterSet(model))
    assert reply_to(runtime, ASKED[0], "none", acceptance="rejection").tokens == greedy
    assert reply_to(runtime, ASKED[-1], "none", acceptance="rejection").tokens
