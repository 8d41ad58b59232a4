"""The OpenAPI description is correct: schemathesis derives requests from it and checks the responses.

`/metrics` reports the prefix cache, which stays within its limit and is still reused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from edgespec.server.http_server import HttpServer
from tests.server.conftest import running

LIMIT_BYTES = 2 * 2**20


@pytest.fixture(scope="module")
def described() -> Iterator[HttpServer]:
    """A server whose replies are short."""
    with running(load_options={"context": 256}, reply_options={"max_tokens": 2, "method": "none"}) as server:
        yield server


@pytest.mark.parametrize("examples", [2, pytest.param(30, marks=pytest.mark.long)])
def test_responses_match_the_description(described: HttpServer, examples: int) -> None:
    # Import schemathesis only here, because importing it takes a second in each test process.
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    checked = [
        not_a_server_error,
        checks.content_type_conformance,
        checks.negative_data_rejection,
        checks.response_schema_conformance,
        checks.status_code_conformance,
        checks.unsupported_method,
    ]
    schema = schemathesis.openapi.from_url(f"{described.url}/openapi.json")
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/models/{model}"}
    for operation in operations:
        # Requests without a body cannot be invalid.
        modes = schemathesis.GenerationMode if operation.body else [schemathesis.GenerationMode.POSITIVE]
        for mode in modes:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=examples,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def check(case: Any) -> None:
                case.call_and_validate(checks=checked, timeout=120)

            check()


def test_descriptions_name_the_limits(described: HttpServer) -> None:
    document = httpx.get(f"{described.url}/openapi.json").json()
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert (fields["temperature"]["minimum"], fields["temperature"]["maximum"]) == (0.0, 100.0)
    assert fields["acceptance"]["enum"] == ["invariant", "rejection", None]
    assert document["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False


def test_descriptions_do_not_name_functions(described: HttpServer) -> None:
    """The docstrings of request models are descriptions for readers who do not know the code."""
    document = httpx.get(f"{described.url}/openapi.json").json()
    schemas = document["components"]["schemas"].values()
    fields = {name for each in schemas for name in each.get("properties", {})}
    named = {word for each in schemas for word in re.findall(r"`(\w+)`", each.get("description", ""))}
    modules = [module for name, module in sys.modules.items() if name.startswith("edgespec.server")]
    assert {"input_tokens", "type"} <= named
    assert not [
        name for name in named - fields if any(callable(getattr(each, name, None)) for each in modules)
    ]


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
