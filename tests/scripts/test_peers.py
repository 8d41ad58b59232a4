"""The comparison with other programs: flags, requests, answers and failures."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from scripts.peers.configurations import GRID, Configuration, parse, rotated_order, server_flags
from scripts.peers.figures import (
    decode_speed,
    total_speed,
)
from scripts.peers.llama_server import (
    LlamaServer,
    binary_features,
    binary_version,
    enabled_features,
    request_body,
    run_from_answer,
)
from scripts.peers.pool import Peer, Pool
from scripts.peers.replies import GenerationOptions, Run
from scripts.peers.worker import Generate, Worker
from tests.scripts import stand_in_server
from tests.scripts.stand_in_server import ANSWER

OPTIONS = GenerationOptions(max_tokens=8, temperature=0.0, seed=1, top_k=40, top_p=0.95, min_p=0.05)
EDGESPEC, SERVER = Configuration("edgespec", "none"), Configuration("llama-server", "none")


def test_server_flags_follow_from_the_name_of_the_configuration() -> None:
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
    assert server_flags("eagle:4", "d.gguf", "h.gguf") == [
        *("--spec-type", "draft-eagle3", "--spec-draft-model", "h.gguf", "--spec-draft-n-max", "4"),
    ]
    assert server_flags("mtp:2", None) == ["--spec-type", "draft-mtp", "--spec-draft-n-max", "2"]
    flags = [tuple(server_flags(name, "d.gguf")) for name in GRID.split(",")]
    assert len(set(flags)) == len(flags)


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
def test_an_unknown_configuration_is_rejected(name: str) -> None:
    with pytest.raises(OptionError):
        server_flags(name, "d.gguf")


def test_parse_splits_a_method_and_its_draft_length() -> None:
    assert parse("model:4") == ("model", 4)
    assert parse("model+suffix") == ("model+suffix", None)
    for wrong in ("", "model:", "model:0", "model:x", ":4"):
        with pytest.raises(OptionError):
            parse(wrong)
    with pytest.raises(OptionError, match="draft model"):
        server_flags("draft:4", None)
    with pytest.raises(OptionError, match="head"):
        server_flags("eagle:4", "d.gguf")


def test_the_request_holds_the_tokens_and_turns_the_prompt_cache_off() -> None:
    body = request_body((5, 6), OPTIONS)
    assert body["prompt"] == [5, 6]
    assert body["cache_prompt"] is False
    assert body["return_tokens"] is True
    assert (body["n_predict"], body["temperature"], body["top_k"]) == (8, 0.0, 40)
    assert "json_schema" not in body


def test_the_request_holds_the_schema() -> None:
    body = request_body((5, 6), replace(OPTIONS, schema='{"type": "object"}'))
    assert body["json_schema"] == {"type": "object"}


def test_the_time_of_an_answer_excludes_its_first_token() -> None:
    run = run_from_answer(ANSWER, 3, seconds=0.05)
    assert run == Run((7, 8, 9), 2, 0.004, 0.05, accepted=1, passes=2)
    assert decode_speed(run) is None  # fewer than four tokens
    assert total_speed(run_from_answer({**ANSWER, "tokens": [1] * 5}, 3, seconds=0.05)) == pytest.approx(100)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "no key 'tokens'"),
        ({"tokens": [1]}, "no key 'timings'"),
        ({"tokens": [1], "timings": {"predicted_n": 1}}, "no key 'prompt_n'"),
        ({**ANSWER, "timings": {**ANSWER["timings"], "prompt_n": 1}}, "prefilled 1 of the 3 tokens"),  # type: ignore[dict-item]
    ],
)
def test_an_incomplete_answer_is_an_error(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgespecError, match=message):
        run_from_answer(answer, 3, 1.0)


@pytest.fixture(autouse=True)
def logs_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the logs of failed servers into the test's folder, because they are not deleted."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def restored_signal_handlers() -> Iterator[None]:
    """Restore the handler of SIGTERM, which the script replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def binary(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return an executable fake server, whose name selects its behaviour."""
    path = tmp_path / str(request.param)
    path.write_text(f"#!{sys.executable}\n{Path(stand_in_server.__file__).read_text('utf-8')}", "utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("binary", ["answers"], indirect=True)
def test_a_server_starts_answers_and_stops(binary: Path) -> None:
    server = LlamaServer(binary, [])
    server.start()
    try:
        assert server.generate((1, 2, 3, 4), OPTIONS).tokens == (7, 8, 9)
        process = psutil.Process(server.pid)
        os.kill(server.pid, signal.SIGSTOP)
    finally:
        server.stop()
    assert not process.is_running()
    assert binary_version(binary) == "version: 1 (stand-in)"
    assert (
        binary_features(binary)
        == ["AVX2", "OPENMP"]
        == enabled_features("CPU : AVX2 = 1 | FMA = 0 | OPENMP = 1")
    )


@pytest.mark.parametrize(
    ("binary", "message"),
    [
        ("crashes", "RemoteProtocolError"),
        ("rejects", "status 400"),
    ],
    indirect=["binary"],
)
def test_the_error_of_a_failed_reply_is_one_line(binary: Path, message: str) -> None:
    server = LlamaServer(binary, [])
    server.start()
    try:
        with pytest.raises(EdgespecError, match=message) as caught:
            server.generate((1, 2, 3), OPTIONS)
    finally:
        server.stop()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("binary", ["exits"], indirect=True)
def test_the_error_of_a_failed_start_holds_the_log_line(binary: Path) -> None:
    server = LlamaServer(binary, ["--spec-type", "ngram-cache"])
    with pytest.raises(EdgespecError, match="status 1: E error"):
        server.start()
    server.stop()
    missing = binary.with_name("missing")
    with pytest.raises(EdgespecError, match="No such file"):
        LlamaServer(missing, []).start()
    with pytest.raises(EdgespecError, match="missing"):
        binary_version(missing)


@dataclass(frozen=True)
class Echo:
    """A program that replies with its process id and the prompt."""

    fails: bool = False

    @contextmanager
    def load(self) -> Iterator[Generate]:
        if self.fails:
            raise EdgespecError("the model is broken", "use another model")
        yield lambda prompt, options: Run((os.getpid(), *prompt), options.max_tokens, 1.0, 2.0, 0, 1)


@pytest.mark.long
def test_idle_programs_are_suspended() -> None:
    pool = Pool({each: partial(Worker, Echo()) for each in (EDGESPEC, SERVER)}, needed_bytes=0)
    try:
        first, second = (pool.generate(each, (5, 6), OPTIONS) for each in (EDGESPEC, SERVER))
        assert first.tokens[1:] == (5, 6)
        processes = [psutil.Process(run.tokens[0]) for run in (first, second)]
        deadline = monotonic() + 60
        while any(each.status() != psutil.STATUS_STOPPED for each in processes):
            assert monotonic() < deadline
            sleep(0.01)
        assert pool.generate(EDGESPEC, (7,), OPTIONS).tokens == (processes[0].pid, 7)
    finally:
        pool.close()
    assert not any(each.is_running() for each in processes)


@pytest.mark.long
def test_a_program_is_stopped_if_memory_is_short() -> None:
    pool = Pool({each: partial(Worker, Echo()) for each in (EDGESPEC, SERVER)}, needed_bytes=1 << 60)
    try:
        first, second = (
            psutil.Process(pool.generate(each, (5,), OPTIONS).tokens[0]) for each in (EDGESPEC, SERVER)
        )
        assert not first.is_running()
        assert second.is_running()
    finally:
        pool.close()


@pytest.mark.long
def test_the_error_of_a_failed_load_is_raised() -> None:
    pool = Pool({EDGESPEC: partial(Worker, Echo(fails=True))}, needed_bytes=0)
    with pytest.raises(EdgespecError, match="the model is broken; use another model"):
        pool.generate(EDGESPEC, (5,), OPTIONS)
    pool.close()


@given(st.integers(1, 30))
def test_every_configuration_is_first_and_last_equally_often(count: int) -> None:
    configurations = [Configuration("edgespec", str(number)) for number in range(count)]
    orders = [rotated_order(configurations, number) for number in range(2 * count)]
    assert all(sorted(order, key=lambda each: int(each.name)) == configurations for order in orders)
    for place in (0, -1):
        chosen = [order[place] for order in orders]
        assert all(chosen.count(each) == 2 for each in configurations)


@pytest.mark.usefixtures("restored_signal_handlers")
@pytest.mark.parametrize("binary", ["answers"], indirect=True)
def test_failed_configurations_are_left_out_and_an_interrupt_keeps_the_results(
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
    generate = Pool.generate

    def interrupted(
        pool: Pool, configuration: Configuration, prompt: Sequence[int], options: GenerationOptions
    ) -> Run:
        # Interrupt the second prompt at llama-server, which is the last program to answer it.
        if configuration == SERVER and "a-1" in out.read_text("utf-8"):
            raise KeyboardInterrupt
        return generate(pool, configuration, prompt, options)

    monkeypatch.setattr(Pool, "generate", interrupted)
    assert bench_peers.main() == 130
    printed = capfd.readouterr()
    assert "llama-server ngram-cache is left out: llama-server exited during startup" in printed.err
    assert "Interrupted" in printed.err
    assert "temperature 0, 2 prompts" in printed.out
    content = json.loads(out.read_text("utf-8"))
    measured = [(each["program"], each["configuration"], each["prompt"]) for each in content["replies"]]
    assert sorted(measured) == [
        ("edgespec", "none", "a-1"),
        ("edgespec", "none", "b-1"),
        ("llama-server", "none", "a-1"),
    ]


@pytest.mark.parametrize("binary", ["answers"], indirect=True)
@pytest.mark.parametrize(
    ("own", "more", "lacks"),
    [
        (["AVX2", "OPENMP"], False, False),
        (["AVX2"], True, False),
        (["AVX2", "OPENMP", "REPACK"], False, True),
        (["AVX2", "REPACK"], True, True),
    ],
)
def test_only_features_that_llama_server_lacks_are_a_warning(
    binary: Path, monkeypatch: pytest.MonkeyPatch, own: list[str], more: bool, lacks: bool
) -> None:
    system_info = " | ".join(f"{feature} = 1" for feature in own)
    monkeypatch.setattr("llama_cpp.llama_print_system_info", system_info.encode)
    first, *others = bench_peers._features(binary)
    assert first.endswith(": " + " ".join(own))
    assert [line for line in others if line.endswith(" has: OPENMP")] == others[: int(more)]
    warnings = [line for line in others if line.startswith("warning: ")]
    assert len(warnings) == int(lacks)
    assert all("REPACK" in line for line in warnings)
    assert len(others) == more + lacks


def test_a_program_that_was_never_started_can_be_stopped() -> None:
    peers: list[Peer] = [LlamaServer(Path("llama-server"), []), Worker(Echo())]
    for peer in peers:
        peer.stop()
