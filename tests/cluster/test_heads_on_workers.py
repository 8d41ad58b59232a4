"""Heads draft for a target on workers, run on this machine, and change no reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.api.loading import always_draft
from edgespec.errors import OptionError, WorkerLostError
from edgespec.options.load_options import LoadArguments
from tests.backends.published_heads import VOCAB
from tests.backends.tiny_heads import write_dflash
from tests.backends.tiny_models import write_gemma2, write_llama
from tests.cases import first
from tests.cluster.conftest import Worker
from tests.cluster.test_spread_targets import PROMPT, run
from tests.model.heads.published import write_head
from tests.model.heads.residual_files import Layout, random_arrays, write_heads
from tests.raising import raises

# In the last request, the target chooses between two tokens, so that random heads are sometimes right.
ASKED: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.8, "seed": 4, "logit_bias": {70: 60.0, 80: 60.0}},
)


def replies(target: str, prompt: str, max_tokens: int, **options: Any) -> list[edgespec.Reply]:
    with always_draft(), edgespec.load(target, "none", context=512, **options) as runtime:
        return [runtime.generate(prompt, max_tokens=max_tokens, **ask) for ask in ASKED]


def plain_tokens(target: str, prompt: str, max_tokens: int) -> list[Sequence[int]]:
    """Return the tokens of replies without drafts on this machine, which must equal those on workers."""
    return [reply.tokens for reply in replies(target, prompt, max_tokens, method="none")]


def both(workers: tuple[Worker, Worker]) -> str:
    return ",".join(f"{worker.address}=200MiB" for worker in workers)


@pytest.mark.parametrize("local", first([",local=200MiB", ""]))
def test_an_eagle_head_drafts_as_on_one_machine(local: str, workers: tuple[Worker, Worker]) -> None:
    options: dict[str, Any] = {"method": "eagle", "head": "demo-head"}
    drafted = replies("demo", PROMPT, 24, workers=both(workers) + local, **options)
    assert [reply.tokens for reply in drafted] == plain_tokens("demo", PROMPT, 24)
    here = replies("demo", PROMPT, 24, **options)
    for ours, theirs in zip(drafted, here, strict=True):
        assert ours.stats.accepted_tokens == theirs.stats.accepted_tokens > 0


def write_residual(layout: Layout, folder: Path) -> Path:
    return write_heads(folder / "head", layout, random_arrays(layout, 32, VOCAB))


def write_eagle1(folder: Path) -> Path:
    return write_head(folder / "head", "EAGLE-1", size=32, vocab=VOCAB)


def write_block(folder: Path) -> Path:
    return write_dflash(folder / "head.gguf", layers=(0, 1, 3), block=6, mask=7)


@pytest.mark.long
@pytest.mark.parametrize(
    ("write_target", "make_head", "method"),
    [
        # Hydra's heads take the same path.
        pytest.param(
            partial(write_llama, layers=3),
            partial(write_residual, Layout("medusa")),
            "medusa",
            marks=pytest.mark.long,
        ),
        (
            partial(write_llama, layers=3),
            partial(write_residual, Layout("hydra", grounded=True, prefix=True)),
            "hydra",
        ),
        (partial(write_llama, layers=3), write_eagle1, "eagle"),
        (partial(write_llama, layers=3), write_block, "dflash"),
        # llama.cpp cannot copy the inputs of this architecture's layers, so a hook copies the states.
        (write_gemma2, write_eagle1, "eagle"),
    ],
    ids=["medusa", "hydra", "eagle-1", "dflash", "gemma 2"],
)
def test_no_head_changes_a_reply(
    write_target: Callable[[Path], Path],
    make_head: Callable[[Path], Path],
    method: str,
    workers: tuple[Worker, Worker],
    tmp_path: Path,
) -> None:
    target, head = write_target(tmp_path / "target.gguf"), make_head(tmp_path)
    drafted = replies(str(target), "the file", 24, workers=both(workers), method=method, head=str(head))
    assert [reply.tokens for reply in drafted] == plain_tokens(str(target), "the file", 24)
    assert all(reply.stats.drafted_tokens for reply in drafted)


def test_verify_finds_no_violation(workers: tuple[Worker, Worker], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    options = ["-n", "24", "--temperatures", "0,0.8", "--draft-lengths", "4", "--methods", "eagle"]
    done = run(
        "verify",
        "--workers",
        both(workers),
        "--head",
        "demo-head",
        "--prompts",
        str(prompts),
        *options,
        "--json",
    )
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert not report["nothing_drafted"]
    assert report["methods"]["eagle"]["faults"] == 0


@pytest.mark.long
def test_a_lost_worker_is_an_error(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker()
    options: LoadArguments = {
        "workers": worker.address,
        "head": "demo-head",
        "method": "eagle",
        "context": 512,
    }
    with edgespec.load("demo", "none", **options) as runtime:
        stream = runtime.stream(PROMPT, temperature=0.0, max_tokens=200)
        assert next(stream).text
        worker.process.kill()
        with raises(WorkerLostError, worker.address):
            list(stream)
    start_worker(address=worker.address)
    with edgespec.load("demo", "none", **options) as runtime:
        assert runtime.generate(PROMPT, max_tokens=24).stats.accepted_tokens


def test_auto_uses_no_heads(workers: tuple[Worker, Worker]) -> None:
    with edgespec.load("demo", workers=workers[0].address, context=512) as runtime:
        assert not runtime.heads
    with raises(OptionError, "demo-head", code="option_not_supported", option="head"):
        edgespec.load("demo", workers=workers[0].address, head="demo-head", context=512)
