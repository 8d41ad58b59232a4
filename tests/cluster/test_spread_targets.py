"""A target on real workers gives the same tokens as on this machine, and survives the loss of a worker."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

import edgespec
from edgespec.backends.llamacpp.native import library
from edgespec.cli.program import program
from edgespec.cluster import connected
from edgespec.cluster.connected import probe_worker
from edgespec.cluster.machines import WorkerAddress
from edgespec.errors import CapabilityError, MemoryBudgetError, OptionError, WorkerError, WorkerLostError
from edgespec.options.load_options import LoadArguments
from tests.cases import first
from tests.cluster.conftest import Worker
from tests.raising import raises

PROMPT = "How do I list files by size, and how do I count the lines of each?"
_REQUEST = {"max_tokens": 40, "seed": 3}


def wait_until_free(worker: Worker) -> None:
    """Wait until a worker notices that its target is gone, which takes a moment on a busy machine."""
    for _ in range(100):
        if not probe_worker(WorkerAddress("127.0.0.1", worker.port)).busy:
            return
        time.sleep(0.1)


def tokens(
    workers: str | None = None, target: str = "demo", method: str = "none", methods: tuple[str, ...] = ()
) -> list[list[int]]:
    """Return replies at two temperatures, first by `method` and then by each of `methods`."""
    draft = "none" if method == "none" else "auto"
    with edgespec.load(target, draft, workers=workers, method=method, context=1024) as runtime:
        return [
            list(runtime.generate(PROMPT, temperature=each, method=name, **_REQUEST).tokens)  # type: ignore[arg-type]
            for name in (method, *methods)
            for each in (0.0, 0.8)
        ]


@pytest.fixture(scope="module")
def local_tokens() -> list[list[int]]:
    return tokens()


@pytest.mark.parametrize("method", first(["model+suffix", "none", "model", "suffix", "auto"]))
def test_one_worker_gives_the_same_tokens(
    method: str, workers: tuple[Worker, Worker], local_tokens: list[list[int]]
) -> None:
    assert tokens(workers[0].address, method=method) == local_tokens


def test_several_machines_give_the_same_tokens(
    workers: tuple[Worker, Worker], local_tokens: list[list[int]]
) -> None:
    spread = f"{workers[0].address}=200MiB,local=200MiB,{workers[1].address}=200MiB"
    assert tokens(spread, method="auto", methods=("none", "model")) == local_tokens * 3


def write_f16(source: Path, file: Path) -> None:
    lib = library()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = lib.LLAMA_FTYPE_MOSTLY_F16, True
    assert lib.llama_model_quantize(os.fsencode(source), os.fsencode(file), ctypes.byref(params)) == 0


def test_16_bit_weights_give_the_same_tokens(
    workers: tuple[Worker, Worker], demo_target: Path, tmp_path: Path
) -> None:
    file = tmp_path / "f16.gguf"
    write_f16(demo_target, file)
    both = ",".join(worker.address for worker in workers)
    assert tokens(both, target=str(file)) == tokens(target=str(file))


def test_verify_finds_no_violation(workers: tuple[Worker, Worker], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    options = ["-n", "24", "--temperatures", "0,0.8", "--draft-lengths", "4", "--methods", "model,suffix"]
    done = run("verify", "--workers", workers[0].address, "--prompts", str(prompts), *options, "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert not report["nothing_drafted"]
    assert all(each["faults"] == 0 for each in report["methods"].values())


def run(*arguments: str) -> Result:
    """Run a command in this process, which has already imported everything."""
    return CliRunner().invoke(program, arguments)


@pytest.mark.long
def test_the_chat_replies(workers: tuple[Worker, Worker]) -> None:
    """The chat keeps earlier chats on disk by default, which targets on workers do not support."""
    command = [sys.executable, "-m", "edgespec", "chat", "--workers", workers[0].address, "--context", "1024"]
    done = subprocess.run(
        [*command, "--draft", "none", "--plain", "-n", "4"],
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_race_compares_equal_replies(workers: tuple[Worker, Worker]) -> None:
    done = run("race", "--workers", workers[0].address, "--context", "1024", "-n", "8", "--json", PROMPT)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["same_text"]


@pytest.mark.long
def test_tune_measures_the_widths_of_passes_on_workers(workers: tuple[Worker, Worker]) -> None:
    done = run("tune", "--workers", workers[0].address, "--context", "1024", "-n", "8", "--json")
    assert done.exit_code == 0, done.stderr
    assert [each["width"] for each in json.loads(done.stdout)["passes"]] == [1, 2, 3, 5, 9, 17]


def test_branches_and_the_memory_of_the_weights_are_reported(workers: tuple[Worker, Worker]) -> None:
    with edgespec.load("demo", None, context=1024) as runtime:
        whole = runtime.target.weight_bytes
    with edgespec.load("demo", None, workers=workers[0].address, context=1024) as runtime:
        assert not runtime.target.capabilities.tree
        assert 0 < runtime.target.weight_bytes < whole / 2


def lose(worker: Worker, how: str) -> None:
    if how == "killed worker":
        worker.process.kill()
    elif how == "killed RPC server":
        worker.rpc_server.kill()
    elif how == "frozen worker":
        worker.process.send_signal(signal.SIGSTOP)
    else:
        worker.rpc_server.suspend()


@pytest.mark.long
@pytest.mark.parametrize(
    "how", first(["killed worker", "frozen RPC server", "killed RPC server", "frozen worker"], 2)
)
def test_a_lost_worker_is_an_error_that_keeps_the_text(
    how: str,
    start_worker: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
    local_tokens: list[list[int]],
) -> None:
    monkeypatch.setattr(connected, "SILENCE_SECONDS", 3.0)
    worker = start_worker()
    with edgespec.load("demo", "none", workers=worker.address, method="none", context=1024) as runtime:
        stream = runtime.stream(PROMPT, temperature=0.0, **_REQUEST)  # type: ignore[arg-type]
        text = "".join(next(stream).text for _ in range(3))
        lose(worker, how)
        with raises(WorkerLostError, worker.address):
            text += "".join(chunk.text for chunk in stream)
        assert text
        with pytest.raises(WorkerLostError):
            runtime.generate(PROMPT)
    if how == "killed worker":
        # The same process can use a new worker at the same address.
        start_worker(address=worker.address)
        assert tokens(worker.address) == local_tokens
    if how == "killed RPC server":
        # The worker has started its RPC server again.
        assert tokens(worker.address) == local_tokens
    if how == "frozen RPC server":
        # The worker may have ended the frozen server already.
        with suppress(psutil.NoSuchProcess, IndexError):
            worker.rpc_server.resume()


def test_a_connection_that_fails_does_not_block_later_models(
    workers: tuple[Worker, Worker], unconnected: Callable[[int], int], local_tokens: list[list[int]]
) -> None:
    """llama.cpp then holds a lock forever that every connection needs."""
    for _ in range(2):
        with raises(WorkerLostError, "lost the connection"):
            tokens(f"127.0.0.1:{unconnected(workers[0].port)}")
        wait_until_free(workers[0])
    assert tokens(workers[0].address) == local_tokens


@pytest.mark.long
def test_the_command_line_prints_one_error_and_the_text_so_far(
    start_worker: Callable[..., Worker], delayed: Callable[[int, float], int]
) -> None:
    worker = start_worker()
    port = delayed(worker.port, 0.02)
    command = [sys.executable, "-m", "edgespec", "generate", "--temperature", "0", "--method", "none"]
    command += ["--draft", "none", "--workers", f"127.0.0.1:{port}", "--context", "1024", PROMPT]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout
        first = os.read(process.stdout.fileno(), 100)
        worker.process.kill()
        rest, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert (first + rest).strip()
    assert errors.decode().count("error: ") == 1
    assert f"the worker 127.0.0.1:{port} exited" in errors.decode()


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_drafts_through_a_slow_link_keep_the_tokens(
    temperature: float, workers: tuple[Worker, Worker], delayed: Callable[[int, float], int]
) -> None:
    both = ",".join(f"127.0.0.1:{delayed(worker.port, 0.005)}" for worker in workers)
    request = {"max_tokens": 24, "seed": 3, "temperature": temperature}
    with edgespec.load("demo", workers=both, context=1024) as runtime:
        plain = runtime.generate(PROMPT, method="none", **request)  # type: ignore[arg-type]
        # Whether `auto` drafts depends on the speed of the machine, so only its tokens are compared.
        replies = [runtime.generate(PROMPT, **request) for _ in range(2)]  # type: ignore[arg-type]
        # Passes are padded, but padding is neither counted nor accepted.
        fixed = runtime.generate(PROMPT, method="model", draft_length=3, **request)  # type: ignore[arg-type]
    assert all(reply.tokens == plain.tokens for reply in (*replies, fixed))
    assert 0 < fixed.stats.drafted_tokens <= 3 * fixed.stats.target_passes


@pytest.mark.long
def test_padding_ends_with_the_context(workers: tuple[Worker, Worker]) -> None:
    replies = []
    with edgespec.load("demo", workers=workers[0].address, context=256, method="model") as runtime:
        for method in ("none", "model"):
            stream = runtime.stream_tokens(
                list(range(10, 250)), method=method, draft_length=6, temperature=0.0, max_tokens=64
            )
            list(stream)
            replies.append(stream.reply)
    assert replies[0].tokens == replies[1].tokens
    assert replies[0].context_full
    assert replies[1].stats.drafted_tokens


def test_max_loss_is_supported(workers: tuple[Worker, Worker]) -> None:
    with edgespec.load("demo", workers=workers[0].address, context=1024, max_loss=0.1) as runtime:
        reply = runtime.generate(PROMPT, max_tokens=24, method="model", temperature=0.0)
        assert reply.method.loss_limits == (0.1, 2.0)


def test_a_busy_worker_is_an_error(workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected, "_BUSY_SECONDS", 0.3)
    with (
        edgespec.load("demo", None, workers=workers[0].address, context=1024),
        raises(WorkerError, code="worker_busy"),
    ):
        edgespec.load("demo", None, workers=workers[0].address)


def test_too_little_memory_is_an_error(workers: tuple[Worker, Worker]) -> None:
    with raises(MemoryBudgetError, "9.8 TiB"):
        edgespec.load("demo", None, workers=f"{workers[0].address}=10000GiB")
    with raises(MemoryBudgetError, "2.0 MiB"):
        edgespec.load("demo", None, workers=f"{workers[0].address}=2MiB")
    # Neither error keeps the worker busy.
    wait_until_free(workers[0])
    assert not probe_worker(WorkerAddress("127.0.0.1", workers[0].port)).busy


@pytest.mark.parametrize(
    "options",
    [
        {"method": "mtp"}, {"method": "lookahead"}, {"parallel": 2}, {"exact": True},
        {"exactness": "bits"}, {"draft_branches": (2,)}, {"gpu_layers": 1}, {"experts": "cpu"},
        {"experts": 2},
    ],
)  # fmt: skip
def test_options_that_workers_do_not_support_are_refused(options: LoadArguments) -> None:
    options["workers"] = "127.0.0.1:1"
    with raises(OptionError, "--workers yet", code="option_not_supported"):
        edgespec.load("demo", **options)


def test_a_target_on_workers_cannot_draft_for_itself(workers: tuple[Worker, Worker]) -> None:
    with (
        edgespec.load("demo", None, workers=workers[0].address, context=1024) as runtime,
        pytest.raises((CapabilityError, OptionError)),
    ):
        runtime.generate(PROMPT, method="lowbit")
