"""The demo models, loaded once per test file, and their replies without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import edgespec
from edgespec import Reply, Runtime


@pytest.fixture(scope="module")
def demo() -> Iterator[Runtime]:
    with edgespec.load("demo") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def plain(demo: Runtime) -> Callable[..., Reply]:
    """Replies without drafts, each generated once."""
    made: dict[str, Reply] = {}

    def reply(prompt: str, **options: Any) -> Reply:
        key = repr((prompt, sorted(options.items())))
        if key not in made:
            made[key] = demo.generate(prompt, method="none", **options)
        return made[key]

    return reply
