"""A runtime in a forked child process raises an error, because the parent's threads are missing."""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import edgespec
from edgespec import EdgespecError, RequestQueue, Runtime

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

MESSAGES = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, Callable[[Runtime], Any]] = {
    "generate": lambda runtime: runtime.generate("Hi", max_tokens=4),
    "generate raw": lambda runtime: runtime.generate("Hi", raw=True, max_tokens=4),
    "stream": lambda runtime: list(runtime.stream("Hi", max_tokens=4)),
    "reply": lambda runtime: runtime.reply(MESSAGES, max_tokens=4),
    "stream_messages": lambda runtime: list(runtime.stream_messages(MESSAGES, max_tokens=4)),
    "stream_tokens": lambda runtime: list(runtime.stream_tokens([5, 6], max_tokens=4)),
    "chat": lambda runtime: runtime.chat().ask("Hi", max_tokens=4),
    "count_tokens": lambda runtime: runtime.count_tokens(MESSAGES),
    "embed": lambda runtime: runtime.embed(["Hi"]),
    "measure_costs": lambda runtime: runtime.measure_costs(),
    "clear_cache": lambda runtime: runtime.clear_cache(),
    "check_options": lambda runtime: runtime.check_options(max_tokens=4),
    "run_idle_work": lambda runtime: runtime.run_idle_work(lambda: True),
}
NEEDS_MLX = pytest.mark.skipif(find_spec("mlx") is None, reason="needs MLX")
MODELS = ["demo", pytest.param("demo-mlx-draft", marks=NEEDS_MLX)]


@pytest.fixture(scope="module", params=MODELS)
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    options: dict[str, Any] = {"draft": "none", "context": 256, "exactness": "off", "measure_costs": False}
    if request.param == "demo":
        options["threads"] = 1
    with edgespec.load(request.param, **options) as runtime:
        runtime.generate("Hi", max_tokens=4)
        yield runtime


def in_child(call: Callable[[], Any]) -> str:
    """Call a function in a forked child process, and return what happened there."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # If the child hangs, this alarm kills it, and the child reports nothing.
        signal.alarm(20)
        try:
            call()
            outcome = "returned"
        except EdgespecError as error:
            outcome = str(error)
        except BaseException as error:
            outcome = repr(error)
        os.write(write, json.dumps(outcome).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return str(json.loads(text)) if text else "hung"


@pytest.mark.long
def test_every_use_in_a_child_is_an_error_at_once(runtime: Runtime) -> None:
    expected = f"loaded in process {os.getpid()}"

    def make_all_calls() -> None:
        for name, call in CALLS.items():
            try:
                call(runtime)
            except EdgespecError as error:
                if expected in str(error):
                    continue
                raise RuntimeError(f"{name} raised {error}") from error
            raise RuntimeError(f"{name} returned")

    assert in_child(make_all_calls) == "returned"


@pytest.mark.long
def test_a_stream_and_a_chat_of_the_parent_end_in_a_child(runtime: Runtime) -> None:
    chat = runtime.chat()
    stream = runtime.stream("Hi", max_tokens=6)
    next(stream)
    assert "loaded in process" in in_child(lambda: list(stream))
    assert in_child(stream.cancel) == in_child(stream.close) == "returned"
    assert stream.wait().tokens
    assert "loaded in process" in in_child(lambda: chat.ask("Hi", max_tokens=4))


@pytest.mark.long
def test_a_queue_of_the_parent_is_an_error_in_a_child(runtime: Runtime) -> None:
    with RequestQueue(runtime) as queue:
        queued = queue.stream("Hi", max_tokens=4)
        queued.wait()
        waiting = queue.stream("Hi", max_tokens=200)
        for use in (lambda: queue.stream("Hi"), lambda: queue.embed(["Hi"]), waiting.wait):
            assert "loaded in process" in in_child(use)
        assert in_child(queue.close) == "returned"
        waiting.cancel()


def test_closing_in_a_child_leaves_the_parent_unharmed(runtime: Runtime) -> None:
    before = runtime.generate("How do I list files?", max_tokens=8, seed=1).text
    assert in_child(runtime.close) == "returned"
    assert runtime.generate("How do I list files?", max_tokens=8, seed=1).text == before


def test_a_fork_during_a_reply_in_another_thread(runtime: Runtime) -> None:
    """The fork copies locks while they are held by a thread that does not exist in the child."""
    stream = runtime.stream("How do I list files?", max_tokens=200)
    next(stream)
    reader = threading.Thread(target=stream.wait)
    reader.start()
    assert "loaded in process" in in_child(lambda: runtime.generate("Hi", max_tokens=4))
    assert in_child(runtime.cancel) == in_child(runtime.close) == "returned"
    stream.cancel()
    reader.join()


@pytest.mark.long
def test_a_child_can_load_a_gguf_model_with_one_thread(runtime: Runtime) -> None:
    def load() -> None:
        with edgespec.load(
            "demo", draft="none", context=256, exactness="off", measure_costs=False, threads=1
        ) as own:
            own.generate("Hi", max_tokens=4)

    assert in_child(load) == "returned"
    assert runtime.generate("Hi", max_tokens=4).tokens


def test_several_threads_in_a_child_are_an_error_if_the_parent_used_them() -> None:
    options: dict[str, Any] = {
        "draft": "none",
        "context": 256,
        "exactness": "off",
        "measure_costs": False,
        "threads": 2,
    }
    edgespec.load("demo", **options).close()
    assert "had already used several threads" in in_child(lambda: edgespec.load("demo", **options))


@NEEDS_MLX
def test_mlx_in_a_child_is_an_error_if_it_ran_in_the_parent() -> None:
    edgespec.plan("demo-mlx", None)
    assert "MLX cannot run in this process" in in_child(lambda: edgespec.load("demo-mlx", draft="none"))
    assert "MLX cannot run in this process" in in_child(lambda: edgespec.plan("demo-mlx", None, trust=True))


def test_a_child_exits_normally(runtime: Runtime) -> None:
    """`sys.exit` runs the functions registered with `atexit`, which close all open sessions."""
    runtime.generate("Hi", max_tokens=4)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        atexit._run_exitfuncs()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
