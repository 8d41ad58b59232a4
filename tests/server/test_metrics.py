"""`/metrics` reports the prefix cache, which stays within its limit and is still reused."""

from __future__ import annotations

import httpx

from tests.server.conftest import running

LIMIT_BYTES = 2 * 2**20


def test_the_prefix_cache_stops_growing_at_its_limit() -> None:
    options = {"method": "none", "prefix_cache_memory": LIMIT_BYTES}
    with running(load_options=options) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        sizes = []
        for number in range(12):
            _ask(http, f"{number} How do I list files by size? " * 6)
            sizes.append(_gauge(http, "prefix_cache_bytes"))
        assert _gauge(http, "prefix_cache_limit_bytes") == LIMIT_BYTES
        assert sizes[0] < sizes[2] <= max(sizes) <= LIMIT_BYTES
        assert min(sizes[-3:]) > LIMIT_BYTES / 2
        assert _ask(http, "10 How do I list files by size? " * 6) > 50


def _ask(http: httpx.Client, prompt: str) -> int:
    """Return the number of prompt tokens that were reused."""
    body = {"prompt": prompt, "max_tokens": 2}
    return int(http.post("/v1/completions", json=body).raise_for_status().json()["timings"]["cache_n"])


def _gauge(http: httpx.Client, name: str) -> int:
    lines = http.get("/metrics").text.splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f'edgespec_{name}{{model="demo"}}'))
