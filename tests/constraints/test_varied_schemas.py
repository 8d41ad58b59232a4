"""Replies under varied JSON schemas satisfy the schemas, and equal those of plain decoding."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for

import edgespec
from edgespec import Runtime
from edgespec.api.loading import always_draft
from edgespec.errors import OptionError
from tests.constraints.unusual_schemas import REFUSED, UNUSUAL
from tests.constraints.varied_schemas import SCHEMAS
from tests.raising import raises

pytestmark = pytest.mark.long

TEMPERATURES = (0.0, 0.8)
# Recursive schemas and open objects allow endless replies.
MAX_TOKENS = 150
FORMATS = FormatChecker()


def is_date_time(value: object) -> bool:
    """Check a format that jsonschema cannot check without another package. Leap seconds are valid."""
    text = str(value).upper().replace(":60", ":59")
    return datetime.fromisoformat(text).tzinfo is not None


def is_time(value: object) -> bool:
    return is_date_time(f"2000-01-01T{value}")


FORMATS.checks("date-time", raises=ValueError)(is_date_time)
FORMATS.checks("time", raises=ValueError)(is_time)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with always_draft(), edgespec.load("demo", method="auto", context=1024) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def finished() -> Counter[float]:
    """Count the replies that ended by themselves, by temperature."""
    return Counter()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_reply(runtime: Runtime, finished: Counter[float], name: str, temperature: float) -> None:
    schema = SCHEMAS[name]
    Draft202012Validator.check_schema(schema)
    settings: dict[str, Any] = {"temperature": temperature, "seed": 7, "max_tokens": MAX_TOKENS}
    prompt = f"Write JSON for this schema: {json.dumps(schema)[:200]}"
    plain = runtime.generate(prompt, schema=schema, method="none", **settings)
    drafted = runtime.generate(prompt, schema=schema, method="auto", **settings)
    assert drafted.tokens == plain.tokens
    assert "grammar" in drafted.method.effective
    if plain.finish_reason == "stop":
        finished[temperature] += 1
        Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(plain.text))


@pytest.mark.parametrize("max_tokens", [12, MAX_TOKENS])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_schemas(runtime: Runtime, name: str, max_tokens: int) -> None:
    schema = UNUSUAL[name]
    settings: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": max_tokens, "schema": schema}
    if name in REFUSED:
        with raises(OptionError, code="constraint_not_supported"):
            runtime.generate("Write JSON", **settings)
        return
    plain = runtime.generate("Write JSON", method="none", **settings)
    drafted = runtime.generate("Write JSON", method="auto", **settings)
    assert drafted.tokens == plain.tokens
    assert drafted.finish_reason == plain.finish_reason
    if plain.finish_reason == "stop":
        validator = validator_for(schema, default=Draft202012Validator)
        validator(schema, format_checker=FORMATS).validate(json.loads(plain.text))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_most_replies_ended(finished: Counter[float], temperature: float) -> None:
    assert finished[temperature] >= 0.8 * len(SCHEMAS)
