"""Checks that damaged heads change no reply."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st

import edgespec
from edgespec.api.loading import always_draft
from edgespec.errors import EdgespecError

# Positions of bytes, and their new values.
BYTE_CHANGES = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4)


def check_same_replies(
    target: Path, method: str, head: Path, temperatures: Sequence[float] = (0.0, 0.8), **options: Any
) -> None:
    """Check that replies with a head are those of plain decoding."""
    with (
        always_draft(),
        edgespec.load(str(target), "none", method="none", context=256) as plain,
        edgespec.load(str(target), "none", method=method, head=head, context=256, **options) as drafting,
    ):
        for temperature in temperatures:
            asked: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3}
            reply = drafting.generate("the file", **asked)
            assert reply.stats.drafted_tokens
            assert reply.tokens == plain.generate("the file", **asked).tokens


def check_changed_bytes(
    target: Path, method: str, head: Path, changes: list[tuple[int, int]], header_bytes: int
) -> None:
    """Check that a head with a damaged header is either rejected or changes no reply.

    Damaged files may crash llama.cpp, but only in the child process that tests them first.
    """
    data = bytearray(head.read_bytes())
    for position, value in changes:
        data[position % header_bytes] = value
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "head.gguf"
        path.write_bytes(data)
        options: dict[str, Any] = {"methods": ["none", method], "head": path, "context": 256}
        try:
            with always_draft(), edgespec.load(str(target), "none", **options) as runtime:
                reply = runtime.generate("the file", method=method, **asked)
                assert reply.tokens == runtime.generate("the file", method="none", **asked).tokens
        except EdgespecError:
            pass
