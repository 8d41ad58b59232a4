"""Rows and reports of which only the figures matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgespec.bench.runs import Measurement, MethodConfig
from edgespec.decode.reply import MethodReport, Reply
from edgespec.engine.stats import Stats

TOKENS = 10


def row(
    prompt: str,
    config: MethodConfig,
    seconds_per_token: float,
    *,
    repeat: int = 0,
    category: str = "code",
    temperature: float = 0.0,
    tokens: tuple[int, ...] = tuple(range(TOKENS)),
    **counted: Any,
) -> Measurement:
    """Return a reply with this time per token, and no time for its prompt."""
    seconds = seconds_per_token * len(tokens)
    stats = Stats(
        generated_tokens=len(tokens),
        target_passes=len(tokens),
        verify_seconds=seconds,
        ttft_seconds=seconds_per_token,
        peak_memory_bytes=1000,
    )
    reply = Reply(
        "",
        tokens,
        "length",
        1,
        "t",
        None,
        MethodReport(config.method, config.method, ""),
        replace(stats, **counted),
    )
    return Measurement(prompt, category, temperature, repeat, 0, config, seconds, reply)
