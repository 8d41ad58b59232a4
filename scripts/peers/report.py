"""Tables of the measured speeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    plain = Configuration(EDGESPEC, "none")
    for speeds, name in ((decode, "decode"), (total, "total")):
        best = fastest(speeds, [each for each in configurations if each.program != EDGESPEC])
        for baseline in (best, plain):
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
