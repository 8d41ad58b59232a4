"""Ctrl-C and SIGTERM stop programs cleanly, keep their output so far, and also work during native calls."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest

import edgespec
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.errors import CancelledError
from tests.cases import first
from tests.cli.conftest import Run, Start

pytestmark = pytest.mark.usefixtures("ctrl_c_is_heard")
# Without its end token the demo goes on for seconds.
ENDLESS = (
    "generate", "--threads", "1", "--context", "30000", "-n", "29000", "--logit-bias", "1=-inf",
    "--draft", "none", "hi",
)  # fmt: skip


def test_the_worker_thread_does_not_end() -> None:
    """A thread that used MLX and ends while the interpreter exits aborts the process."""
    first, second = (interruptible(lambda _: threading.current_thread()) for _ in range(2))
    assert first is second
    assert first.is_alive()


def test_models_are_freed_when_the_work_is_done() -> None:
    class Model:
        pass

    model = Model()
    freed = weakref.ref(model)
    interruptible(lambda _, model=model: None)  # type: ignore[misc]
    del model
    gc.collect()
    assert freed() is None


def read_some(process: subprocess.Popen[bytes]) -> bytes:
    """The first bytes of the output: the reply is on its way."""
    assert isinstance(process.stdout, io.BufferedReader)
    return process.stdout.read(8)


def ended(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Return the remaining stdout and stderr, once the process has exited."""
    stdout, stderr = process.communicate(timeout=120)
    return stdout.decode(), stderr.decode()


@pytest.mark.parametrize("number", first([signal.SIGINT, signal.SIGTERM]))
def test_tokenizing_a_long_prompt_is_cut_short(start: Start, number: signal.Signals) -> None:
    code = (
        "import sys, time\n"
        "from edgespec.backends.llamacpp.metadata import LlamaVocabulary as V\n"
        "tokenize = V.tokenize\n"
        "def slow(self, text, **options):\n"
        "    if len(text) > 9999:\n"
        "        sys.stdout.write('reading '); sys.stdout.flush(); time.sleep(60)\n"
        "    return tokenize(self, text, **options)\n"
        "V.tokenize = slow\n"
        "from edgespec.cli import main\n"
        "main()\n"
    )
    process = start("generate", "--threads", "1", "--context", "30000", "-", code=code, stdin=subprocess.PIPE)
    assert process.stdin
    process.stdin.write(b"many words " * 5000)
    process.stdin.close()
    read_some(process)
    process.send_signal(number)
    asked = time.monotonic()
    process.stdin = None
    _, stderr = ended(process)
    assert time.monotonic() - asked < 20
    assert process.returncode == 130
    assert stderr == "interrupted: the reply was cancelled while its prompt was being prepared\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_reply_is_cut_short(start: Start, number: signal.Signals) -> None:
    process = start(*ENDLESS)
    read_some(process)
    process.send_signal(number)
    asked = time.monotonic()
    stdout, stderr = ended(process)
    assert time.monotonic() - asked < 30  # not the minute the reply would take
    assert process.returncode == 130
    assert stdout.endswith("\n")
    assert stderr == ""


def test_json_tells_that_it_was_cut_short(start: Start) -> None:
    code = (
        "import os, signal, sys, threading; sys.argv = ['edgespec', *sys.argv[1:]]\n"
        "from edgespec.api.stream import ReplyStream\n"
        "step, sent = ReplyStream.__next__, []\n"
        "def kill(stream):\n"
        "    if stream.stats.generated_tokens > 20 and not sent:\n"
        "        sent.append(True)  # a second Ctrl-C would end the process at once\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return step(stream)\n"
        "ReplyStream.__next__ = kill\n"
        "from edgespec.cli import main; main()\n"
    )
    process = start(*ENDLESS, "--json", code=code)
    stdout, stderr = ended(process)
    reply = json.loads(stdout)
    assert process.returncode == 130
    assert reply["finish_reason"] == "cancelled"
    assert len(reply["tokens"]) == reply["stats"]["generated_tokens"] > 20
    assert stderr == ""


