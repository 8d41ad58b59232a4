"""Tables of measured speeds: one per temperature for the terminal, and one in Markdown for several models."""

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

EDGESPEC = "edgespec"
_HEADER = (
    f"  {'tokens/s':40} {'decode':>8} {'total':>8} {'per pass':>9}"
    f" {'equal to plain: other, same program':>36}"
)
_SERVER, _PLAIN = Configuration("llama-server", "none"), Configuration(EDGESPEC, "none")
_AUTO = Configuration(EDGESPEC, "auto")
_MARKDOWN_HEADER = (
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
    rows = [_MARKDOWN_HEADER, ("---",) * len(_MARKDOWN_HEADER)]
    rows += [row for name, replies in results for row in _markdown_rows(name, replies)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _markdown_rows(name: str, replies: Sequence[MeasuredReply]) -> Iterator[tuple[str, ...]]:
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


def report(order: Sequence[Configuration], replies: Sequence[MeasuredReply]) -> str:
    """Return the tables of one temperature.

    Args:
        order: Order of the configurations.
        replies: The replies at this temperature.
    """
    decode, total = Speeds(replies, decode_speed), Speeds(replies, total_speed)
    prompts = len({reply.prompt for reply in replies})
    measured = {reply.configuration for reply in replies}
    configurations = [each for each in order if each in measured]
    lines = [f"\ntemperature {replies[0].temperature:g}, {prompts} prompts", _HEADER]
    lines += [_row(each, configurations, replies, decode, total) for each in configurations]
    of_edgespec = [each for each in configurations if each.program == EDGESPEC]
    for speeds, name in ((decode, "decode"), (total, "total")):
        best = fastest(speeds, [each for each in configurations if each.program != EDGESPEC])
        for baseline in (best, _PLAIN):
            lines_of_baseline = (
                list(_ratios(speeds, of_edgespec, baseline)) if baseline in configurations else []
            )
            if lines_of_baseline:
                lines += [f"{name}, speed-up over {baseline}:", *lines_of_baseline]
    return "\n".join(lines)


def _row(
    configuration: Configuration,
    configurations: Sequence[Configuration],
    replies: Sequence[MeasuredReply],
    decode: Speeds,
    total: Speeds,
) -> str:
    runs = [reply.run for reply in replies if reply.configuration == configuration]
    per_pass = sum(len(run.tokens) for run in runs) / max(1, sum(run.passes for run in runs))
    plain = [each for each in configurations if each.name == "none"]
    plain_of_other = [each for each in plain if each.program != EDGESPEC]
    plain_of_same = [each for each in plain if each.program == configuration.program]
    equal = [
        "{} of {}".format(*count_equal(replies, configuration, baselines[0])) if baselines else "-"
        for baselines in (plain_of_other, plain_of_same)
    ]
    speeds = [f"{mean:.1f}" if (mean := each.mean(configuration)) else "-" for each in (decode, total)]
    # Show the methods that edgespec used if they differ from the one in the configuration's name.
    used = sorted({run.method for run in runs if run.method} - {configuration.name.partition(":")[0]})
    row = f"  {configuration!s:40} {speeds[0]:>8} {speeds[1]:>8} {per_pass:>9.2f} {equal[0]:>22},"
    return f"{row} {equal[1]:>12}" + (f"  used: {', '.join(used)}" if used else "")


def _ratios(
    speeds: Speeds, configurations: Sequence[Configuration], baseline: Configuration
) -> Iterator[str]:
    for each in configurations:
        comparison = compare(speeds, each, baseline) if each != baseline else None
        if comparison:
            categories = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in comparison.categories.items())
            yield f"  {each!s:20} {comparison}, worst prompt {comparison.worst:.2f}x; {categories}"
