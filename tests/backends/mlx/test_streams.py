"""Threads that have computed with MLX leave no system threads behind when they end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil
import pytest

mx = pytest.importorskip("mlx.core")

from edgespec import load  # noqa: E402
from edgespec.backends.mlx.build_info import runs_on_cpu  # noqa: E402
from edgespec.backends.mlx.evaluation import reuse_stream  # noqa: E402

pytestmark = pytest.mark.skipif(not runs_on_cpu(), reason="MLX computes on the GPU")


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.long
def test_models_that_are_loaded_again_and_again_leave_no_threads() -> None:
    def load_and_close() -> None:
        with load("demo-mlx-draft", "none", method="none", context=256) as runtime:
            in_thread(lambda: runtime.generate("How do I list files?", max_tokens=2))

    in_thread(load_and_close)
    before = psutil.Process().num_threads()
    for _ in range(3):
        in_thread(load_and_close)
    # Each load used to leave about five threads behind. Another thread may start meanwhile.
    assert psutil.Process().num_threads() <= before + 2


def test_running_threads_have_different_streams() -> None:
    streams: list[str] = []
    both = threading.Barrier(2)

    def use() -> None:
        reuse_stream()
        streams.append(str(mx.default_stream(mx.cpu)))

    def use_together() -> None:
        use()
        both.wait(60)

    threads = [threading.Thread(target=use_together) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(streams)) == 2
    in_thread(use)
    assert streams[2] in streams[:2]