def test_it_is_heard_while_a_long_prompt_is_read(start: Start) -> None:
    code = (
        "import os, signal, sys, threading; sys.argv = ['edgespec', *sys.argv[1:]]\n"
        "from edgespec.backends.llamacpp import gguf_model\n"
        "in_batches, read = gguf_model.in_batches, []\n"
        "def interrupted(tokens, *args):\n"
        "    for batch in in_batches(tokens, *args):\n"
        "        read.extend([batch] if len(tokens) > 100 else [])  # not while models warm up\n"
        "        if len(read) == 3:  # the signal arrives during one of the next passes\n"
        "            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "        yield batch\n"
        "gguf_model.in_batches = interrupted\n"
        "from edgespec.cli import main; main()\n"
    )
    process = start(
        "generate", "--threads", "1", "--context", "60000", "--json", "-n", "5", "-",
        code=code, stdin=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(b"word and " * 25_000)
    process.stdin.close()
    process.stdin = None
    stdout, _ = ended(process)  # reading the whole prompt would take minutes
    assert process.returncode == 130
    assert json.loads(stdout)["tokens"] == []


def test_loading_is_stopped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, progress: Any, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 60
        while progress("loading demo", 0.5):
            assert time.monotonic() < deadline
        raise CancelledError("loading demo was cancelled")

    monkeypatch.setattr(edgespec, "load", load)
    for command in (
        ["generate", "hi"],
        ["generate", "--json", "hi"],
        ["verify"],
        ["doctor"],
        ["models", "show", "demo", "--probe"],
    ):
        result = run(*command)
        assert result.exit_code == 130, result.output
        assert result.stderr == "interrupted: loading demo was cancelled\n"
        shown = json.loads(result.stdout)["error"]["code"] if "--json" in command else result.stdout
        assert shown == ("cancelled" if "--json" in command else "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["smollm2", pytest.param("smollm2-mlx-8bit", marks=pytest.mark.real)])
def test_the_trial_of_a_model_is_stopped_before_the_next_pass(
    start: Start, request: pytest.FixtureRequest, name: str, number: signal.Signals
) -> None:
    code = (
        "import time\n"
        "from edgespec.loading.bit_exactness import _Trial\n"
        "begin = _Trial._begin_pass\n"
        "def slow(trial):\n"
        "    begin(trial)\n"
        "    if trial.done_passes == 5: print('testing', flush=True)\n"
        "    if trial.done_passes >= 5: time.sleep(0.3)\n"  # the trial would take half a minute
        "_Trial._begin_pass = slow\n"
        "from edgespec.cli import main; main()\n"
    )
    is_gguf = name == "smollm2"
    model = request.getfixturevalue(name) if is_gguf else request.getfixturevalue("real_models") / name
    threads = ("--threads", "1") if is_gguf else ()
    options = ("--target", str(model), "--draft", "none", "-n", "1", *threads)
    process = start("generate", *options, "hi", code=code, trials=True)
    read_some(process)
    process.send_signal(number)
    asked = time.monotonic()
    stdout, stderr = ended(process)
    assert time.monotonic() - asked < 5
    assert process.returncode == 130
    assert stdout == ""
    assert stderr.endswith("interrupted: loading the model was cancelled\n")


def test_asked_twice_it_ends_at_once(start: Start) -> None:
    code = (
        "import time, edgespec, sys\n"
        "def load(*args, **options): print('in', flush=True); time.sleep(30)\n"
        "edgespec.load = load\n"
        "sys.argv = ['edgespec', 'generate', 'hi']\n"
        "from edgespec.cli import main; main()\n"
    )
    process = start(code=code)
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process) == ("", "interrupted\n")
    assert process.returncode == 130


def test_the_work_runs_away_from_the_main_thread_and_its_errors_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert interruptible(lambda stop: threading.current_thread() is threading.main_thread()) is False
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda stop: 1 // 0)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_stop_is_asked_for_while_the_work_is_stuck() -> None:
    def work(stop: Stop) -> bool:
        asked = threading.Event()
        stop.on_request(asked.set)
        os.kill(os.getpid(), signal.SIGINT)
        return asked.wait(5)

    assert interruptible(work)


def test_a_stop_that_came_before_there_was_anything_to_do_is_not_lost() -> None:
    stop, done = Stop(), []
    stop.request()
    stop.on_request(lambda: done.append(1))
    assert stop.requested
    assert done == [1]


def test_the_first_interrupt_takes_no_lock() -> None:
    """A second signal during the handler of the first one would wait for this lock forever."""
    code = (
        "import os, signal, sys, threading, time\n"
        "from edgespec.cli.interrupt import interruptible\n"
        "def again(frame, event, _):\n"
        "    names = frame.f_code.co_name, frame.f_back and frame.f_back.f_code.co_name\n"
        "    if event == 'return' and names == ('__enter__', 'set'):  # Event.set has taken its lock.\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "def work(stop):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while not stop.requested:\n"
        "        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "sys.setprofile(again)\n"
        "interruptible(work, second_message='stopped')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (130, b"stopped\n")


def test_second_interrupt_while_the_first_message_is_printed() -> None:
    """Printing in the signal handler would fail if the signal interrupted the printing of another message."""
    code = (
        "import os, signal, sys, threading, time\n"
        "from edgespec.cli.interrupt import interruptible\n"
        "class Slow:\n"
        "    isatty = lambda self: False\n"
        "    flush = lambda self: None\n"
        "    def write(self, text):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(5)\n"
        "sys.stderr = Slow()\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "interruptible(lambda _: time.sleep(20), first_message='wait', second_message='stopped')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (130, b"stopped\n")
