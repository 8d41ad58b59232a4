"""The peer run: what it tells llama-server, what it reads of it, its figures, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import EdgespecError, OptionError
from scripts import bench_peers
from scripts.peers.configurations import GRID, Configuration, parse, server_flags
from scripts.peers.figures import Measured, Speeds, alike, compare, decode_speed, fastest, whole_speed
from scripts.peers.llama_server import (
    LlamaServer,
    body_for,
    kernels_of,
    kernels_of_binary,
    run_of,
    version_of,
)
from scripts.peers.pool import Peer, Pool
from scripts.peers.replies import Asked, Run
from scripts.peers.report import report
from scripts.peers.worker import Ask, Worker
from tests.scripts import stand_in_server
from tests.scripts.stand_in_server import ANSWER

ASKED = Asked(max_tokens=8, temperature=0.0, seed=1, top_k=40, top_p=0.95, min_p=0.05)
OURS, THEIRS, FAST = (
    Configuration("edgespec", "none"),
    Configuration("llama-server", "none"),
    Configuration("llama-server", "draft:4"),
)


def test_a_configuration_says_all_that_the_server_is_told() -> None:
    assert server_flags("none", None) == []
    assert server_flags("draft:4", "d.gguf") == [
        *("--spec-type", "draft-simple"),
        *("--spec-draft-model", "d.gguf", "--spec-draft-n-max", "4"),
    ]
    assert server_flags("ngram-map-k:3:8+draft:2", "d.gguf") == [
        *("--spec-type", "ngram-map-k,draft-simple"),
        *("--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "8"),
        *("--spec-draft-model", "d.gguf", "--spec-draft-n-max", "2"),
    ]
    assert server_flags("ngram-mod:4:8", None)[2:] == [
        *("--spec-ngram-mod-n-match", "4", "--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "8")
    ]
    told = [tuple(server_flags(name, "d.gguf")) for name in GRID.split(",")]
    assert len(set(told)) == len(told)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "draft",
        "draft:0",
        "draft:-1",
        "draft:4:5",
        "ngram",
        "ngram-simple:3",
        "ngram-cache:1:2",
        "none+draft:2",
    ],
)
def test_what_is_no_configuration_is_refused(name: str) -> None:
    with pytest.raises(OptionError):
        server_flags(name, "d.gguf")


def test_a_method_has_a_draft_length_or_none() -> None:
    assert parse("model:4") == ("model", 4)
    assert parse("model+suffix") == ("model+suffix", None)
    for wrong in ("", "model:", "model:0", "model:x", ":4"):
        with pytest.raises(OptionError):
            parse(wrong)
    with pytest.raises(OptionError, match="draft model"):
        server_flags("draft:4", None)


def test_the_server_gets_the_very_tokens_and_keeps_none() -> None:
    body = body_for((5, 6), ASKED)
    assert body["prompt"] == [5, 6]
    assert body["cache_prompt"] is False
    assert body["return_tokens"] is True
    assert (body["n_predict"], body["temperature"], body["top_k"]) == (8, 0.0, 40)


def test_the_first_token_of_an_answer_was_made_with_the_prompt() -> None:
    run = run_of(ANSWER, 3, seconds=0.05)
    assert run == Run((7, 8, 9), 2, 0.004, 0.05, accepted=1, passes=2)
    assert decode_speed(run) is None  # two tokens are too few
    assert whole_speed(run_of({**ANSWER, "tokens": [1] * 5}, 3, seconds=0.05)) == pytest.approx(100)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({}, "no 'tokens'"),
        ({"tokens": [1]}, "no 'timings'"),
        ({"tokens": [1], "timings": {"predicted_n": 1}}, "no 'prompt_n'"),
        ({**ANSWER, "timings": {**ANSWER["timings"], "prompt_n": 1}}, "read 1 tokens of a prompt of 3"),  # type: ignore[dict-item]
    ],
)
def test_an_answer_that_lacks_something_is_refused(answer: dict[str, Any], says: str) -> None:
    with pytest.raises(EdgespecError, match=says):
        run_of(answer, 3, 1.0)


@pytest.fixture(autouse=True)
def logs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a server that failed stays, and these fail on purpose."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def handlers_kept() -> Iterator[None]:
    """A script handles signals as it likes."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def binary(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The stand-in, under the name that tells what it does."""
    path = tmp_path / str(request.param)
    path.write_text(f"#!{sys.executable}\n{Path(stand_in_server.__file__).read_text('utf-8')}", "utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("binary", ["answers"], indirect=True)
def test_a_server_is_started_asked_and_ended(binary: Path) -> None:
    server = LlamaServer(binary, [])
    server.start()
    try:
        assert server.ask((1, 2, 3, 4), ASKED).tokens == (7, 8, 9)
        process = psutil.Process(server.pid)
        os.kill(server.pid, signal.SIGSTOP)
    finally:
        server.stop()
    assert not process.is_running()
    assert version_of(binary) == "version: 1 (stand-in)"
    assert kernels_of_binary(binary) == "AVX2 OPENMP" == kernels_of("CPU : AVX2 = 1 | FMA = 0 | OPENMP = 1")


@pytest.mark.parametrize(
    ("binary", "says"),
    [
        ("falls", r"does not answer \(RemoteProtocolError\)"),
        ("refuses", "answers with status 400: .*exceeds the context size"),
    ],
    indirect=["binary"],
)
def test_a_server_that_fails_at_a_reply_is_told_in_one_line(binary: Path, says: str) -> None:
    server = LlamaServer(binary, [])
    server.start()
    try:
        with pytest.raises(EdgespecError, match=says) as failed:
            server.ask((1, 2, 3), ASKED)
    finally:
        server.stop()
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("binary", ["dies"], indirect=True)
def test_a_server_that_dies_at_its_start_tells_why(binary: Path) -> None:
    server = LlamaServer(binary, ["--spec-type", "ngram-cache"])
    with pytest.raises(
        EdgespecError, match=r"at its start \(exit status 1\): E error: failed to load the model;"
    ):
        server.start()
    server.stop()
    nowhere = binary.with_name("nowhere")
    with pytest.raises(EdgespecError, match="nowhere cannot be started: No such file"):
        LlamaServer(nowhere, []).start()
    with pytest.raises(EdgespecError, match="nowhere cannot be run"):
        version_of(nowhere)


@dataclass(frozen=True)
class Echo:
    """A program that says the prompt, with the process it runs in."""

    fails: bool = False

    @contextmanager
    def opened(self) -> Iterator[Ask]:
        if self.fails:
            raise EdgespecError("the model is broken", "get another")
        yield lambda prompt, asked: Run((os.getpid(), *prompt), asked.max_tokens, 1.0, 2.0, 0, 1)


def test_only_the_program_that_is_asked_runs() -> None:
    pool = Pool({each: partial(Worker, Echo()) for each in (OURS, THEIRS)}, needed_bytes=0)
    try:
        first, second = (pool.ask(each, (5, 6), ASKED) for each in (OURS, THEIRS))
        assert first.tokens[1:] == (5, 6)
        processes = [psutil.Process(run.tokens[0]) for run in (first, second)]
        until = monotonic() + 10
        while any(each.status() != psutil.STATUS_STOPPED for each in processes):
            assert monotonic() < until
            sleep(0.01)
        assert pool.ask(OURS, (7,), ASKED).tokens == (processes[0].pid, 7)
    finally:
        pool.close()
    assert not any(each.is_running() for each in processes)


def test_where_memory_is_short_one_program_makes_room_for_the_next() -> None:
    pool = Pool({each: partial(Worker, Echo()) for each in (OURS, THEIRS)}, needed_bytes=1 << 60)
    try:
        first, second = (psutil.Process(pool.ask(each, (5,), ASKED).tokens[0]) for each in (OURS, THEIRS))
        assert not first.is_running()
        assert second.is_running()
    finally:
        pool.close()


def test_a_program_that_cannot_load_tells_why_and_is_gone() -> None:
    pool = Pool({OURS: partial(Worker, Echo(fails=True))}, needed_bytes=0)
    with pytest.raises(EdgespecError, match="the model is broken; get another"):
        pool.ask(OURS, (5,), ASKED)
    pool.close()


def replied(
    configuration: Configuration,
    prompt: str,
    speed: float,
    repeat: int = 0,
    tokens: Sequence[int] = (1, 2, 3, 4, 5),
) -> Measured:
    run = Run(tuple(tokens), 10, 10 / speed, 20 / speed, 0, len(tokens))
    return Measured(configuration, prompt, prompt[0], 0.0, repeat, run, ended=tokens[-1] == 0)


speeds_of_prompts = st.lists(st.tuples(st.floats(0.1, 100.0), st.floats(0.1, 100.0)), min_size=2, max_size=8)


@given(speeds_of_prompts, st.floats(0.1, 10.0))
def test_a_ratio_is_paired_and_lies_within_its_interval(
    pairs: list[tuple[float, float]], faster: float
) -> None:
    measured = [
        replied(configuration, f"{number % 2}-{number}", speed * scale)
        for number, both in enumerate(pairs)
        for configuration, speed, scale in ((OURS, both[0], faster), (THEIRS, both[1], 1.0))
    ]
    found = compare(Speeds(measured, decode_speed), OURS, THEIRS)
    assert found
    assert found.low <= found.ratio * (1 + 1e-9)
    assert found.ratio <= found.high * (1 + 1e-9)
    assert found.worst == pytest.approx(min(a / b for a, b in pairs) * faster)
    own = compare(Speeds([replied(OURS, "a", 3.0), replied(OURS, "b", 3.0)], decode_speed), OURS, OURS)
    assert own
    assert own.ratio == own.low == own.high == 1.0


def test_repeats_are_paired_by_their_turn_and_their_median_counts() -> None:
    measured = [replied(OURS, "a", speed, repeat) for repeat, speed in enumerate((2.0, 40.0, 6.0))]
    measured += [replied(THEIRS, "a", speed, repeat) for repeat, speed in enumerate((1.0, 4.0, 2.0))]
    speeds = Speeds(measured, decode_speed)
    found = compare(speeds, OURS, THEIRS)
    assert found
    assert found.ratio == pytest.approx(3.0)
    assert speeds.mean(OURS) == pytest.approx(6.0)
    assert compare(speeds, OURS, FAST) is None


def test_the_fastest_is_so_on_all_prompts_together() -> None:
    measured = [replied(THEIRS, "a", 10.0), replied(THEIRS, "b", 10.0)]
    measured += [replied(FAST, "a", 30.0), replied(FAST, "b", 4.0)]
    speeds = Speeds(measured, decode_speed)
    assert fastest(speeds, [THEIRS, FAST]) == FAST
    assert fastest(speeds, [OURS]) is None


def test_replies_are_equal_whether_or_not_their_end_is_shown() -> None:
    measured = [replied(OURS, "a", 1.0, tokens=(1, 2, 3)), replied(OURS, "b", 1.0, tokens=(1, 2))]
    measured += [replied(THEIRS, "a", 1.0, tokens=(1, 2, 3, 0)), replied(THEIRS, "b", 1.0, tokens=(1, 3))]
    assert alike(measured, OURS, THEIRS) == (1, 2)


def test_the_report_names_the_best_of_the_others_and_what_really_ran() -> None:
    measured = [
        replied(each, f"{skill}-1", speed)
        for skill in "ab"
        for each, speed in ((OURS, 6.0), (THEIRS, 3.0), (FAST, 4.0))
    ]
    run = Run((1, 2, 3, 4, 5), 10, 1.0, 2.0, 0, 5, method="suffix")
    auto = Configuration("edgespec", "auto")
    measured.append(Measured(auto, "a-1", "a", 0.0, 0, run, ended=False))
    said = report([THEIRS, FAST, OURS, auto], measured)
    assert "decode, ratios to llama-server draft:4:" in said
    assert "edgespec none        1.500x [1.500, 1.500], worst prompt 1.50x; a 1.50x, b 1.50x" in said
    assert "decode, ratios to edgespec none:" in said
    assert next(line for line in said.splitlines() if "edgespec auto" in line).endswith("ran: suffix")


@given(st.integers(1, 30))
def test_every_configuration_begins_and_ends_as_often_as_any_other(count: int) -> None:
    configurations = [Configuration("edgespec", str(number)) for number in range(count)]
    orders = [bench_peers.in_turn(configurations, number, 0) for number in range(2 * count)]
    assert all(sorted(order, key=lambda each: int(each.name)) == configurations for order in orders)
    for place in (0, -1):
        taken = [order[place] for order in orders]
        assert all(taken.count(each) == 2 for each in configurations)


@pytest.mark.usefixtures("handlers_kept")
@pytest.mark.parametrize("binary", ["answers"], indirect=True)
def test_a_run_leaves_out_what_fails_and_keeps_what_was_measured(
    binary: Path,
    demo_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "Hello.", "id": "a-1"}\n{"prompt": "Two.", "id": "b-1"}'
    )
    arguments = ["--target", str(demo_target), "--draft", "none", "--llama-server", str(binary)]
    arguments += ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "6", "--temperatures", "0"]
    arguments += ["--grid", "none,ngram-cache", "--methods", "none", "--threads", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", *arguments])
    asked = Pool.ask

    def ask(pool: Pool, configuration: Configuration, prompt: Sequence[int], how: Asked) -> Run:
        # The second prompt comes to the server last, and is interrupted there.
        if configuration == THEIRS and "a-1" in out.read_text("utf-8"):
            raise KeyboardInterrupt
        return asked(pool, configuration, prompt, how)

    monkeypatch.setattr(Pool, "ask", ask)
    bench_peers.main()
    printed = capfd.readouterr()
    assert "NOT ALIKE: this llama-server has AVX2 OPENMP" in printed.out
    assert "llama-server ngram-cache is left out: llama-server ended at its start" in printed.err
    assert "interrupted" in printed.err
    assert "T 0, 2 prompts" in printed.out
    kept = json.loads(out.read_text("utf-8"))
    measured = [(each["program"], each["configuration"], each["prompt"]) for each in kept["measured"]]
    assert sorted(measured) == [
        ("edgespec", "none", "a-1"),
        ("edgespec", "none", "b-1"),
        ("llama-server", "none", "a-1"),
    ]


def test_a_peer_is_a_server_or_a_worker() -> None:
    peers: list[Peer] = [LlamaServer(Path("llama-server"), []), Worker(Echo())]
    for peer in peers:
        peer.stop()  # one that was never started ends as well
