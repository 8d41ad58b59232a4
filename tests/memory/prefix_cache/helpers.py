"""Helpers for prefix cache tests: runtimes that reuse every prefix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec import Reply, Runtime
from edgespec.decode.drafter_set import DrafterSet
from edgespec.memory.prefix_cache.cache import HeadState, PrefixCache
from edgespec.memory.prefix_cache.disk import PrefixCacheDisk
from edgespec.memory.prefix_cache.store import ReuseCosts
from edgespec.model.base import LanguageModel

PLENTY = 1 << 30


class Always(ReuseCosts):
    """Reuse costs under which every reuse saves time, so that no test depends on the machine's speed."""

    def __init__(self) -> None:
        super().__init__(1e-3)

    def saves_time(self, tokens: int, size_bytes: float) -> bool:
        return tokens > 0


def keeper(
    model: LanguageModel,
    folder: Path | None = None,
    *,
    max_bytes: int = PLENTY,
    quota_bytes: int = PLENTY,
    identity: str = "a model",
    available: int = 1 << 40,
    max_copied_bytes: int | None = None,
    heads: Sequence[HeadState] = (),
) -> PrefixCache:
    """Create a prefix cache for a model, which also uses the disk if a folder is given."""
    disk = PrefixCacheDisk(identity, quota_bytes, folder) if folder else None
    return PrefixCache(
        model,
        max_bytes,
        disk,
        heads=heads,
        reuse_costs=Always(),
        max_copied_bytes=max_copied_bytes,
        available=lambda: available,
    )


def keeping(model: LanguageModel, folder: Path | None = None, others: Any = None, **options: Any) -> Runtime:
    """Create a runtime with a prefix cache."""
    kept = keeper(model, folder, **options)
    return Runtime(model, None, DrafterSet(model, others or {}), prefix_cache=kept)


def ask(runtime: Runtime, tokens: Sequence[int], **options: Any) -> Reply:
    """Return the complete reply to a prompt of tokens."""
    stream = runtime.stream_tokens(tokens, **options)
    for _ in stream:
        pass
    return stream.reply
