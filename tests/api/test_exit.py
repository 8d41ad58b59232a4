"""Python exits while another thread is generating a reply. MLX can then abort the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cases import covering

_QUEUE = """
queue = edgespec.RequestQueue(runtime)
next(queue.stream("Tell me about files.", max_tokens=400))
"""
_THREAD = """
import threading
started = threading.Event()
def read():
    for _ in runtime.stream("Tell me about files.", max_tokens=400):
        started.set()
threading.Thread(target=read, daemon=True).start()
started.wait()
"""
# Closing the model in the wrong thread makes MLX abort only sometimes, so print the thread.
_PROGRAM = """
import sys, threading
import edgespec
runtime = edgespec.load({name!r}, draft="none", context=512, exactness="off", measure_costs=False)
target = runtime._session.target
close = target.close
def shown_close():
    in_main = threading.current_thread() is threading.main_thread()
    print("closed in the main thread" if in_main else "closed in the reading thread", flush=True)
    close()
target.close = shown_close
{reply}
sys.exit(3)
"""


@pytest.mark.long
@pytest.mark.parametrize(("name", "reply"), covering(("demo", "demo-mlx-draft"), (_QUEUE, _THREAD)))
def test_the_thread_that_reads_a_reply_closes_the_model(name: str, reply: str) -> None:
    program = _PROGRAM.format(name=name, reply=reply)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == "closed in the reading thread\n" * done.stdout.count("\n")
    assert done.stdout


# The destructors of a thread's C++ objects run after Python has joined the thread. MLX aborts the process if
# one of them waits for the interpreter while Python is shutting down. This program makes that happen every
# time: the destructors wait for a lock, and Python starts to shut down after releasing it, without releasing
# the interpreter.
_LATE_DESTRUCTORS = """
import atexit, ctypes, sys, threading, time
libc = ctypes.PyDLL(None)
mutex = ctypes.create_string_buffer(64)
def run_destructors():
    sys.setswitchinterval(60)
    libc.pthread_mutex_unlock(mutex)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
atexit.register(run_destructors)
import edgespec
libc.pthread_mutex_lock(mutex)
options = {"draft": "none", "context": 256, "exactness": "off", "measure_costs": False}
with edgespec.load("demo-mlx-draft", **options) as runtime:
    def read():
        runtime.generate("Tell me about files.", max_tokens=2)
        libc.__cxa_thread_atexit_impl(libc.pthread_mutex_lock, mutex, None)
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)
sys.slow = Slow()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs a function of glibc")
def test_a_thread_that_has_used_mlx_leaves_nothing_to_destroy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LATE_DESTRUCTORS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
