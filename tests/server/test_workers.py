"""A target on a worker: losing the worker is a single HTTP error, and the next request reloads the model."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from tests.cluster.conftest import Worker, start_worker
from tests.server.conftest import MESSAGES, running

__all__ = ["start_worker"]


def test_a_request_after_a_lost_worker_loads_the_model_again(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker()
    options = {"context": 1024, "workers": worker.address}
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    with (
        running(draft="none", load_options=options, reply_options={}) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        first = client.post("/v1/chat/completions", json=body)
        assert first.status_code == 200, first.text
        worker.process.kill()
        worker.process.wait()
        lost = client.post("/v1/chat/completions", json=body)
        assert lost.status_code == 503
        assert lost.json()["error"]["code"] == "worker_lost"
        assert worker.address in lost.json()["error"]["message"]
        # The worker has not been started again.
        absent = client.post("/v1/chat/completions", json=body)
        assert absent.status_code == 503
        assert "is unreachable" in absent.json()["error"]["message"]
        start_worker(address=worker.address)
        again = client.post("/v1/chat/completions", json=body)
        assert again.status_code == 200, again.text
        assert again.json()["choices"][0]["message"] == first.json()["choices"][0]["message"]
