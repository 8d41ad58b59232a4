"""Replies are measured one by one, each as if it were the first. An interrupted run keeps its results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from edgespec import Message, Runtime
from edgespec.bench.figures import make_report
from edgespec.bench.runs import BenchPlan, BenchRun, method_configs, run
from edgespec.errors import BackendError, CancelledError, ContextFullError, OptionError
from edgespec.losslessness.cases import Prompt
from edgespec.model.base import Progress
from tests.tables import near, runtime, table
from tests.tabular import TabularModel

PROMPTS = tuple(
    Prompt(f"p-{text}", (Message("user", text),), text[0]) for text in ("abcabc", "fedfed", "aab")
)
WAYS = method_configs(["auto", "model", "ngram"])


class Counting(TabularModel):
    """A table that counts the tokens of prompts it has read."""

    def __init__(self, like: TabularModel) -> None:
        super().__init__(like._table)
        self.read: list[int] = []

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self.read.append(len(tokens))
        super().prefill(tokens, progress)


@pytest.fixture
def draft() -> Counting:
    return Counting(near(table(1), 2))


@pytest.fixture
def pair(draft: Counting) -> Iterator[Runtime]:
    with runtime(table(1), draft) as pair:
        yield pair


def plan(**changes: Any) -> BenchPlan:
    usual: dict[str, Any] = {
        "prompts": PROMPTS,
        "configs": WAYS,
        "temperatures": (0.0, 0.8),
        "repeats": 2,
        "max_tokens": 12,
    }
    return BenchPlan(**usual | changes)


def test_everything_is_measured_in_the_order_of_the_plan(pair: Runtime) -> None:
    wanted, shares = plan(), []

    def progress(what: str, fraction: float) -> bool:
        shares.append(fraction)
        return True

    found = run(pair, wanted, progress=progress)
    assert shares == sorted(shares)
    assert 0.0 == shares[0] < shares[-1] < 1.0
    assert (found.ending, found.error) == ("complete", "")
    assert len(found.rows) == wanted.replies == 3 * 2 * 2 * 4
    in_order = [
        (each.prompt.name, each.temperature, each.repeat, config, place)
        for each in wanted.rounds()
        for place, config in enumerate(each.configs)
    ]
    assert [(r.prompt, r.temperature, r.repeat, r.config, r.position) for r in found.rows] == in_order
    told = make_report(pair, wanted, found)
    assert told.differing == 0
    assert all(each.identical == each.compared == 6 for each in told.figures if each.category is None)
    assert {each.category for each in told.figures} == {None, "a", "f"}
    assert told.peak_memory_bytes > 0


def test_every_reply_reads_its_prompt_anew(pair: Runtime, draft: Counting) -> None:
    model = method_configs(["model", "model"], [2, 3])
    found = run(pair, plan(prompts=PROMPTS[:1], configs=model, temperatures=(0.0,)))
    assert {row.reply.stats.cached_prompt_tokens for row in found.rows} == {0}
    # The draft model reads the prompt except its last token: once for warm-up, and for every drafted reply.
    drafted = [row for row in found.rows if row.config.method == "model"]
    prompt_tokens = drafted[0].reply.stats.prompt_tokens
    assert draft.read.count(prompt_tokens - 1) == len(drafted) + 1


def test_the_rows_as_scripts_read_them(pair: Runtime) -> None:
    wanted = plan(prompts=PROMPTS[:1], repeats=1)
    told = json.loads(json.dumps(make_report(pair, wanted, run(pair, wanted)).to_json(rows=True)))
    assert set(told) == {
        "target", "target_quantisation", "draft", "acceptance", "max_tokens", "repeats", "seed",
        "planned_replies", "replies", "ending", "error", "curve", "peak_memory_bytes",
        "differing_replies", "exactness", "figures", "oracle_comparisons", "rows",
    }  # fmt: skip
    assert told["replies"] == told["planned_replies"] == len(told["rows"]) == 8
    first = told["rows"][0]
    assert set(first) == {
        "prompt", "category", "temperature", "repeat", "position", "method", "draft_length", "again",
        "seconds", "reply",
    }  # fmt: skip
    assert first["reply"]["stats"]["generated_tokens"] == len(first["reply"]["tokens"])
    assert "text" not in first["reply"]
    assert "rows" not in make_report(pair, wanted, run(pair, wanted)).to_json()


def cut_after(count: int, pair: Runtime, wanted: BenchPlan) -> BenchRun:
    """Return a run that the user stops while a reply is generated, after `count` finished ones."""
    done: list[str] = []

    def progress(what: str, fraction: float) -> bool:
        done.append(what)
        return fraction < (count + 0.5) / wanted.replies

    return run(pair, wanted, progress=progress)


def test_what_was_measured_before_an_end_is_kept(pair: Runtime) -> None:
    wanted = plan()
    found = cut_after(9, pair, wanted)
    assert (found.ending, len(found.rows)) == ("cancelled", 10)
    told = make_report(pair, wanted, found)
    assert told.figures
    assert (told.planned, len(told.rows)) == (48, 10)
    assert pair.generate("abc", max_tokens=2).tokens  # it can go on


def test_an_end_before_anything_was_measured(pair: Runtime) -> None:
    with pytest.raises(CancelledError):
        run(pair, plan(), progress=lambda what, fraction: not what.startswith("p-"))
    with pytest.raises(CancelledError):
        run(pair, plan(), progress=lambda what, fraction: False)


def test_a_reply_that_is_being_written_is_cut_short(pair: Runtime) -> None:
    """The run is cancelled from another thread, as with Ctrl-C, and this reply is discarded."""
    wanted, asked = plan(), []

    def progress(what: str, fraction: float) -> bool:
        asked.append(what)
        if what.startswith("p-") and asked.count(what) == 3 and fraction > 0:
            pair.cancel()
        return True

    found = run(pair, wanted, progress=progress)
    assert found.ending == "cancelled"
    assert 0 < len(found.rows) < wanted.replies
    assert all(row.reply.finish_reason != "cancelled" for row in found.rows)


def test_no_reply_is_begun_after_the_time_is_over(pair: Runtime) -> None:
    found = run(pair, plan(), max_seconds=1e-9)
    assert (found.ending, found.rows) == ("time", ())
    assert make_report(pair, plan(), found).figures == ()
    assert run(pair, plan(), max_seconds=1e9).ending == "complete"


def test_what_fails_half_way_leaves_what_was_measured(pair: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, count = Runtime.stream_tokens, [0]

    def stream_tokens(self: Runtime, tokens: Sequence[int], **options: Any) -> Any:
        count[0] += 1
        if count[0] == 30:
            raise BackendError("the device is gone", "plug it in")
        return whole(self, tokens, **options)

    monkeypatch.setattr(Runtime, "stream_tokens", stream_tokens)
    found = run(pair, plan())
    assert (found.ending, found.error) == ("failed", "the device is gone; plug it in")
    assert found.rows
    count[0] = 29
    with pytest.raises(BackendError):
        run(pair, plan())


def test_a_plan_that_cannot_be_served_is_refused_at_once(pair: Runtime) -> None:
    asked: list[str] = []

    def progress(what: str, fraction: float) -> bool:
        asked.append(what)
        return True

    for changes, error in (
        ({"max_tokens": 100_000}, ContextFullError),
        ({"configs": method_configs(["suffix"])}, OptionError),
    ):
        with pytest.raises(error):
            run(pair, plan(**changes), progress=progress)
    assert asked == []
