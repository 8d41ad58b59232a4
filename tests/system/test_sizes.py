"""Amounts of memory as text."""

from __future__ import annotations

import pytest

from edgespec.errors import OptionError
from edgespec.system.sizes import parse_size
from tests.raising import raises


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (1234, 1234),
        ("1234", 1234),
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8g", 8 * 10**9),
        ("8 gib", 8 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("800M", 800 * 10**6),
        ("800MiB", 800 * 2**20),
        ("64K", 64_000),
        ("2TiB", 2 * 2**40),
        (" 10 B ", 10),
    ],
)
def test_parse_size(text: str | int, size: int) -> None:
    assert parse_size("memory", text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lots",
        "-1",
        "-1GB",
        "8XB",
        "GiB",
        "8iB",
        "1,5GB",
        "1e9",
        "8 G B",
        "nan",
        "٣GiB",
        "9" * 400,
        10**400,
        8,
        "8",
        " 1023 ",
        "0.5",
    ],
)
def test_invalid_sizes_are_refused(text: str | int) -> None:
    with raises(OptionError, "memory"):
        parse_size("memory", text)
