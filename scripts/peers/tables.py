"""Make a Markdown table of the speeds of edgespec and llama-server on several models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scripts.peers.configurations import Configuration
from scripts.peers.figures import (
    MeasuredReply,
    Speeds,
    compare,
    count_equal,
    decode_speed,
    fastest,
    total_speed,
)

_SERVER, _PLAIN = Configuration("llama-server", "none"), Configuration("edgespec", "none")
_AUTO = Configuration("edgespec", "auto")
_HEADER = (
    "model",
    "temperature",
    "prompts",
    "llama-server, tokens/s",
    "plain",
    "`auto`",
    "`auto`, worst prompt",
    "llama-server's best",
    "`auto` / llama-server's best",
    "same tokens",
)


def read_results(path: Path) -> list[MeasuredReply]:
    """Read the replies that scripts/bench_peers.py saved with --json."""
    return [MeasuredReply.from_json(reply) for reply in json.loads(path.read_text("utf-8"))["replies"]]


def comparison_table(results: Iterable[tuple[str, Sequence[MeasuredReply]]]) -> str:
    """Return a Markdown table with a row per model and temperature.

    Args:
        results: The name of each model, and its replies.
    """
    rows = [_HEADER, ("---",) * len(_HEADER)]
    rows += [row for name, replies in results for row in _rows(name, replies)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows(name: str, replies: Sequence[MeasuredReply]) -> Iterator[tuple[str, ...]]:
    for temperature in sorted({reply.temperature for reply in replies}):
        measured = [reply for reply in replies if reply.temperature == temperature]
        whole, decode = Speeds(measured, total_speed), Speeds(measured, decode_speed)
        servers = {each.configuration for each in measured if each.configuration.program == _SERVER.program}
        best = fastest(whole, sorted(servers, key=str))
        assert best is not None

        def ratio(
            configuration: Configuration,
            baseline: Configuration,
            speeds: Sequence[Speeds] = (whole, decode),
            *,
            is_worst: bool = False,
        ) -> str:
            found = [compare(each, configuration, baseline) for each in speeds]
            assert all(found)
            figures = [f"{each.worst if is_worst else each.ratio:.2f}" for each in found if each]
            return f"{figures[0]} ({figures[1]})"

        speeds = [f"{each.mean(_SERVER) or 0.0:.1f}" for each in (whole, decode)]
        equal = "{} of {}".format(*count_equal(measured, _AUTO, _PLAIN))
        yield (
            name,
            f"{temperature:g}",
            str(len({reply.prompt for reply in measured})),
            f"{speeds[0]} ({speeds[1]})",
            ratio(_PLAIN, _SERVER),
            ratio(_AUTO, _SERVER),
            ratio(_AUTO, _SERVER, is_worst=True),
            "plain" if best == _SERVER else f"`{best.name}` {ratio(best, _SERVER)}",
            ratio(_AUTO, best),
            equal,
        )
